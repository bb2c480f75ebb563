// An aggregator or a rank fails at any message of an allreduce through aggregators.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>

#include "aggregated_steps.h"
#include "faulty_link.h"
#include "ina/inproc_link.h"
#include "simulated_ranks.h"

namespace sparsecomm::test {
namespace {

using Kind = LinkFault::Kind;

constexpr int streams = 2;
constexpr int steps = 4;
constexpr int culprit = 1;  // a rank
constexpr std::size_t memory = std::size_t{16} << 20;

// Three rounds of each stream.
std::size_t numel_for(int aggregators) {
  return std::size_t(aggregators) * streams * 5 * (small_messages().block_bytes / 4) - 3;
}

struct Shape {
  int ranks, aggregators;
};

// What a rank has seen.
struct Witness {
  int applied = 0;
  std::string error;
  std::vector<int> accused;
  bool aborted_later = false;
  std::vector<std::string> log;
  std::vector<AggregatorLoss> lost;
  std::vector<std::vector<int>> messages;  // [step][aggregator]
};

class Cluster {
 public:
  // The fault's message is the seed.
  Cluster(Shape shape, LinkFault const& fault)
      : simulation(static_cast<std::uint64_t>(fault.message)),
        hub(shape.aggregators, memory, std::chrono::minutes(10), vote_policy, simulation),
        links(std::size_t(shape.ranks)),
        witnesses(std::size_t(shape.ranks)) {
    scene.fault = fault;
    scene.kill = [this](int aggregator) { hub.kill(aggregator); };
    scene.restart = [this](int aggregator) { hub.restart(aggregator); };
    scene.stop = [this](int aggregator) { hub.stop(aggregator); };
  }

  Surroundings surroundings() {
    Surroundings around;
    around.equip = [this](CommunicatorOptions& options, std::uint64_t /*run*/, int rank, int size) {
      auto const link = hub.connect({.job = {job, 0},
                                     .workers = static_cast<std::uint16_t>(size),
                                     .worker = static_cast<std::uint16_t>(rank)});
      options.aggregators = links[rank] = std::make_shared<FaultyLink>(link, scene, rank);
      options.aggregator_streams = streams;
      options.aggregator_retry = retry;
      options.log_aggregator = [this, rank](std::string const& line) {
        witnesses[rank].log.push_back(line);
      };
    };
    return around;
  }

  template <class T>
  void run(Communicator& communicator, std::size_t numel) {
    int const rank = communicator.rank();
    Witness& witness = witnesses[rank];
    auto const operation = std::make_shared<AggregatedSum<T>>(communicator, small_messages());
    for (int step = 0; step < steps; ++step) {
      auto const input = aggregated_input<T>(rank, communicator.size(), step, numel);
      auto data = input;
      operation->bind(data);
      links[rank]->begin();
      try {
        communicator.run(operation);
        EXPECT_EQ(data, aggregated_sum<T>(communicator.size(), step, numel))
            << "on rank " << rank << " in step " << step;
        ++witness.applied;
      } catch (Aborted const&) {
        witness.aborted_later = true;
      } catch (Error const& error) {
        EXPECT_EQ(witness.error, "") << "then: " << error.what();
        witness.error = error.what();
        auto const* const peer_error = dynamic_cast<PeerError const*>(&error);
        if (peer_error) witness.accused = peer_error->ranks();
        EXPECT_EQ(data, input);
      }
      for (int i = 0; i < links[rank]->size(); ++i) {
        witness.messages.resize(std::size_t(step) + 1);
        witness.messages.back().push_back(links[rank]->messages(i));
      }
    }
    witness.lost = communicator.lost_aggregators();
  }

  SeededSimulation simulation;
  InprocAggregators hub;
  std::uint64_t job = 0;
  int retry = steps;  // none within this test
  FaultScene scene;
  std::vector<std::shared_ptr<FaultyLink>> links;
  std::vector<Witness> witnesses;
  Duration time{};
};

void run_all(Cluster& cluster, Shape shape, CommunicatorOptions const& options, bool integers) {
  auto const body = [&](Communicator& communicator) {
    if (integers) return cluster.run<std::int32_t>(communicator, numel_for(shape.aggregators));
    cluster.run<float>(communicator, numel_for(shape.aggregators));
  };
  TimePoint const begin = cluster.simulation.now();
  expect_no_errors(
      simulate_ranks(cluster.simulation, shape.ranks, body, options, {}, cluster.surroundings()));
  cluster.time = cluster.simulation.now() - begin;
}

// From and to each aggregator, on each rank, in each step.
int messages_of_a_step(Shape shape) {
  Cluster cluster(shape, {});
  run_all(cluster, shape, {}, false);
  int const messages = cluster.witnesses[0].messages[0][0];
  for (Witness const& witness : cluster.witnesses) {
    EXPECT_EQ(witness.error, "");
    EXPECT_TRUE(witness.log.empty());
    EXPECT_TRUE(witness.lost.empty());
    for (auto const& counts : witness.messages) {
      EXPECT_EQ(counts, std::vector(std::size_t(shape.aggregators), messages));
    }
  }
  EXPECT_EQ(messages, streams * 3 * 2);
  return messages;
}

std::string describe(Shape shape, LinkFault const& fault) {
  return concat(shape.ranks, " ranks, ", shape.aggregators, " aggregators, ", name(fault.kind),
                " at message ", fault.message, ", byte ", fault.byte, ", of rank ", fault.rank);
}

// All ranks have the sums, of this and later operations, do without the aggregator and go on with
// the others.
void check_aggregator(Cluster& cluster, Shape shape) {
  LinkFault const fault = cluster.scene.fault;
  run_all(cluster, shape, {}, fault.message % 2 == 0);
  bool const waits = fault.kind == Kind::silent;
  Duration const patience = waits ? InaClient::default_patience : Duration::zero();
  EXPECT_LT(cluster.time, patience + std::chrono::seconds(1));
  EXPECT_GE(cluster.scene.met.load(), 1);
  std::string const address = concat("inproc:", fault.aggregator);
  for (Witness const& witness : cluster.witnesses) {
    EXPECT_EQ(witness.error, "");
    EXPECT_EQ(witness.applied, steps);
    ASSERT_EQ(witness.lost.size(), 1u);
    EXPECT_EQ(witness.lost[0].address, address);
    EXPECT_NE(witness.lost[0].why, "");
    ASSERT_EQ(witness.log.size(), 1u);
    EXPECT_NE(witness.log[0].find(address), std::string::npos) << witness.log[0];
    EXPECT_NE(witness.log[0].find(witness.lost[0].why), std::string::npos) << witness.log[0];
    for (int i = 0; i < shape.aggregators; ++i) {
      int const messages = witness.messages.back()[std::size_t(i)];
      EXPECT_EQ(messages > 0, i != fault.aggregator) << "aggregator " << i << ": " << messages;
    }
  }
}

void check_aggregator(Shape shape, LinkFault const& fault) {
  SCOPED_TRACE(describe(shape, fault));
  Cluster cluster(shape, fault);
  check_aggregator(cluster, shape);
}

void at_every_message(int messages, std::function<void(int message)> const& check) {
  for (int message = 0; message < messages; ++message) check(message);
}

class InaFailureTest : public ::testing::TestWithParam<Shape> {};

INSTANTIATE_TEST_SUITE_P(Shapes, InaFailureTest,
                         ::testing::Values(Shape{2, 1}, Shape{2, 2}, Shape{2, 3}, Shape{3, 1},
                                           Shape{3, 2}, Shape{3, 3}),
                         [](auto const& info) {
                           return concat("P", info.param.ranks, "A", info.param.aggregators);
                         });

// `byte` for a corruption only.
void check_messages(Shape shape, Kind kind, int rank, int byte = 0) {
  at_every_message(messages_of_a_step(shape), [&](int message) {
    check_aggregator(shape, {.kind = kind,
                             .aggregator = shape.aggregators / 2,
                             .rank = rank,
                             .message = message,
                             .byte = byte});
  });
}

void check_everywhere(Shape shape, Kind kind) {
  for (int const rank : {culprit, LinkFault::every_rank}) check_messages(shape, kind, rank);
}

TEST_P(InaFailureTest, AnAggregatorMayBeLostAtAnyMessage) {
  check_everywhere(GetParam(), Kind::lost);
}

// Those who were connected go on without it at first, and new communicators with it.
TEST_P(InaFailureTest, AnAggregatorMayRestartAtAnyMessage) {
  Shape const shape = GetParam();
  at_every_message(messages_of_a_step(shape), [&](int message) {
    LinkFault const fault{
        .kind = Kind::restart, .aggregator = shape.aggregators / 2, .message = message};
    SCOPED_TRACE(describe(shape, fault));
    Cluster cluster(shape, fault);
    check_aggregator(cluster, shape);
    ++cluster.job;
    cluster.scene.fault = {};
    cluster.witnesses.assign(std::size_t(shape.ranks), {});
    run_all(cluster, shape, {}, false);
    for (Witness const& witness : cluster.witnesses) {
      EXPECT_EQ(witness.applied, steps);
      EXPECT_TRUE(witness.lost.empty());
      for (auto const& counts : witness.messages) {
        EXPECT_EQ(counts, std::vector(std::size_t(shape.aggregators), streams * 3 * 2));
      }
    }
  });
}

// Lost in one step, and done without in the next, it is used again in those that follow.
TEST_P(InaFailureTest, OneThatIsBackIsUsedAgainByAllRanks) {
  Shape const shape = GetParam();
  at_every_message(messages_of_a_step(shape), [&](int message) {
    for (auto const& [kind, rank] :
         {std::pair(Kind::restart, LinkFault::every_rank), {Kind::lost, culprit}}) {
      LinkFault const fault{
          .kind = kind, .aggregator = shape.aggregators / 2, .rank = rank, .message = message};
      SCOPED_TRACE(describe(shape, fault));
      Cluster cluster(shape, fault);
      cluster.retry = 1;
      run_all(cluster, shape, {}, message % 2 == 0);
      for (Witness const& witness : cluster.witnesses) {
        EXPECT_EQ(witness.error, "");
        EXPECT_EQ(witness.applied, steps);
        EXPECT_TRUE(witness.lost.empty());
        ASSERT_EQ(witness.log.size(), 2u);
        EXPECT_NE(witness.log[1].find("answers again"), std::string::npos) << witness.log[1];
        auto const used = [&](int step) {
          return witness.messages[std::size_t(step)][std::size_t(fault.aggregator)];
        };
        EXPECT_EQ(used(2), 0);
        EXPECT_EQ(used(3), streams * 3 * 2);
      }
    }
  });
}

TEST_P(InaFailureTest, AnAggregatorMayFallSilentAtAnyMessage) {
  check_everywhere(GetParam(), Kind::silent);
}

// In each field of the header and of the plan, or the numbers, behind it; in the middle and at the
// end of the blocks.
TEST_P(InaFailureTest, AnyMessageMayBeCorrupted) {
  Shape const shape = GetParam();
  if (shape.aggregators == 3) GTEST_SKIP() << "as with two";
  for (int const byte : {0, 2, 3, 4, 8, 12, 14, 15, 16, 24, 32, 40, 48, 52, 54, 55, 56, 80, -1}) {
    check_messages(shape, Kind::corrupt, culprit, byte);
  }
  for (int const byte : {3, 32, -1}) {
    check_messages(shape, Kind::corrupt, LinkFault::every_rank, byte);
  }
}

TEST_P(InaFailureTest, AnyMessageMayBeTruncated) { check_everywhere(GetParam(), Kind::truncate); }

TEST_P(InaFailureTest, AnyMessageMayComeTwice) { check_everywhere(GetParam(), Kind::duplicate); }

TEST_P(InaFailureTest, AnyMessageMayBeOfAFormerOperation) {
  check_everywhere(GetParam(), Kind::former);
}

void expect_accused(Cluster const& cluster, Shape shape) {
  EXPECT_EQ(cluster.scene.met.load(), 1);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    if (rank == culprit) continue;
    SCOPED_TRACE(concat("rank ", rank));
    Witness const& witness = cluster.witnesses[std::size_t(rank)];
    EXPECT_EQ(witness.accused, std::vector{culprit}) << "it says: '" << witness.error << "'";
    EXPECT_EQ(witness.applied, 1);
    EXPECT_TRUE(witness.aborted_later);
  }
}

TEST_P(InaFailureTest, ARankThatDiesAtAnyMessageIsNamed) {
  Shape const shape = GetParam();
  at_every_message(messages_of_a_step(shape), [&](int message) {
    LinkFault const fault{.kind = Kind::die, .rank = culprit, .message = message};
    SCOPED_TRACE(describe(shape, fault));
    Cluster cluster(shape, fault);
    run_all(cluster, shape, {}, false);
    EXPECT_LT(cluster.time, std::chrono::seconds(2));
    expect_accused(cluster, shape);
  });
}

TEST_P(InaFailureTest, ARankThatStallsAtAnyMessageIsNamedAtTheDeadline) {
  Shape const shape = GetParam();
  if (shape.aggregators != 2) GTEST_SKIP() << "as with two";
  at_every_message(messages_of_a_step(shape), [&](int message) {
    LinkFault const fault{.kind = Kind::stall, .rank = culprit, .message = message};
    SCOPED_TRACE(describe(shape, fault));
    Cluster cluster(shape, fault);
    CommunicatorOptions options;
    options.timeout = std::chrono::seconds(10);
    cluster.scene.stall = [&] { cluster.simulation.sleep(3 * options.timeout); };
    run_all(cluster, shape, options, false);
    expect_accused(cluster, shape);
  });
}

}  // namespace
}  // namespace sparsecomm::test
