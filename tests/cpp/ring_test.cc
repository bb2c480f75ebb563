// Rings of ranks that are threads, and of simulated ones.
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
    // Connects, as an operation would: nobody wakes it before.
    transports.back()->idle(0, Deadline(steady_clock(), Duration::zero()));
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
  on_threads(2, [&](int rank) {
    try {
      transports[rank]->idle(0, Deadline(steady_clock(), long_time()));
      ADD_FAILURE() << "nothing was noticed";
    } catch (PeerLost const& lost) {
      EXPECT_EQ(lost.ranks(), std::vector<int>{2});
    }
  });
  leaver.join();
}

TEST(RingLossTest, OfAThread) { expect_loss_is_noticed(make_inproc_transports(3)); }

TEST(RingLossTest, OverUcx) {
  std::string const problem = ucx_problem(ucx_options_here());
  if (!problem.empty()) GTEST_SKIP() << problem;
  expect_loss_is_noticed(make_ucx_transports(3));
}

TEST(RingMessageTest, WhatIsNoneOfItsRunAccusesItsSender) {
  RingMessage const ring = make_ring(7, 9);
  EXPECT_EQ(number_of(ring, 7, 3), 9u);
  EXPECT_THROW(number_of(ring, 8, 3), PeerInvalid);
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
