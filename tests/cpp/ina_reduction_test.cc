// Every type and reduction: what workers get is the dense reduction, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "ina_run.h"

namespace sparsecomm::test {
namespace {

// Numbers of all sizes and what is special: NaN, infinities, both zeros, the largest and smallest.
template <class T>
T special_value(std::mt19937& random) {
  using Sum = accumulate_t<T>;
  using Limits = std::numeric_limits<Sum>;
  if constexpr (std::is_integral_v<T>) {
    T const values[] = {
        0, 1, static_cast<T>(-1), Limits::max(), Limits::min(), static_cast<T>(random())};
    return values[random() % std::size(values)];
  } else {
    Sum const sign = random() % 2 == 0 ? 1 : -1;
    Sum const values[] = {0,
                          1,
                          Limits::infinity(),
                          Limits::quiet_NaN(),
                          Limits::max(),
                          Limits::denorm_min(),
                          static_cast<Sum>(1e-7),
                          static_cast<Sum>(static_cast<double>(random()) / 4e9),
                          static_cast<Sum>(random() % 70000)};
    return static_cast<T>(sign * values[random() % std::size(values)]);
  }
}

template <class T>
std::vector<Bytes> special_inputs(InaPlan const& plan, std::mt19937& random) {
  std::size_t const in_block = plan.block_bytes / sizeof(T);
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < plan.workers; ++rank) {
    std::vector<T> input(plan.elements);
    for (std::size_t begin = 0; begin < input.size(); begin += in_block) {
      if (random() % 2 == 0) continue;
      // Blocks of nothing but -0.0 too.
      bool const only_zeros = random() % 8 == 0;
      for (std::size_t i = begin; i < std::min(begin + in_block, input.size()); ++i) {
        input[i] = special_value<T>(random);
        if constexpr (!std::is_integral_v<T>) {
          if (only_zeros) input[i] = static_cast<T>(-accumulate_t<T>{0});
        }
      }
    }
    auto const bytes = std::as_bytes(std::span(input));
    inputs.emplace_back(bytes.begin(), bytes.end());
  }
  return inputs;
}

// In every round the workers come in one order.
void finish_in_order(InaRun& run, std::vector<int> const& order) {
  int const workers = static_cast<int>(order.size());
  while (!run.choices().empty()) {
    for (int const worker : order) run.step(worker);
    for (int const worker : order) run.step(workers + worker);
  }
}

struct Line {
  ElementType type;
  Reduction reduction;
};

class InaReductionTest : public ::testing::TestWithParam<Line> {
 protected:
  InaPlan random_plan(CombineOrder order) {
    InaPlan plan{.block_bytes = 64u << random_() % 2,
                 .workers = static_cast<std::uint16_t>(1 + random_() % 6),
                 .window = static_cast<std::uint8_t>(1 + random_() % 5),
                 .type = GetParam().type,
                 .reduction = GetParam().reduction,
                 .order = order};
    plan.elements = 1 + random_() % (20 * 64 / plan.entry().bytes);
    return plan;
  }
  std::vector<Bytes> inputs_of(InaPlan const& plan) {
    return visit_element_type(plan.type,
                              [&]<class T>() { return special_inputs<T>(plan, random_); });
  }
  InaRun run(InaPlan const& plan, std::vector<Bytes> const& inputs) {
    return {aggregator_, workers_, plan, inputs, {.in_place = random_() % 2 == 0}};
  }

  std::mt19937 random_{static_cast<unsigned>(GetParam().type) * 4u +
                       static_cast<unsigned>(GetParam().reduction)};
  InaAggregator aggregator_{
      InaPlan{.block_bytes = 128, .workers = 6, .window = 5, .type = ElementType::f16}};
  std::vector<InaWorker> workers_;
};

TEST_P(InaReductionTest, InTheOrderOfRanksIsTheDenseReductionInEveryRun) {
  for (int i = 0; i < 500; ++i) {
    InaPlan const plan = random_plan(CombineOrder::rank);
    auto const inputs = inputs_of(plan);
    Bytes const expected = dense_reduction(plan, inputs);
    std::vector<Bytes> first;
    for (int const repetition : {0, 1}) {
      InaRun run = this->run(plan, inputs);
      run.finish(random_);
      ASSERT_TRUE(run.complete());
      for (Bytes const& output : run.outputs()) {
        ASSERT_TRUE(same_elements(plan.type, output, expected)) << "case " << i;
      }
      if (repetition == 0) first = run.outputs();
      ASSERT_EQ(run.outputs(), first) << "case " << i;
    }
  }
}

TEST_P(InaReductionTest, ByArrivalIsTheDenseReductionInThatOrderOnAllWorkers) {
  for (int i = 0; i < 500; ++i) {
    InaPlan const plan = random_plan(CombineOrder::arrival);
    auto const inputs = inputs_of(plan);
    std::vector<int> order(plan.workers);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, random_);
    std::vector<Bytes> ordered;
    ordered.reserve(order.size());
    for (int const worker : order) ordered.push_back(inputs[worker]);
    InaRun run = this->run(plan, inputs);
    finish_in_order(run, order);
    ASSERT_TRUE(run.complete());
    Bytes const expected = dense_reduction(plan, ordered);
    ASSERT_TRUE(same_elements(plan.type, run.outputs()[0], expected)) << "case " << i;
    for (Bytes const& output : run.outputs()) ASSERT_EQ(output, run.outputs()[0]);
  }
}

std::vector<Line> lines() {
  std::vector<Line> all;
  for (auto const& type : element_types()) {
    for (auto const& reduction : reductions()) all.push_back({type.id, reduction.id});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, InaReductionTest, ::testing::ValuesIn(lines()), [](auto const& info) {
  return concat(name(info.param.type), "_", name(info.param.reduction));
});

TEST(ElementTypeTest, TheTableIsInTheOrderOfItsCodes) {
  ASSERT_EQ(element_types().size(), 9u);
  for (std::size_t i = 0; i < element_types().size(); ++i) {
    ElementTypeEntry const& entry = element_types()[i];
    EXPECT_EQ(static_cast<std::size_t>(entry.id), i);
    visit_element_type(entry.id, [&]<class T>() {
      EXPECT_EQ(entry.bytes, sizeof(T)) << entry.name;
      EXPECT_EQ(entry.sum_bytes, sizeof(accumulate_t<T>)) << entry.name;
    });
  }
}

// 2048 + 1 + 1 is 2050 in f32, and 2048 where each sum is rounded to f16.
TEST(InaSumTest, HalvesAreRoundedOnce) {
  InaPlan const plan{
      .elements = 1, .block_bytes = 64, .workers = 3, .window = 1, .type = ElementType::f16};
  std::vector<Bytes> inputs;
  for (float const value : {2048.0F, 1.0F, 1.0F}) {
    auto const element = static_cast<Half>(value);
    auto const bytes = std::as_bytes(std::span(&element, 1));
    inputs.emplace_back(bytes.begin(), bytes.end());
  }
  InaAggregator aggregator(plan);
  std::vector<InaWorker> workers;
  InaRun run(aggregator, workers, plan, inputs);
  finish_in_order(run, {0, 1, 2});
  EXPECT_EQ(static_cast<float>(load_element<Half>(run.outputs()[0], 0)), 2050.0F);
}

// Block sizes and windows at both ends, with more than one scan of the input.
TEST(InaSumTest, TheLargestAndTheSmallestBlocksAndWindows) {
  std::mt19937 random(3);
  for (std::uint32_t const block_bytes : {least_block_bytes, most_block_bytes}) {
    for (int const window : {1, 64}) {
      InaPlan const plan{.elements = 70 * block_bytes / 4 - 5,
                         .block_bytes = block_bytes,
                         .workers = 2,
                         .window = static_cast<std::uint8_t>(window),
                         .type = ElementType::i32};
      std::vector<Bytes> inputs(2, Bytes(plan.bytes()));
      for (Bytes& input : inputs) {
        for (int i = 0; i < 60; ++i) input[random() % input.size()] = std::byte(1 + random() % 99);
        input.back() = std::byte{1};
      }
      InaAggregator aggregator(plan);
      std::vector<InaWorker> workers;
      InaRun run(aggregator, workers, plan, inputs);
      run.finish(random);
      EXPECT_TRUE(run.complete());
      EXPECT_EQ(run.outputs(), std::vector(2, dense_reduction(plan, inputs)));
    }
  }
}

}  // namespace
}  // namespace sparsecomm::test
