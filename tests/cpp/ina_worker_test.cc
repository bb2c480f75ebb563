// The machines of in-network aggregation keep their invariants in random cases, and every worker
// gets the dense reduction.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "ina/worker.h"
#include "ina_run.h"

namespace sparsecomm::test {
namespace {

constexpr int cases = 24000;

// Checks the invariants as a run goes on. `had` and `all`: per worker and together, the blocks that
// are not zero and not reduced yet.
class CheckedRun final : public InaRun {
 public:
  CheckedRun(InaAggregator& aggregator, std::vector<InaWorker>& workers, InaPlan const& plan,
             std::vector<Bytes> const& inputs, InaRunOptions options)
      : InaRun(aggregator, workers, plan, inputs, options), rounds_of_(plan.workers) {
    for (Bytes const& input : inputs) {
      auto const numbers = nonzero_blocks(input, plan.block_bytes);
      left_of_.emplace_back(numbers.begin(), numbers.end());
      left_.insert(numbers.begin(), numbers.end());
    }
    union_behind_first_ = left_.size();
    reducing_ = plan.first_blocks();
    EXPECT_EQ(aggregator.round_blocks(), reducing_);
    for (std::uint32_t const number : reducing_.numbers()) {
      union_behind_first_ -= left_.count(number);
    }
    for (int worker = 0; worker < plan.workers; ++worker) check_votes(worker);
  }

  std::uint32_t rounds() const { return round_ + 1; }
  std::size_t expected_rounds() const {
    return 1 + (union_behind_first_ + plan_.window - 1) / plan_.window;
  }

 private:
  std::vector<std::uint32_t> smallest(std::set<std::uint32_t> const& numbers) const {
    std::vector<std::uint32_t> first;
    for (auto at = numbers.begin(); at != numbers.end() && first.size() < plan_.window; ++at) {
      first.push_back(*at);
    }
    return first;
  }

  static std::vector<std::uint32_t> list(BlockList const& blocks) {
    return {blocks.numbers().begin(), blocks.numbers().end()};
  }

  // I1: a worker votes for its d smallest blocks that no round up to this one reduces.
  void check_votes(int worker) {
    for (std::uint32_t const number : reducing_.numbers()) left_of_[worker].erase(number);
    EXPECT_EQ(list(workers_[worker].votes()), smallest(left_of_[worker]));
  }

  void contributed(int worker, bool round_ends) override {
    ++contributions_;
    EXPECT_LT(worker, plan_.workers);
    if (!round_ends) return;
    EXPECT_EQ(contributions_, plan_.workers);
    contributions_ = 0;
    for (std::uint32_t const number : reducing_.numbers()) left_.erase(number);
    // I2: the next round reduces the d smallest blocks of all that are left on any worker.
    auto const expected = smallest(left_);
    if (aggregator_.done()) {
      EXPECT_TRUE(expected.empty());
      return;
    }
    BlockList const next = aggregator_.round_blocks();
    EXPECT_EQ(list(next), expected);
    // I3: rounds go forward.
    ASSERT_FALSE(next.empty());
    EXPECT_LT(reducing_.back(), next[0]);
    reducing_ = next;
    EXPECT_EQ(aggregator_.round(), ++round_);
  }

  void updated(int worker) override {
    if (workers_[worker].done()) return;
    EXPECT_EQ(workers_[worker].round(), ++rounds_of_[worker]);
    EXPECT_EQ(workers_[worker].round_blocks(), reducing_);
    check_votes(worker);
  }

  std::vector<std::set<std::uint32_t>> left_of_;
  std::set<std::uint32_t> left_;
  std::size_t union_behind_first_;
  BlockList reducing_;
  std::uint32_t round_ = 0;
  std::vector<std::uint32_t> rounds_of_;
  int contributions_ = 0;
};

struct Case {
  InaPlan plan;
  std::vector<Bytes> inputs;
  InaRunOptions options;
};

// Whole numbers, whose sums are exact in any order.
Case random_case(std::mt19937& random) {
  auto const up_to = [&](unsigned most) { return random() % (most + 1); };
  Case c;
  InaPlan& plan = c.plan;
  plan.workers = static_cast<std::uint16_t>(1 + up_to(8));
  plan.window = static_cast<std::uint8_t>(up_to(9) == 0 ? 1 + up_to(63) : 1 + up_to(19));
  plan.block_bytes = 64u << (up_to(9) == 0 ? up_to(3) : 0);
  plan.elements = up_to(19) == 0 ? up_to(3) : up_to(60 * 16);
  plan.order = up_to(1) == 0 ? CombineOrder::arrival : CombineOrder::rank;
  plan.purpose = random();
  c.options = {up_to(1) == 0, up_to(1) == 0, static_cast<std::uint32_t>(random())};
  unsigned const percent = up_to(5) == 0 ? 100 : up_to(5) == 0 ? 0 : 1 + up_to(60);
  bool const identical = up_to(4) == 0;
  std::size_t const in_block = plan.block_bytes / sizeof(float);
  std::vector<float> input(plan.elements);
  for (int rank = 0; rank < plan.workers; ++rank) {
    if (!identical || rank == 0) {
      std::ranges::fill(input, 0.0F);
      for (std::size_t begin = 0; begin < input.size(); begin += in_block) {
        if (random() % 100 >= percent) continue;
        std::size_t const end = std::min(begin + in_block, input.size());
        for (unsigned count = 1 + up_to(3); count > 0; --count) {
          input[begin + random() % (end - begin)] = static_cast<float>(1 + up_to(99));
        }
      }
    }
    auto const bytes = std::as_bytes(std::span(input));
    c.inputs.emplace_back(bytes.begin(), bytes.end());
  }
  return c;
}

InaPlan largest_plan() {
  return {.elements = 0, .block_bytes = 512, .workers = 9, .window = 64, .type = ElementType::f16};
}

TEST(InaPropertyTest, InvariantsHoldAndEveryWorkerGetsTheDenseSum) {
  InaAggregator aggregator(largest_plan());
  std::vector<InaWorker> workers;
  for (int seed = 0; seed < cases; ++seed) {
    std::mt19937 random(seed);
    Case const c = random_case(random);
    SCOPED_TRACE(concat("seed ", seed, ", ", c.plan.workers, " workers, window ",
                        int(c.plan.window), ", ", c.plan.elements, " elements, blocks of ",
                        c.plan.block_bytes, ", order ", name(c.plan.order)));
    CheckedRun run(aggregator, workers, c.plan, c.inputs, c.options);
    run.finish(random);
    ASSERT_TRUE(run.complete());
    ASSERT_EQ(run.rounds(), run.expected_rounds());
    Bytes const expected = dense_reduction(c.plan, c.inputs);
    for (Bytes const& output : run.outputs()) ASSERT_EQ(output, expected);
    ASSERT_EQ(run.inputs(), c.inputs);
    if (HasFailure()) return;
  }
}

Bytes filled(InaPlan const& plan, float value) {
  std::vector<float> const values(plan.elements, value);
  auto const bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

constexpr TimePoint now{std::chrono::hours(1)};
constexpr Duration limit = std::chrono::seconds(10);

// Bytes of a former operation would travel otherwise.
TEST(InaWorkerTest, TheLastBlockIsSentWithZerosBehindIt) {
  InaPlan plan{.elements = 32, .block_bytes = 64, .workers = 1, .window = 2};
  Bytes const full = filled(plan, -1.0F);
  Bytes output = full;
  InaWorker worker;
  worker.start(plan, 0, 1, full, output, now, limit);
  plan.elements = 17;
  auto const message = assemble(worker.start(plan, 0, 2, std::span(full).first(plan.bytes()),
                                             std::span(output).first(plan.bytes()), now, limit));
  ASSERT_GT(message.size(), 128u);
  auto const blocks = std::span(message).last(128);
  EXPECT_TRUE(std::ranges::equal(blocks.first(68), std::span(full).first(68)));
  EXPECT_EQ(std::ranges::count(blocks.subspan(68), std::byte{0}), 60);
}

// Worker 0 begins the next operation while the last update of the former is on its way to worker 1.
TEST(InaWorkerTest, OperationsFollowOneAnotherWithoutWaitingForUpdatesToArrive) {
  InaPlan const plan{.elements = 16, .block_bytes = 64, .workers = 2, .window = 1};
  InaAggregator aggregator(plan);
  std::vector<InaWorker> workers(2);
  std::vector<Bytes> outputs(2, Bytes(plan.bytes()));
  std::optional<InaMessage> late;  // to worker 1
  for (std::uint32_t operation = 1; operation < 6; ++operation) {
    Bytes const input = filled(plan, static_cast<float>(operation));
    aggregator.start(plan, operation, now, limit);
    auto const first = workers[0].start(plan, 0, operation, input, outputs[0], now, limit);
    EXPECT_FALSE(aggregator.receive(0, assemble(first), now));
    if (late) {
      EXPECT_FALSE(workers[1].receive(assemble(*late), now));
      EXPECT_EQ(outputs[1], filled(plan, 2.0F * static_cast<float>(operation - 1)));
    }
    auto const second = workers[1].start(plan, 1, operation, input, outputs[1], now, limit);
    late = aggregator.receive(1, assemble(second), now);
    ASSERT_TRUE(late);
    EXPECT_FALSE(workers[0].receive(assemble(*late), now));
    EXPECT_EQ(outputs[0], filled(plan, 2.0F * static_cast<float>(operation)));
  }
}

// I6.
TEST(MergeSmallestTest, IsCommutativeAssociativeAndIdempotent) {
  std::mt19937 random(6);
  for (int i = 0; i < 20000; ++i) {
    std::size_t const window = 1 + random() % most_blocks;
    auto const list = [&] {
      std::set<std::uint32_t> numbers;
      for (std::size_t count = random() % (window + 1); numbers.size() < count;) {
        numbers.insert(random() % 200);
      }
      BlockList made;
      for (std::uint32_t const number : numbers) made.push_back(number);
      return made;
    };
    BlockList const a = list();
    BlockList const b = list();
    BlockList const c = list();
    BlockList const ab = merge_smallest(a, b, window);
    std::set<std::uint32_t> all(a.numbers().begin(), a.numbers().end());
    all.insert(b.numbers().begin(), b.numbers().end());
    auto expected = std::vector(all.begin(), all.end());
    expected.resize(std::min(window, expected.size()));
    ASSERT_TRUE(std::ranges::equal(ab.numbers(), expected)) << i;
    ASSERT_EQ(ab, merge_smallest(b, a, window)) << i;
    ASSERT_EQ(merge_smallest(ab, c, window),
              merge_smallest(a, merge_smallest(b, c, window), window))
        << i;
    ASSERT_EQ(merge_smallest(ab, b, window), ab) << i;
  }
}

}  // namespace
}  // namespace sparsecomm::test
