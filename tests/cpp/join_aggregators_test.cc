// What ranks agree on before they use aggregators: their addresses, a job, and that all are joined.
#include "engine/join_aggregators.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/sparse_collectives.h"
#include "ina_cluster.h"
#include "ranks.h"
#include "transport/lazy.h"

namespace sparsecomm::test {
namespace {

constexpr Duration limit = std::chrono::seconds(5);

using Lists = std::vector<std::vector<std::string>>;

// An operation of nothing, which counts what becomes of it.
class Nothing final : public Operation {
 public:
  Proposal prepare() override { return {.text = "operation=nothing"}; }
  void run(Channel& /*channel*/, Agreement const& /*agreement*/) override { ++runs; }
  void roll_back() noexcept override { ++roll_backs; }
  int runs = 0, roll_backs = 0;
};

class Summed final : public Operation {
 public:
  explicit Summed(Communicator& communicator)
      : dense_(find_algorithm("ina").dense->make<float>({}, communicator.services())) {}
  Proposal prepare() override { return {.text = "operation=sum"}; }
  void run(Channel& channel, Agreement const& /*agreement*/) override {
    dense_->run(channel, data, Reduction::sum, 1);
    dense_->write(data);
  }
  std::vector<float> data = std::vector<float>(10000, 1);

 private:
  std::unique_ptr<DenseAllreduce<float>> dense_;
};

// Each rank's list, over TCP.
Surroundings with_lists(Lists lists, Duration connect_timeout = limit) {
  Surroundings around;
  around.equip = [=](CommunicatorOptions& options, std::uint64_t, int rank, int) {
    options.aggregator_addresses = {.addresses = lists[std::size_t(rank)],
                                    .messages = messages_over(MessageTransport::tcp),
                                    .connect_timeout = connect_timeout};
  };
  return around;
}

Lists alike(int ranks, std::vector<std::string> const& list) { return Lists(ranks, list); }

// An address at which nobody listens.
std::string nobody() { return local_address(listen_at("127.0.0.1:0")); }

// What the first operation of each rank says; the data is not touched.
std::vector<std::string> said_by(Lists const& lists, Duration connect_timeout = limit) {
  auto const ranks = static_cast<int>(lists.size());
  std::vector<std::string> said(lists.size());
  auto const errors = run_ranks(
      ranks,
      [&](Communicator& communicator) {
        auto const nothing = std::make_shared<Nothing>();
        try {
          communicator.run(nothing);
          ADD_FAILURE() << "no error";
        } catch (Error const& error) {
          said[std::size_t(communicator.rank())] = error.what();
        }
        EXPECT_EQ(nothing->runs, 0);
        EXPECT_EQ(nothing->roll_backs, 1);
      },
      patient_options(), std::nullopt, with_lists(lists, connect_timeout));
  expect_no_errors(errors);
  for (std::string const& other : said) EXPECT_EQ(other, said.front());
  return said;
}

TEST(JoinAggregators, RanksReduceThroughThem) {
  for (int const count : {1, 2}) {
    std::vector<std::unique_ptr<RunningServer>> servers;
    std::vector<std::string> list;
    for (int i = 0; i < count; ++i) {
      servers.push_back(std::make_unique<RunningServer>());
      list.push_back(servers.back()->address());
    }
    for (int const ranks : {2, 3, 4}) {
      auto const errors = run_ranks(
          ranks,
          [&](Communicator& communicator) {
            EXPECT_EQ(communicator.missing(find_algorithm("ina")), "");
            for (int step = 0; step < 2; ++step) {
              auto const sum = std::make_shared<Summed>(communicator);
              communicator.run(sum);
              EXPECT_EQ(sum->data, std::vector<float>(sum->data.size(), float(ranks)));
            }
            EXPECT_EQ(communicator.services().aggregators->left(), (1u << count) - 1);
          },
          patient_options(), std::nullopt, with_lists(alike(ranks, list)));
      expect_no_errors(errors);
    }
  }
}

// Two groups of ranks at once, at one aggregator: each has drawn a job of its own.
TEST(JoinAggregators, GroupsDoNotMeetInAJob) {
  RunningServer const server;
  auto const group = [&](int ranks) {
    auto const errors = run_ranks(
        ranks,
        [&](Communicator& communicator) {
          auto const sum = std::make_shared<Summed>(communicator);
          communicator.run(sum);
          EXPECT_EQ(sum->data.front(), float(ranks));
        },
        patient_options(), std::nullopt, with_lists(alike(ranks, {server.address()})));
    expect_no_errors(errors);
  };
  std::thread other([&] { group(2); });
  group(3);
  other.join();
}

TEST(JoinAggregators, ARankAloneConnectsToNone) {
  auto const errors = run_ranks(
      1,
      [](Communicator& communicator) {
        EXPECT_EQ(communicator.services().aggregators, nullptr);
        communicator.run(std::make_shared<Nothing>());
      },
      patient_options(), std::nullopt, with_lists({{nobody()}}));
  expect_no_errors(errors);
}

TEST(JoinAggregators, DifferentListsAreNamedOnAllRanks) {
  RunningServer const server;
  std::string const one = server.address(), two = "127.0.0.1:1";
  std::string const said = said_by({{one, two}, {one}, {one, two}}).front();
  EXPECT_NE(
      said.find("aggregators: " + one + " on rank 1 but " + one + ", " + two + " on ranks 0, 2"),
      std::string::npos)
      << said;
  EXPECT_NE(said_by({{one}, {}}).front().find("aggregators: " + one + " on rank 0 but nothing"),
            std::string::npos);
}

// Of several ranks that cannot, the lowest is named.
TEST(JoinAggregators, WhatIsNotReachedIsNamedOnAllRanks) {
  RunningServer const server;
  std::string const address = nobody();
  std::string const said = said_by(alike(3, {server.address(), address})).front();
  EXPECT_NE(said.find("rank 0: cannot connect to " + address), std::string::npos) << said;
}

// One rank too many for the aggregator, whichever comes last.
TEST(JoinAggregators, ARankThatIsNotTakenFailsTheOthersToo) {
  AggregatorOptions options;
  options.connections = 2;
  RunningServer const server(options);
  EXPECT_NE(said_by(alike(3, {server.address()})).front().find(server.address()),
            std::string::npos);
}

TEST(JoinAggregators, OneThatDoesNotAnswerTakesTheTimeOfOneConnect) {
  auto const silent = listen_at("127.0.0.1:0");
  std::string const address = local_address(silent);
  TimePoint const begin = steady_clock().now();
  EXPECT_NE(said_by(alike(2, {address}), std::chrono::milliseconds(300)).front().find(address),
            std::string::npos);
  EXPECT_GE(steady_clock().now() - begin, std::chrono::milliseconds(300));
  EXPECT_LT(steady_clock().now() - begin, long_time() / 2);
}

// What was missing is there when the next operation comes.
TEST(JoinAggregators, TheNextOperationJoinsAnew) {
  RunningServer const server;
  std::string const address = nobody();
  std::unique_ptr<RunningServer> late;
  std::mutex mutex;
  auto const errors = run_ranks(
      2,
      [&](Communicator& communicator) {
        auto const sum = std::make_shared<Summed>(communicator);
        EXPECT_THROW(communicator.run(sum), AggregatorsUnavailable);
        {
          std::lock_guard const lock(mutex);
          AggregatorOptions options;
          options.listen = address;
          if (!late) late = std::make_unique<RunningServer>(options);
        }
        communicator.run(sum);
        EXPECT_EQ(sum->data.front(), 2.0F);
      },
      patient_options(), std::nullopt, with_lists(alike(2, {server.address(), address})));
  expect_no_errors(errors);
}

// Reduces as often as it takes until an attempt to take aggregators again has been made.
void reduce_until_an_attempt(Communicator& communicator) {
  for (int step = 0; step <= CommunicatorOptions{}.aggregator_retry; ++step) {
    auto const sum = std::make_shared<Summed>(communicator);
    communicator.run(sum);
    ASSERT_EQ(sum->data, std::vector<float>(sum->data.size(), 2)) << step;
  }
}

// An aggregator of two, or the only one, is lost, and another is started at its address meanwhile.
void lose_and_restart(std::vector<AggregatorOptions> options, AggregatorOptions again,
                      Surroundings const& given,
                      std::function<void(Communicator&, std::uint64_t all)> const& check) {
  std::vector<std::unique_ptr<RunningServer>> servers;
  std::vector<std::string> list;
  for (AggregatorOptions const& one : options) {
    servers.push_back(std::make_unique<RunningServer>(one));
    list.push_back(servers.back()->address());
  }
  again.listen = list.back();
  Surroundings around = given;
  around.equip = [&, equip = given.equip](CommunicatorOptions& wanted, std::uint64_t seed, int rank,
                                          int size) {
    with_lists(alike(2, list)).equip(wanted, seed, rank, size);
    if (equip) equip(wanted, seed, rank, size);
  };
  std::uint64_t const all = ~std::uint64_t{0} >> (64 - list.size());
  std::barrier together(2);
  auto const errors = run_ranks(
      2,
      [&](Communicator& communicator) {
        auto const on_rank_0 = [&](auto const& task) {
          together.arrive_and_wait();
          if (communicator.rank() == 0) task();
          together.arrive_and_wait();
        };
        communicator.run(std::make_shared<Summed>(communicator));
        on_rank_0([&] { servers.back()->stop(); });
        auto const sum = std::make_shared<Summed>(communicator);
        communicator.run(sum);
        EXPECT_EQ(sum->data.front(), 2.0F);
        EXPECT_EQ(communicator.services().aggregators->left(), all >> 1);
        EXPECT_EQ(communicator.lost_aggregators().size(), 1u);
        on_rank_0([&] { servers.back() = std::make_unique<RunningServer>(again); });
        reduce_until_an_attempt(communicator);
        check(communicator, all);
      },
      patient_options(), std::nullopt, around);
  expect_no_errors(errors);
}

TEST(JoinAggregators, OneThatIsBackIsUsedAgain) {
  for (int const count : {1, 2}) {
    std::mutex mutex;
    std::vector<std::string> said;
    Surroundings around;
    around.equip = [&](CommunicatorOptions& options, std::uint64_t, int, int) {
      options.aggregator_addresses.log = [&](std::string const& text) {
        std::lock_guard const lock(mutex);
        said.push_back(text);
      };
    };
    lose_and_restart(std::vector<AggregatorOptions>(std::size_t(count)), {}, around,
                     [](Communicator& communicator, std::uint64_t all) {
                       EXPECT_EQ(communicator.services().aggregators->left(), all);
                       EXPECT_TRUE(communicator.lost_aggregators().empty());
                       auto const before = communicator.counters().sent_bytes.back();
                       auto const sum = std::make_shared<Summed>(communicator);
                       communicator.run(sum);
                       EXPECT_EQ(sum->data.front(), 2.0F);
                       EXPECT_GT(communicator.counters().sent_bytes.back(), before);
                     });
    ASSERT_EQ(said.size(), 4u);  // lost, and back, on both ranks
    EXPECT_NE(said.back().find("answers again"), std::string::npos) << said.back();
  }
}

TEST(JoinAggregators, OneThatNotAllRanksReachIsNotUsedAgain) {
  AggregatorOptions asking;
  asking.authenticate = [](std::span<const std::byte>, Proof const&) { return "a team"; };
  Surroundings around;
  around.equip = [](CommunicatorOptions& options, std::uint64_t, int rank, int) {
    if (rank != 0) return;
    options.aggregator_addresses.prove = [](std::span<const std::byte>) { return Proof{}; };
  };
  lose_and_restart({{}, {}}, asking, around, [](Communicator& communicator, std::uint64_t all) {
    EXPECT_EQ(communicator.services().aggregators->left(), all >> 1);
    EXPECT_EQ(communicator.lost_aggregators().size(), 1u);
  });
}

// Ends what a rank waits for while it connects.
TEST(JoinAggregators, ClosingEndsTheWait) {
  auto const silent = listen_at("127.0.0.1:0");
  TimePoint const begin = steady_clock().now();
  auto const errors = run_ranks(
      2,
      [&](Communicator& communicator) {
        auto const handle = communicator.submit(std::make_shared<Nothing>());
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        communicator.close();
        EXPECT_THROW(handle.wait(), Error);
      },
      patient_options(), std::nullopt, with_lists(alike(2, {local_address(silent)}), long_time()));
  expect_no_errors(errors);
  EXPECT_LT(steady_clock().now() - begin, long_time() / 2);
}

// Ranks that connect when they are first used join after that, and know of the service before.
TEST(JoinAggregators, LazyTransportsJoinOnFirstUse) {
  RunningServer const server;
  auto inproc = make_inproc_transports(2);
  std::vector<std::unique_ptr<Transport>> lazy;
  for (int rank = 0; rank < 2; ++rank) {
    lazy.push_back(make_lazy_transport(rank, 2, [&inproc, rank](std::function<void()> const&) {
      return std::move(inproc[std::size_t(rank)]);
    }));
  }
  auto const errors = run_ranks(
      std::move(lazy),
      [](Communicator& communicator) {
        auto const sum = std::make_shared<Summed>(communicator);
        communicator.run(sum);
        EXPECT_EQ(sum->data.front(), 2.0F);
      },
      patient_options(), std::nullopt, with_lists(alike(2, {server.address()})));
  expect_no_errors(errors);
}

}  // namespace
}  // namespace sparsecomm::test
