#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernel_problems.h"
#include "kernels/magnitude.h"

namespace sparsecomm {
namespace {

template <class T>
using Kernels = KernelInputs<T>;
TYPED_TEST_SUITE(Kernels, ElementTypes);

std::vector<std::size_t> const small_sizes = {0, 1, 3, 15, 16, 17, 31, 63, 64, 65, 129, 1000};
std::size_t const large_size = (std::size_t{1} << 20) + 3;

TYPED_TEST(Kernels, TheBestTargetOfThisMachineRuns) {
  auto const tables = kernel_tables<TypeParam>();
  ASSERT_FALSE(tables.empty());
  EXPECT_EQ(tables.front().target, "scalar");
  EXPECT_EQ(tables.back().target, kernels<TypeParam>().target);
#if defined(__x86_64__)
  // One feature of those of each level; no processor has had it without the others.
  bool const avx2 = __builtin_cpu_supports("avx2");
  bool const avx512 = __builtin_cpu_supports("avx512vl");
  std::string const best(kernels<TypeParam>().target);
  EXPECT_EQ(best.substr(0, 4), avx512 ? "AVX3" : avx2 ? "AVX2" : "SSE4");
  // The differential tests force each of these in turn.
  auto const runs = [&](std::string_view target) {
    return std::ranges::count(tables, target, &KernelTable<TypeParam>::target) == 1;
  };
  EXPECT_TRUE(runs("SSE4"));
  EXPECT_EQ(runs("AVX2"), avx2);
  EXPECT_EQ(runs("AVX3"), avx512);
#elif defined(__aarch64__)
  EXPECT_EQ(kernels<TypeParam>().target.substr(0, 4), "NEON");
#endif
}

TYPED_TEST(Kernels, FusedErrorFeedbackEqualsTheOracle) {
  auto const check = [](std::size_t size, auto& fill, auto& residual_fill, std::mt19937_64& random,
                        std::size_t limit, auto threshold) {
    Problem<TypeParam> const problem(size, random() % 16, fill, residual_fill, random);
    auto expected_problem = problem;
    auto const expected =
        run_fused(kernel_tables<TypeParam>().front(), expected_problem, threshold, limit);
    for (auto const& table : kernel_tables<TypeParam>()) {
      SCOPED_TRACE(concat(table.target, ", limit ", limit, ", threshold ", threshold.magnitude,
                          " with ", threshold.ties, " ties"));
      auto actual_problem = problem;
      auto const actual = run_fused(table, actual_problem, threshold, limit);
      expect_same(actual, expected);
      EXPECT_TRUE(same_entries(actual_problem.gradient_storage, expected_problem.gradient_storage));
      EXPECT_TRUE(same_entries(actual_problem.residual_storage, expected_problem.residual_storage));
    }
  };
  this->for_each_input(small_sizes, [&](std::size_t size, auto& g, auto& r, auto& random) {
    for (auto const& threshold : this->thresholds()) {
      for (std::size_t const limit : this->limits(size)) {
        check(size, g, r, random, limit, threshold);
      }
    }
  });
  std::mt19937_64 random(1);
  for (auto const& fill : fills<accumulate_t<TypeParam>>()) {
    check(large_size, fill, fill, random, large_size / 50,
          Threshold<accumulate_t<TypeParam>>{3, 99999});
  }
}

TYPED_TEST(Kernels, SelectEqualsTheOracle) {
  this->for_each_input(small_sizes, [&](std::size_t size, auto& fill, auto&, auto& random) {
    Problem<TypeParam> problem(size, random() % 16, fill, fill, random);
    std::span<const TypeParam> const x = problem.gradient();
    for (auto const& threshold : this->thresholds()) {
      for (std::size_t const limit : this->limits(size)) {
        auto const expected = run_select(kernel_tables<TypeParam>().front(), x, threshold, limit);
        for (auto const& table : kernel_tables<TypeParam>()) {
          SCOPED_TRACE(table.target);
          expect_same(run_select(table, x, threshold, limit), expected);
        }
      }
    }
  });
}

TYPED_TEST(Kernels, AllFiniteFindsEachEntry) {
  using Limits = std::numeric_limits<accumulate_t<TypeParam>>;
  for (auto const& table : kernel_tables<TypeParam>()) {
    SCOPED_TRACE(table.target);
    for (std::size_t const size : {0, 1, 17, 64, 300}) {
      std::vector<TypeParam> x(size + 1, TypeParam(-60000));
      std::span<const TypeParam> const unaligned = std::span(x).subspan(1);
      EXPECT_TRUE(table.all_finite(unaligned));
      for (std::size_t i = 1; i < x.size(); ++i) {
        for (auto const bad : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
          x[i] = TypeParam(bad);
          ASSERT_FALSE(table.all_finite(unaligned)) << "entry " << i << " of " << size;
          x[i] = TypeParam(1);
        }
      }
    }
  }
}

TYPED_TEST(Kernels, ScansEqualTheOracle) {
  using V = accumulate_t<TypeParam>;
  constexpr unsigned bits = std::bit_width(magnitude_mask<V>);
  this->for_each_input({0, 1, 64, 1000, 40000}, [&](std::size_t size, auto& g, auto& r,
                                                    auto& random) {
    Problem<TypeParam> problem(size, random() % 16, g, r, random);
    auto const& oracle = kernel_tables<TypeParam>().front();
    std::uint64_t const at_two = magnitude_bits(V(2));
    for (auto const& table : kernel_tables<TypeParam>()) {
      SCOPED_TRACE(table.target);
      for (unsigned const shift : {0u, 1u, bits - 11, bits}) {
        for (std::uint64_t const base : {std::uint64_t{0}, at_two >> shift, ~std::uint64_t{0}}) {
          for (std::size_t const bins : {0, 1, 100, 2048}) {
            std::vector<std::uint64_t> expected(bins, 5);
            auto actual = expected;
            oracle.magnitude_histogram(problem.gradient(), problem.residual(), shift, base,
                                       expected);
            table.magnitude_histogram(problem.gradient(), problem.residual(), shift, base, actual);
            EXPECT_EQ(actual, expected) << "shift " << shift << ", base " << base;
          }
        }
      }
      for (std::size_t const run : {1, 5, 16}) {
        if (run > size) continue;
        std::vector<std::size_t> starts(100);
        for (std::size_t& start : starts) start = random() % (size - run + 1);
        starts.front() = 0;
        starts.back() = size - run;
        for (auto const& residual : {problem.residual(), std::span<V>()}) {
          std::vector<V> expected(starts.size() * run);
          auto actual = expected;
          oracle.gather_magnitudes(problem.gradient(), residual, starts, run, expected);
          table.gather_magnitudes(problem.gradient(), residual, starts, run, actual);
          table.gather_magnitudes(problem.gradient(), residual, {}, run, {});
          EXPECT_TRUE(same_entries(actual, expected)) << "run " << run;
          V const last = widen(problem.gradient().back());
          V const added = residual.empty() ? V(0) : residual.back();
          EXPECT_TRUE(same(expected.back(), std::abs(last + added)));
        }
      }
      Moments const expected = oracle.moments(problem.gradient(), problem.residual());
      Moments const actual = table.moments(problem.gradient(), problem.residual());
      EXPECT_TRUE(same(actual.sum, expected.sum)) << actual.sum << ", " << expected.sum;
      EXPECT_TRUE(same(actual.squares, expected.squares));
      std::uint64_t const end = std::uint64_t{1} << bits;
      std::vector<std::uint64_t> const bounds{0, 1, at_two, at_two + 1, end, ~std::uint64_t{0}};
      for (std::size_t pair = 0; pair < bounds.size() * bounds.size(); ++pair) {
        std::uint64_t const low = bounds[pair / bounds.size()];
        std::uint64_t const high = bounds[pair % bounds.size()];
        std::vector<V> expected{V(42)};
        auto actual = expected;
        auto const above =
            oracle.collect_magnitudes(problem.gradient(), problem.residual(), low, high, expected);
        EXPECT_EQ(
            table.collect_magnitudes(problem.gradient(), problem.residual(), low, high, actual),
            above);
        EXPECT_TRUE(same_entries(actual, expected)) << "[" << low << ", " << high << ")";
      }
    }
  });
}

// The oracle itself: what each rule of the selection says, by hand.
TYPED_TEST(Kernels, SelectsByTheRules) {
  using V = accumulate_t<TypeParam>;
  V const nan = std::numeric_limits<V>::quiet_NaN();
  for (auto const& table : kernel_tables<TypeParam>()) {
    SCOPED_TRACE(table.target);
    std::vector<TypeParam> x;
    for (V const value : {V(1), V(-2), V(0), V(3), V(2), nan, V(-0.0), V(2), V(-4)}) {
      x.push_back(TypeParam(value));
    }
    auto const indices = [&](Threshold<V> threshold, std::size_t limit) {
      return run_select<TypeParam>(table, x, threshold, limit, 100).indices;
    };
    using Indices = std::vector<std::uint32_t>;
    EXPECT_EQ(indices({2, 0}, 9), (Indices{103, 105, 108}));
    EXPECT_EQ(indices({2, 2}, 9), (Indices{101, 103, 104, 105, 108}));
    EXPECT_EQ(indices({0, 5}, 9), (Indices{100, 101, 103, 104, 105, 107, 108}));
    EXPECT_EQ(indices({nan, 5}, 9), (Indices{105}));
    EXPECT_EQ(indices({2, 1}, 2), (Indices{101, 103}));
    auto const packed = run_select<TypeParam>(table, x, {2, 1}, 2, 100);
    EXPECT_FALSE(packed.stats.complete);
    EXPECT_FALSE(packed.stats.finite);
    EXPECT_EQ(packed.stats.max_magnitude, 4);
    EXPECT_EQ(packed.ties_left, 0u);
    EXPECT_TRUE(run_select<TypeParam>(table, x, {3.5, 0}, 2, 100).stats.complete);
  }
}

TYPED_TEST(Kernels, RefusesTooLittleRoom) {
  using V = accumulate_t<TypeParam>;
  std::vector<TypeParam> x(100);
  std::vector<V> residual(99);
  Threshold<V> threshold;
  for (auto const& table : kernel_tables<TypeParam>()) {
    Packed<V> packed(99);
    EXPECT_THROW(table.select(x, threshold, 0, 100, packed.span()), InvalidArgument);
    EXPECT_NO_THROW(table.select(x, threshold, 0, 99, packed.span()));
    EXPECT_THROW(table.select(x, threshold, 0xffffffffu - 98, 99, packed.span()), InvalidArgument);
    EXPECT_NO_THROW(table.select(x, threshold, 0xffffffffu - 99, 99, packed.span()));
    EXPECT_THROW(table.fused_error_feedback({x, residual}, threshold, 0, 99, packed.span()),
                 InvalidArgument);
  }
}

TYPED_TEST(Kernels, NothingIsLostOrCountedTwice) {
  this->for_each_input({1000, 4099}, [&](std::size_t size, auto& g, auto& r, auto& random) {
    for (auto const& table : kernel_tables<TypeParam>()) {
      SCOPED_TRACE(table.target);
      Problem<TypeParam> problem(size, 0, g, r, random);
      std::vector<accumulate_t<TypeParam>> sums(size);
      for (std::size_t i = 0; i < size; ++i) sums[i] = problem.sum(i);
      auto const packed = run_fused(table, problem, {accumulate_t<TypeParam>(2), 17}, size / 4, 0);
      std::vector<accumulate_t<TypeParam>> whole = problem.residual_storage;
      for (std::size_t i = 0; i < packed.indices.size(); ++i) {
        EXPECT_TRUE(same(whole[packed.indices[i]], accumulate_t<TypeParam>(0)));
        whole[packed.indices[i]] = packed.values[i];
      }
      EXPECT_TRUE(same_entries(whole, sums));
      for (TypeParam const value : problem.gradient()) {
        ASSERT_TRUE(same(widen(value), accumulate_t<TypeParam>(0)));
      }
    }
  });
}

TYPED_TEST(Kernels, ChainedSegmentsEqualOne) {
  this->for_each_input({0, 1000, 4099}, [&](std::size_t size, auto& g, auto& r, auto& random) {
    using V = accumulate_t<TypeParam>;
    for (auto const& table : kernel_tables<TypeParam>()) {
      SCOPED_TRACE(table.target);
      Problem<TypeParam> one(size, 0, g, r, random);
      Problem<TypeParam> many = one;
      std::size_t const limit = size / 4;
      Threshold<V> const threshold{V(2), size / 20};
      auto const expected = run_fused(table, one, threshold, limit, 3);

      Packed<V> packed(limit);
      Threshold<V> remaining = threshold;
      std::uint32_t first = 3;
      for (Segment<TypeParam> const& segment : as_segments(many, 1 + random() % 300)) {
        std::size_t const count = packed.stats.count;
        auto const stats = table.fused_error_feedback(
            {segment.gradient, segment.residual}, remaining, first, limit - count,
            {packed.span().indices.subspan(count), packed.span().values.subspan(count)});
        packed.stats.count += stats.count;
        packed.stats.max_magnitude = std::max(packed.stats.max_magnitude, stats.max_magnitude);
        packed.stats.finite &= stats.finite;
        packed.stats.complete &= stats.complete;
        first += static_cast<std::uint32_t>(segment.gradient.size());
      }
      packed.ties_left = remaining.ties;
      packed.trim();
      expect_same(packed, expected);
      EXPECT_TRUE(same_entries(many.residual_storage, one.residual_storage));
    }
  });
}

TYPED_TEST(Kernels, ExactThresholdSelectsTheKLargest) {
  using V = accumulate_t<TypeParam>;
  ThresholdScratch<V> scratch;
  this->for_each_input(
      {1, 2, 17, 4095, 4096, 50000}, [&](std::size_t size, auto& g, auto& r, auto& random) {
        Problem<TypeParam> problem(size, 0, g, r, random);
        auto const segments = as_segments(problem, 1 + random() % (size + 1));
        std::vector<V> const sorted = sorted_magnitudes<V>(problem);
        for (std::size_t const k :
             {std::size_t{1}, std::size_t{2}, size / 100, size / 3, size - 1, size, size + 1}) {
          if (k == 0) continue;
          auto const threshold =
              exact_threshold<TypeParam>(std::span<const Segment<TypeParam>>(segments), k, scratch);
          Problem<TypeParam> selected = problem;
          auto const packed = run_fused(kernels<TypeParam>(), selected, threshold, no_limit, 0);
          EXPECT_EQ(packed.stats.count, expected_count(sorted, k)) << "k " << k;
          auto const is_less = [&](V value) { return std::abs(value) < std::abs(sorted[k - 1]); };
          EXPECT_TRUE(k > size || std::ranges::none_of(packed.values, is_less)) << "k " << k;
        }
      });
  EXPECT_THROW(exact_threshold<TypeParam>({}, 0, scratch), InvalidArgument);
  EXPECT_EQ(exact_threshold<TypeParam>({}, 1, scratch).magnitude, 0);
}

// The sum of two NaNs is either, and passes differ in which.
TYPED_TEST(Kernels, ExactThresholdOfNaNsReadsNothingElse) {
  using V = accumulate_t<TypeParam>;
  V const nan = std::numeric_limits<V>::quiet_NaN();
  auto const high_bit = magnitude_bits_t<V>{1} << (std::numeric_limits<V>::digits - 4);
  V const other = from_magnitude_bits<V>(magnitude_bits(nan) | high_bit);
  for (std::size_t const size : {4096, 50001}) {
    std::vector<TypeParam> gradient(size, TypeParam(nan));
    std::vector<V> residual(size, other);
    Segment<TypeParam> const segment{gradient, residual};
    ThresholdScratch<V> scratch;
    for (std::size_t const k : {std::size_t{1}, size / 100, size / 2, size - 1}) {
      auto const threshold = exact_threshold<TypeParam>(std::span(&segment, 1), k, scratch);
      EXPECT_EQ(threshold.magnitude, std::numeric_limits<V>::max()) << "k " << k;
    }
  }
}

TYPED_TEST(Kernels, SampledThresholdComesCloseToK) {
  using V = accumulate_t<TypeParam>;
  std::uint64_t const seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  ThresholdScratch<V> scratch;
  for (auto const& fill : fills<V>()) {
    SCOPED_TRACE(fill.name);
    Problem<TypeParam> problem(large_size, 0, fill, fill, random);
    std::vector<V> const sorted = sorted_magnitudes<V>(problem);
    auto const segments = as_segments(problem, 300000);
    for (std::size_t const k : {large_size / 10, large_size / 100, std::size_t{10}}) {
      auto const threshold = sampled_threshold<TypeParam>(
          std::span<const Segment<TypeParam>>(segments), k, 97, random(), scratch);
      Problem<TypeParam> selected = problem;
      auto const chosen = run_fused(kernels<TypeParam>(), selected, threshold, no_limit, 0);
      auto const expected = static_cast<double>(expected_count(sorted, k));
      // Five deviations of the smallest sample, so that a rare seed does not fail the test.
      double const most = std::string_view(fill.name) == "steps of density" ? 0.5 : 0.13;
      EXPECT_NEAR(static_cast<double>(chosen.stats.count), expected, most * expected) << "k " << k;
    }
  }
}

// Runs go on in the next segment, or over several; there are empty ones, and some have no residual.
TYPED_TEST(Kernels, SampledThresholdIgnoresHowTheGradientIsCut) {
  using V = accumulate_t<TypeParam>;
  using Segments = std::vector<Segment<TypeParam>>;
  constexpr std::size_t stride = 97;
  std::size_t const k = large_size / 10;
  ASSERT_GT(sampled_stride(large_size, k, stride), 0u);
  std::mt19937_64 random(7);
  auto const normal = fills<V>().front();
  Problem<TypeParam> problem(large_size, 0, normal, normal, random);
  std::size_t const half = large_size / 2;
  std::ranges::fill(problem.residual().first(half), V(0));
  // The first `bare` entries, nearly, have no residual.
  auto const cut = [&](std::size_t length, std::size_t bare) {
    Segments segments;
    for (Segment<TypeParam> segment : as_segments(problem, length)) {
      bare -= std::min(bare, segment.gradient.size());
      if (bare > 0) segment.residual = {};
      segments.push_back(segment);
      segments.push_back({segment.gradient.first(0), {}});
    }
    return segments;
  };
  ThresholdScratch<V> scratch;
  auto const threshold_of = [&](Segments const& segments, KernelTable<TypeParam> const& table) {
    return sampled_threshold<TypeParam>(segments, k, stride, 3, scratch, inline_executor(), table);
  };
  Segments const whole = cut(large_size, 0);
  auto const expected = threshold_of(whole, kernel_tables<TypeParam>().front());
  EXPECT_NE(expected.magnitude, exact_threshold<TypeParam>(whole, k, scratch).magnitude);
  for (auto const& table : kernel_tables<TypeParam>()) {
    SCOPED_TRACE(table.target);
    for (std::size_t const length : {std::size_t{7}, std::size_t{50}, large_size}) {
      for (std::size_t const bare : {std::size_t{0}, half}) {
        auto const threshold = threshold_of(cut(length, bare), table);
        EXPECT_EQ(threshold.magnitude, expected.magnitude) << "segments of " << length;
        EXPECT_EQ(threshold.ties, expected.ties);
      }
    }
  }
}

TYPED_TEST(Kernels, ScatterScalesAndPlaces) {
  using V = accumulate_t<TypeParam>;
  std::vector<TypeParam> destination(5, TypeParam(9));
  std::vector<std::uint32_t> const indices{10, 14, 12};
  std::vector<V> const values{1, -2, 3};
  scatter<TypeParam>(destination, indices, values, V(2), 10);
  std::vector<TypeParam> expected;
  for (V const value : {V(0.5), V(9), V(1.5), V(9), V(-1)}) expected.push_back(TypeParam(value));
  EXPECT_TRUE(same_entries(destination, expected));
  EXPECT_THROW(scatter<TypeParam>(destination, indices, values, V(1), 11), InvalidArgument);
  EXPECT_THROW(scatter<TypeParam>(destination, indices, values, V(1), 9), InvalidArgument);
  EXPECT_TRUE(same_entries(destination, expected)) << "something was written first";
  EXPECT_THROW(scatter<TypeParam>(destination, indices, std::span(values).first(2), V(1), 10),
               InvalidArgument);
}

}  // namespace
}  // namespace sparsecomm
