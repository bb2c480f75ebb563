// Rings of ranks that are threads, and of simulated ones.
#include <algorithm>
#include <ctime>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "ranks.h"
#include "rings.h"
#include "simulated_network.h"
#include "transport/doorbell.h"
#include "transport/lazy.h"
#include "ucx_ranks.h"

namespace sparsecomm::test {
namespace {

class RingTest : public testing::TestWithParam<int> {};

TEST_P(RingTest, OfThreads) {
  auto const transports = make_inproc_transports(GetParam());
  expect_no_errors(on_threads(GetParam(), [&](int rank) { check_rings(*transports[rank]); }));
}

TEST_P(RingTest, ThroughTransportsThatStandBeforeAnother) {
  auto inner = make_inproc_transports(GetParam());
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < GetParam(); ++rank) {
    transports.push_back(make_faulty(
        make_lazy_transport(rank, GetParam(),
                            [&inner, rank](auto const&) { return std::move(inner[rank]); }),
        {FaultKind::die, 1u << 30}));
    // Before it has connected.
    transports.back()->wake();
    EXPECT_EQ(transports.back()->idle(0, Deadline(steady_clock(), long_time())), Woken::woken);
  }
  expect_no_errors(on_threads(GetParam(), [&](int rank) { check_rings(*transports[rank]); }));
}

TEST_P(RingTest, OverUcx) {
  std::string const problem = ucx_problem(ucx_options_here());
  if (!problem.empty()) GTEST_SKIP() << problem;
  auto const transports = make_ucx_transports(GetParam());
  expect_no_errors(on_threads(GetParam(), [&](int rank) { check_rings(*transports[rank]); }));
}

TEST_P(RingTest, OverASimulatedNetwork) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SeededSimulation simulation(seed);
    simulation.run([&] {
      auto const transports = make_network_transports(simulation, GetParam());
      std::vector<std::thread> ranks;
      for (auto const& transport : transports) {
        ranks.push_back(simulation.start("a rank", [&] {
          check_rings(*transport, simulation, simulation, std::chrono::seconds(1));
        }));
      }
      for (std::thread& rank : ranks) simulation.join(rank);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, RingTest, testing::Values(1, 2, 3, 8));

// A rank that has gone wakes the others: nothing that needs all of them will happen any more.
void expect_loss_is_noticed(std::vector<std::unique_ptr<Transport>> transports) {
  std::thread leaver([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    transports[2]->abort();
  });
  expect_no_errors(on_threads(2, [&](int rank) {
    try {
      transports[rank]->idle(0, Deadline(steady_clock(), long_time()));
      ADD_FAILURE() << "nothing was noticed";
    } catch (PeerLost const& lost) {
      EXPECT_EQ(lost.ranks(), std::vector<int>{2});
    }
  }));
  leaver.join();
}

TEST(RingLossTest, OfAThread) { expect_loss_is_noticed(make_inproc_transports(3)); }

TEST(RingLossTest, OverUcx) {
  std::string const problem = ucx_problem(ucx_options_here());
  if (!problem.empty()) GTEST_SKIP() << problem;
  expect_loss_is_noticed(make_ucx_transports(3));
}

TEST(HighestRingTest, NumbersThatComeRoundAreNotThoseOfLongAgo) {
  HighestRing rings;
  rings.add(5);
  EXPECT_TRUE(rings.above(4));
  EXPECT_FALSE(rings.above(5));
  std::uint32_t const half = 1u << 31;
  EXPECT_FALSE(rings.above(5 + half + 1));
  rings.add(5 + half + 2);
  EXPECT_TRUE(rings.above(5 + half + 1));
}

TEST(DoorbellTest, IdlesWithoutTheProcessor) {
  std::string const problem = ucx_problem(ucx_options_here());
  std::vector<std::unique_ptr<Transport>> transports = make_inproc_transports(2);
  if (problem.empty()) std::ranges::move(make_ucx_transports(2), std::back_inserter(transports));
  for (auto const& transport : transports) {
    for (int call = 0; call < 200; ++call) {  // of which one may come just as it idles
      std::thread waker([&] { transport->wake(); });
      transport->idle(0, Deadline(steady_clock(), long_time()));
      waker.join();
    }
    std::clock_t const before = std::clock();
    auto const late = patiently(std::chrono::milliseconds(300));
    EXPECT_EQ(transport->idle(0, Deadline(steady_clock(), late)), Woken::late);
    EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 10) << transport->name();
  }
}

TEST(RingMessageTest, WhatIsDamagedAccusesItsSender) {
  RingMessage const ring = make_ring(7, 9);
  EXPECT_EQ(number_of(ring, 7, 3), 9u);
  EXPECT_EQ(number_of(ring, 8, 3), std::nullopt);
  for (std::size_t bit = 0; bit < 8 * sizeof ring; ++bit) {
    RingMessage damaged = ring;
    auto const bytes = std::as_writable_bytes(std::span(&damaged, 1));
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_THROW(number_of(damaged, 7, 3), PeerInvalid) << bit;
  }
  EXPECT_THROW(number_of({}, 0, 3), PeerInvalid);
}

}  // namespace
}  // namespace sparsecomm::test
