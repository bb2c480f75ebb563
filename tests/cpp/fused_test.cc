// The variants of fused error feedback: scale, momentum correction, ranges that are always sent.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kernel_problems.h"
#include "kernels/parallel.h"
#include "thread_executor.h"

namespace sparsecomm {
namespace {

template <class V>
struct Variant {
  V scale = 1;
  bool has_momentum = false;
  V factor = 0;
  bool mask = true;
  bool nesterov = false;
};

template <class V>
std::vector<Variant<V>> variants() {
  return {{V(1)},
          {V(0.5)},
          {V(-3)},
          {V(1), true, V(0.9), true},
          {V(1), true, V(0.9), false},
          {V(0.125), true, V(-1.1), true},
          {V(0.1), true, V(0.9), true, true},
          {V(-3), true, V(0.7), false, true},
          {V(0), true, V(0), true}};
}

// A problem with its momentum, so that all that a kernel may change is in one place.
template <class T>
struct MomentumProblem : Problem<T> {
  using V = accumulate_t<T>;

  MomentumProblem(std::size_t size, std::size_t offset, Fill<V> const& g, Fill<V> const& r,
                  std::mt19937_64& random)
      : Problem<T>(size, offset, g, r, random), momentum_storage(size + offset) {
    for (V& value : momentum_storage) value = g.draw(random);
  }

  FusedArguments<T> arguments(Variant<V> const& variant) {
    FusedArguments<T> all{this->gradient(), this->residual()};
    all.scale = variant.scale;
    if (variant.has_momentum) all.momentum = std::span(momentum_storage).subspan(this->offset);
    all.factor = variant.factor;
    all.mask_momentum = variant.mask;
    all.nesterov = variant.nesterov;
    return all;
  }

  std::vector<V> momentum_storage;
};

template <class T>
void expect_same_state(MomentumProblem<T> const& actual, MomentumProblem<T> const& expected) {
  EXPECT_TRUE(same_entries(actual.gradient_storage, expected.gradient_storage));
  EXPECT_TRUE(same_entries(actual.residual_storage, expected.residual_storage));
  EXPECT_TRUE(same_entries(actual.momentum_storage, expected.momentum_storage));
}

template <class T>
using Fused = KernelInputs<T>;
TYPED_TEST_SUITE(Fused, ElementTypes);

TYPED_TEST(Fused, VariantsEqualTheOracle) {
  using V = accumulate_t<TypeParam>;
  this->for_each_input({0, 1, 17, 65, 1000, 5000}, [&](std::size_t size, auto& g, auto& r,
                                                       auto& random) {
    MomentumProblem<TypeParam> const problem(size, random() % 16, g, r, random);
    for (auto const& variant : variants<V>()) {
      for (std::size_t const limit : {std::size_t{1}, size / 3, size}) {
        Threshold<V> const threshold{V(random() % 3), random() % 2 * 37};
        auto const run_table = [&](KernelTable<TypeParam> const& table, auto& on) {
          return run<V>(
              [&](Threshold<V>& threshold, PackedSpan<V> out) {
                return table.fused_error_feedback(on.arguments(variant), threshold, 7, limit, out);
              },
              std::min(limit, size), threshold);
        };
        auto expected_problem = problem;
        auto const expected = run_table(kernel_tables<TypeParam>().front(), expected_problem);
        for (auto const& table : kernel_tables<TypeParam>()) {
          SCOPED_TRACE(concat(table.target, ", limit ", limit, ", scale ", variant.scale,
                              ", factor ", variant.factor, variant.nesterov ? ", Nesterov" : ""));
          auto actual_problem = problem;
          expect_same(run_table(table, actual_problem), expected);
          expect_same_state(actual_problem, expected_problem);
        }
      }
    }
  });
}

TYPED_TEST(Fused, SendsAllOfARange) {
  using V = accumulate_t<TypeParam>;
  this->for_each_input({0, 1, 17, 65, 1000}, [&](std::size_t size, auto& g, auto& r, auto& random) {
    MomentumProblem<TypeParam> const problem(size, random() % 16, g, r, random);
    for (auto const& variant : variants<V>()) {
      auto selected_problem = problem;
      Packed<V> selected(size);
      Threshold<V> none;
      selected.stats = kernel_tables<TypeParam>().front().fused_error_feedback(
          selected_problem.arguments(variant), none, 7, size, selected.span());
      selected.trim();
      auto const send = [&](KernelTable<TypeParam> const& table, auto& on) {
        Packed<V> packed(size);
        packed.stats = table.send_all(on.arguments(variant), 7, packed.span());
        packed.trim();
        return packed;
      };
      auto expected_problem = problem;
      auto const expected = send(kernel_tables<TypeParam>().front(), expected_problem);
      ASSERT_EQ(expected.stats.count, size);
      EXPECT_EQ(expected.stats.max_magnitude, selected.stats.max_magnitude);
      EXPECT_EQ(expected.stats.finite, selected.stats.finite);
      for (std::size_t i = 0, next = 0; i < size; ++i) {
        ASSERT_EQ(expected.indices[i], 7 + i);
        bool const is_selected = next < selected.indices.size() && selected.indices[next] == 7 + i;
        ASSERT_TRUE(is_selected ? same(expected.values[i], selected.values[next])
                                : expected.values[i] == 0);
        next += is_selected;
        ASSERT_TRUE(same(expected_problem.residual()[i], V(0)));
        ASSERT_TRUE(same(widen(expected_problem.gradient()[i]), V(0)));
      }
      for (auto const& table : kernel_tables<TypeParam>()) {
        SCOPED_TRACE(table.target);
        auto actual_problem = problem;
        expect_same(send(table, actual_problem), expected);
        expect_same_state(actual_problem, expected_problem);
      }
    }
  });
}

// The oracle itself, by hand.
TYPED_TEST(Fused, CorrectsMomentum) {
  using V = accumulate_t<TypeParam>;
  for (auto const& table : kernel_tables<TypeParam>()) {
    for (bool const mask : {true, false}) {
      SCOPED_TRACE(table.target);
      std::vector<TypeParam> gradient;
      for (V const value : {V(1), V(2), V(-8), V(4)}) gradient.push_back(TypeParam(value));
      std::vector<V> velocity{V(0), V(1), V(0), V(-3)};
      std::vector<V> momentum{V(2), V(4), V(-2), V(6)};
      Packed<V> packed(4);
      Threshold<V> threshold{V(4), 1};
      FusedArguments<TypeParam> const arguments{gradient, velocity, V(2), momentum, V(0.5), mask};
      auto const stats = table.fused_error_feedback(arguments, threshold, 10, 4, packed.span());
      // u: 3, 6, -17, 11; v: 3, 7, -17, 8
      ASSERT_EQ(stats.count, 3u);
      EXPECT_EQ(packed.indices[0], 11u);
      EXPECT_EQ(packed.values[0], V(7));
      EXPECT_EQ(packed.values[1], V(-17));
      EXPECT_EQ(packed.values[2], V(8));
      EXPECT_EQ(velocity, (std::vector<V>{V(3), V(0), V(0), V(0)}));
      EXPECT_EQ(momentum, (mask ? std::vector<V>{V(3), V(0), V(0), V(0)}
                                : std::vector<V>{V(3), V(6), V(-17), V(11)}));
      EXPECT_EQ(stats.max_magnitude, V(17));
    }
  }
}

TYPED_TEST(Fused, CorrectsNesterovsMomentum) {
  using V = accumulate_t<TypeParam>;
  for (auto const& table : kernel_tables<TypeParam>()) {
    for (bool const mask : {true, false}) {
      SCOPED_TRACE(table.target);
      std::vector<TypeParam> gradient;
      for (V const value : {V(1), V(2), V(-8), V(4)}) gradient.push_back(TypeParam(value));
      std::vector<V> velocity{V(0), V(1), V(0), V(-3)};
      std::vector<V> momentum{V(2), V(4), V(-2), V(6)};
      Packed<V> packed(4);
      Threshold<V> threshold{V(4), 1};
      FusedArguments<TypeParam> const arguments{gradient, velocity, V(2), momentum,
                                                V(0.5),   mask,     true};
      auto const stats = table.fused_error_feedback(arguments, threshold, 10, 4, packed.span());
      // u: 3, 6, -17, 11; 2 g + u / 2: 3.5, 7, -24.5, 13.5; v: 3.5, 8, -24.5, 10.5
      ASSERT_EQ(stats.count, 3u);
      EXPECT_EQ(packed.indices[0], 11u);
      EXPECT_EQ(packed.values[0], V(8));
      EXPECT_EQ(packed.values[1], V(-24.5));
      EXPECT_EQ(packed.values[2], V(10.5));
      EXPECT_EQ(velocity, (std::vector<V>{V(3.5), V(0), V(0), V(0)}));
      EXPECT_EQ(momentum, (mask ? std::vector<V>{V(3), V(0), V(0), V(0)}
                                : std::vector<V>{V(3), V(6), V(-17), V(11)}));
    }
  }
}

TYPED_TEST(Fused, RefusesWhatDoesNotFit) {
  using V = accumulate_t<TypeParam>;
  std::vector<TypeParam> gradient(100);
  std::vector<V> residual(100), momentum(99);
  Threshold<V> threshold;
  Packed<V> packed(100), small(99);
  for (auto const& table : kernel_tables<TypeParam>()) {
    FusedArguments<TypeParam> arguments{gradient, residual};
    EXPECT_THROW(table.send_all(arguments, 0, small.span()), InvalidArgument);
    EXPECT_THROW(table.send_all(arguments, 0xffffffffu - 98, packed.span()), InvalidArgument);
    arguments.momentum = momentum;
    EXPECT_THROW(table.send_all(arguments, 0, packed.span()), InvalidArgument);
    EXPECT_THROW(table.fused_error_feedback(arguments, threshold, 0, 100, packed.span()),
                 InvalidArgument);
  }
}

TYPED_TEST(Fused, VariantsOnThreadsEqualOneThreads) {
  using V = accumulate_t<TypeParam>;
  SelectionScratch<V> scratch;
  this->for_each_input({(std::size_t{1} << 18) + 3}, [&](std::size_t size, auto& g, auto& r,
                                                         auto& random) {
    MomentumProblem<TypeParam> const problem(size, random() % 16, g, r, random);
    auto const all_variants = variants<V>();
    for (auto const& executor : executors()) {
      auto const& variant = all_variants[random() % all_variants.size()];
      std::size_t const limit = random() % 2 == 0 ? size : size / 3;
      Threshold<V> const threshold{V(random() % 3), random() % 2 * 70'000};
      auto const& table = kernel_tables<TypeParam>()[random() % kernel_tables<TypeParam>().size()];
      SCOPED_TRACE(concat(table.target, ", limit ", limit, ", scale ", variant.scale, ", factor ",
                          variant.factor, ", ", executor->threads(), " threads"));
      auto expected_problem = problem;
      auto const expected = run<V>(
          [&](Threshold<V>& threshold, PackedSpan<V> out) {
            return kernels<TypeParam>().fused_error_feedback(expected_problem.arguments(variant),
                                                             threshold, 7, limit, out);
          },
          limit, threshold);
      auto actual_problem = problem;
      auto const actual = run<V>(
          [&](Threshold<V>& threshold, PackedSpan<V> out) {
            return fused_error_feedback<TypeParam>(actual_problem.arguments(variant), threshold, 7,
                                                   limit, out, scratch, *executor, table);
          },
          limit, threshold);
      expect_same(actual, expected);
      expect_same_state(actual_problem, expected_problem);
    }
  });
}

}  // namespace
}  // namespace sparsecomm
