// The policies that benchmarks compare with ours reduce as a dense sum does, and send what they
// say.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "benchmark/policies.h"
#include "ina_cluster.h"

namespace sparsecomm::test {
namespace {

using std::chrono::seconds;

JobMember member(int rank, int workers) {
  return {.job = some_job,
          .workers = static_cast<std::uint16_t>(workers),
          .worker = static_cast<std::uint16_t>(rank)};
}

class PolicyTest : public ::testing::TestWithParam<PolicyEntry> {};

INSTANTIATE_TEST_SUITE_P(Policies, PolicyTest, ::testing::ValuesIn(policies()),
                         [](auto const& info) { return std::string(info.param.name); });

TEST_P(PolicyTest, ReducesAsDenseDoes) {
  std::mt19937_64 random(11);
  for (auto const& [workers, aggregators, streams, window] :
       {std::array{1, 1, 1, 16}, {2, 1, 3, 1}, {3, 2, 4, 7}, {4, 4, 1, 64}, {5, 3, 8, 16}}) {
    InprocAggregators hub(aggregators, std::size_t{64} << 20, seconds(20), GetParam().policy);
    std::vector<InaPlan> plans;
    std::vector<std::vector<Bytes>> inputs;
    for (std::uint64_t const elements : {0, 1, 31, 256, 5000, 60000}) {
      for (double const zero : {0., .5, .95, 1.}) {
        plans.push_back({.elements = elements,
                         .block_bytes = 256,
                         .workers = static_cast<std::uint16_t>(workers),
                         .window = static_cast<std::uint8_t>(window)});
        inputs.emplace_back();
        for (int rank = 0; rank < workers; ++rank) {
          inputs.back().push_back(random_blocks<float>(plans.back(), zero, random));
        }
      }
    }
    for_each_rank(workers, [&](int rank) {
      InaClient client(hub.connect(member(rank, workers)), rank, streams,
                       InaClient::default_patience, {}, GetParam().policy);
      for (std::size_t i = 0; i < plans.size(); ++i) {
        Bytes const expected = dense_reduction(plans[i], inputs[i]);
        Bytes output(inputs[i][rank].size(), std::byte{0x5a});
        auto const written = client.reduce(plans[i], inputs[i][rank], output, within(seconds(20)));
        ASSERT_EQ(completed(output, written, std::byte{0x5a}), expected) << "plan " << i;
        Bytes in_place = inputs[i][rank];
        client.reduce(plans[i], in_place, in_place, within(seconds(20)));
        ASSERT_EQ(in_place, expected) << "plan " << i;
      }
    });
  }
}

// Bytes of rank 0 in one stream.
struct Traffic {
  std::uint64_t sent = 0, received = 0;
  bool operator==(Traffic const&) const = default;
};

using Blocks = std::vector<std::uint32_t>;

bool contains(Blocks const& blocks, std::uint32_t block) {
  return std::ranges::binary_search(blocks, block);
}

// By the words of next_pointers.h, column by column.
Traffic next_pointer_traffic(InaPlan const& plan, Blocks const& own, Blocks const& every) {
  Traffic traffic{.sent = sizeof(InaPlanRecord), .received = 0};
  std::uint64_t rounds = 0;
  for (std::uint32_t column = 0; column < plan.window && column < plan.blocks(); ++column) {
    Blocks reduced{column};
    for (std::uint32_t block = column + plan.window; block < plan.blocks(); block += plan.window) {
      if (contains(every, block)) reduced.push_back(block);
    }
    for (std::uint32_t const block : reduced) {
      if (contains(own, block)) traffic.sent += plan.block_bytes;
      if (contains(every, block)) traffic.received += plan.block_bytes;
    }
    traffic.sent += reduced.size() * 4;
    traffic.received += (reduced.size() - 1) * 4;
    rounds = std::max<std::uint64_t>(rounds, reduced.size());
  }
  traffic.sent += rounds * sizeof(InaHeader);
  traffic.received += rounds * sizeof(InaHeader);
  return traffic;
}

TEST(NextPointerTest, SendsBlocksAndANumberForEachColumn) {
  constexpr int workers = 3;
  std::mt19937_64 random(5);
  InprocAggregators hub(1, std::size_t{64} << 20, seconds(20), policy_named("omnireduce"));
  for (double const zero : {0., .5, .9, .99}) {
    InaPlan const plan{.elements = 64 * 999, .block_bytes = 256, .workers = workers, .window = 16};
    std::vector<Bytes> inputs(workers);
    for (Bytes& input : inputs) input = random_blocks<float>(plan, zero, random);
    Blocks every;
    for (Bytes const& input : inputs) {
      Blocks merged;
      std::ranges::set_union(every, nonzero_blocks(input, plan.block_bytes),
                             std::back_inserter(merged));
      every = merged;
    }
    for_each_rank(workers, [&](int rank) {
      InaClient client(hub.connect(member(rank, workers)), rank, 1, InaClient::default_patience, {},
                       policy_named("omnireduce"));
      Bytes output(plan.bytes());
      client.reduce(plan, inputs[rank], output, within(seconds(20)));
      Traffic const counted{.sent = client.sent_bytes(), .received = client.received_bytes()};
      EXPECT_EQ(counted, next_pointer_traffic(plan, nonzero_blocks(inputs[rank], 256), every))
          << "of rank " << rank << ", " << counted.sent << " and " << counted.received;
    });
  }
}

TEST(NextPointerTest, NumbersAreChecked) {
  InaPlan const plan{.elements = 6400, .block_bytes = 256, .workers = 1, .window = 4};
  auto const failure_of = [&](std::vector<std::uint32_t> const& numbers) {
    auto const aggregator = policy_named("omnireduce").make_aggregator(plan);
    TimePoint const now = steady_clock().now();
    aggregator->start(plan, 1, now, seconds(1));
    BlockList next;
    for (std::uint32_t const number : numbers) next.push_back(number);
    Bytes head(most_head_bytes(plan.window));
    InaMessage const message = encode_contribution({.operation = 1}, plan, next, {}, {}, head);
    EXPECT_TRUE(aggregator->receive(0, assemble(message), now));
    return aggregator->failure();
  };
  constexpr std::uint32_t none = ~std::uint32_t{0};
  EXPECT_EQ(failure_of({4, 9, 6, none}), "");
  for (auto const& [numbers, wrong] : {
           std::pair{std::vector<std::uint32_t>{4, 5, 6}, "3 next blocks"},
           {{4, 5, 6, 8}, "block 8 follows block 3"},  // of another column
           {{4, 5, 6, 3}, "block number is 3"},        // of the round itself
           {{4, 5, 6, 103}, "block number is 103"},    // there are 100
       }) {
    EXPECT_NE(failure_of(numbers).find(wrong), std::string::npos) << failure_of(numbers);
  }
}

// A worker with blocks 0, 5 and 6 of columns 0, 1 and 2 of four, and what it is told of round 0.
TEST(NextPointerTest, AnUpdateMustNotLeaveOutWhatTheWorkerHas) {
  InaPlan const plan{.elements = 6400, .block_bytes = 256, .workers = 1, .window = 4};
  Bytes input(plan.bytes());
  for (std::size_t const block : {0, 5, 6}) input[block * 256] = std::byte{1};
  auto const problem_of = [&](std::uint64_t bitmap, std::vector<std::uint32_t> const& numbers) {
    auto const worker = policy_named("omnireduce").make_worker();
    TimePoint const now = steady_clock().now();
    Bytes output(plan.bytes());
    worker->start(plan, 0, 1, input, output, now, seconds(1));
    BlockList next;
    for (std::uint32_t const number : numbers) next.push_back(number);
    Bytes head(most_head_bytes(plan.window));
    Bytes const blocks(bitmap == 1 ? 256 : 0);
    InaMessage const update = encode_update({.operation = 1, .bitmap = bitmap}, next, blocks, head);
    try {
      worker->receive(assemble(update), now);
    } catch (MalformedFrame const& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(problem_of(1, {5, 6}), "");
  EXPECT_EQ(problem_of(1, {4, 5, 6, 7}), "");  // another worker has more
  for (auto const& [bitmap, numbers, wrong] : {
           std::tuple{0, std::vector<std::uint32_t>{5, 6}, "bitmap is 0"},
           {1, {5, 10}, "block 10 follows block 2"},         // leaves out 6
           {1, {6}, "follows block 1"},                      // ends column 1
           {1, {6, 5}, "must be of a column that has not"},  // out of order
           {1, {5, 2}, "block number is 2"},                 // of the round itself
       }) {
    auto const problem = problem_of(static_cast<std::uint64_t>(bitmap), numbers);
    EXPECT_NE(problem.find(wrong), std::string::npos) << problem << " instead of " << wrong;
  }
}

TEST(PolicyNameTest, AnUnknownNameIsRefusedWithThoseThatThereAre) {
  try {
    policy_named("switchml");
    FAIL();
  } catch (InvalidArgument const& error) {
    for (std::string_view const part : {"switchml", "ina", "ina_dense", "omnireduce"}) {
      EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos) << part;
    }
  }
}

}  // namespace
}  // namespace sparsecomm::test
