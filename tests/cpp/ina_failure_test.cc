// An aggregator or a rank fails at any message of an allreduce through aggregators.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>

#include "failing_aggregators.h"

namespace sparsecomm::test {
namespace {

using Kind = LinkFault::Kind;
using Cluster = FailingAggregators;
using Shape = FailingAggregators::Shape;

constexpr int steps = FailingAggregators::steps;
constexpr int culprit = 1;  // a rank

std::uint64_t seed_of(LinkFault const& fault) { return std::uint64_t(fault.message); }

void run_all(Cluster& cluster, CommunicatorOptions const& options, bool integers) {
  expect_no_errors(cluster.run(options, integers));
  for (Witness const& witness : cluster.witnesses) EXPECT_EQ(witness.problem, "");
}

// From and to each aggregator, on each rank, in each step.
int messages_of_a_step(Shape shape) {
  Cluster cluster(shape, {}, 0);
  run_all(cluster, {}, false);
  int const messages = cluster.witnesses[0].messages[0][0];
  for (Witness const& witness : cluster.witnesses) {
    EXPECT_EQ(witness.error, "");
    EXPECT_TRUE(witness.log.empty());
    EXPECT_TRUE(witness.lost.empty());
    for (auto const& counts : witness.messages) {
      EXPECT_EQ(counts, std::vector(std::size_t(shape.aggregators), messages));
    }
  }
  EXPECT_EQ(messages, Cluster::messages_of_a_step);
  return messages;
}

// All ranks have the sums, of this and later operations, do without the aggregator and go on with
// the others.
void check_aggregator(Cluster& cluster, Shape shape) {
  LinkFault const fault = cluster.scene.fault;
  run_all(cluster, {}, fault.message % 2 == 0);
  bool const waits = fault.kind == Kind::silent;
  Duration const patience = waits ? InaClient::default_patience : Duration::zero();
  EXPECT_LT(cluster.time, patience + std::chrono::seconds(1));
  EXPECT_GE(cluster.scene.met.load(), 1);
  std::string const address = cluster.address();
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
  Cluster cluster(shape, fault, seed_of(fault));
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
    Cluster cluster(shape, fault, seed_of(fault));
    check_aggregator(cluster, shape);
    ++cluster.job;
    cluster.scene.fault = {};
    cluster.witnesses.assign(std::size_t(shape.ranks), {});
    run_all(cluster, {}, false);
    for (Witness const& witness : cluster.witnesses) {
      EXPECT_EQ(witness.applied, steps);
      EXPECT_TRUE(witness.lost.empty());
      for (auto const& counts : witness.messages) {
        EXPECT_EQ(counts, std::vector(std::size_t(shape.aggregators), Cluster::messages_of_a_step));
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
      Cluster cluster(shape, fault, seed_of(fault));
      cluster.retry = 1;
      run_all(cluster, {}, message % 2 == 0);
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
        EXPECT_EQ(used(3), Cluster::messages_of_a_step);
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
    Cluster cluster(shape, fault, seed_of(fault));
    run_all(cluster, {}, false);
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
    Cluster cluster(shape, fault, seed_of(fault));
    CommunicatorOptions options;
    options.timeout = std::chrono::seconds(10);
    cluster.scene.stall = [&] { cluster.simulation.sleep(3 * options.timeout); };
    run_all(cluster, options, false);
    expect_accused(cluster, shape);
  });
}

}  // namespace
}  // namespace sparsecomm::test
