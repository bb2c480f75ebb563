#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/magnitude.h"

namespace sparsecomm {
namespace {

constexpr std::size_t no_limit = std::numeric_limits<std::size_t>::max();

// Equal bits, except that the payload of a NaN is nobody's business.
template <class V>
bool same(V a, V b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<magnitude_bits_t<V>>(a) == std::bit_cast<magnitude_bits_t<V>>(b);
}

template <class T>
bool same_entries(std::vector<T> const& a, std::vector<T> const& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](T x, T y) { return same(widen(x), widen(y)); });
}

// Ways to fill a gradient or a residual. Sums of two fills are of interest too.
template <class V>
struct Fill {
  std::string name;
  std::function<V(std::mt19937_64&)> draw;
};

template <class V>
std::vector<Fill<V>> fills() {
  using Limits = std::numeric_limits<V>;
  auto const pick = [](std::vector<V> choices) {
    return [choices](std::mt19937_64& random) { return choices[random() % choices.size()]; };
  };
  return {
      {"normal", [](std::mt19937_64& random) { return std::normal_distribution<V>()(random); }},
      {"wide",
       [](std::mt19937_64& random) {
         return std::ldexp(std::normal_distribution<V>()(random),
                           static_cast<int>(random() % 60) - 40);
       }},
      {"integers", pick({-3, -2, -2, -1, -1, -1, 0, 0, 1, 1, 1, 2, 2, 3})},
      {"equal", pick({2})},
      {"zeros", pick({V(0), V(-0.0)})},
      {"mostly zeros", pick(std::vector<V>{V(0), V(0), V(-0.0), V(0), V(0), V(0), V(1), V(-2)})},
      {"denormals", pick({Limits::denorm_min(), -Limits::denorm_min(), Limits::min() / 2, V(6e-8),
                          V(-9e-41), V(0), Limits::min()})},
      {"not finite", pick({V(1), V(2), V(-2), V(3), V(0), Limits::infinity(), -Limits::infinity(),
                           Limits::quiet_NaN(), V(0.5), V(-1)})},
      {"one in many not finite",
       [](std::mt19937_64& random) {
         if (random() % 700 == 0) return random() % 2 ? Limits::infinity() : -Limits::quiet_NaN();
         return std::normal_distribution<V>()(random);
       }},
      {"huge", pick({Limits::max(), -Limits::max(), Limits::max() / 2, V(1)})},
  };
}

// A gradient with its residual, both `offset` entries into their allocation, and what is selected
// from them.
template <class T>
struct Problem {
  using V = accumulate_t<T>;

  Problem(std::size_t size, std::size_t offset, Fill<V> const& of_gradient,
          Fill<V> const& of_residual, std::mt19937_64& random)
      : offset(offset), gradient_storage(size + offset), residual_storage(size + offset) {
    for (T& value : gradient_storage) value = T(of_gradient.draw(random));
    for (V& value : residual_storage) value = of_residual.draw(random);
  }

  std::span<T> gradient() { return std::span(gradient_storage).subspan(offset); }
  std::span<V> residual() { return std::span(residual_storage).subspan(offset); }
  std::size_t size() { return gradient().size(); }
  V sum(std::size_t i) { return residual()[i] + widen(gradient()[i]); }

  std::size_t offset;
  std::vector<T> gradient_storage;
  std::vector<V> residual_storage;
};

template <class V>
struct Packed {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  SelectionStats<V> stats;
  std::uint64_t ties_left = 0;

  Packed(std::size_t room) : indices(room + packed_slack), values(room + packed_slack) {}
  PackedSpan<V> span() { return {indices, values}; }
  void trim() { indices.resize(stats.count), values.resize(stats.count); }
};

template <class V, class Kernel>
Packed<V> run(Kernel&& kernel, std::size_t room, Threshold<V> threshold) {
  Packed<V> packed(room);
  packed.stats = kernel(threshold, packed.span());
  packed.ties_left = threshold.ties;
  packed.trim();
  return packed;
}

template <class T, class V = accumulate_t<T>>
Packed<V> run_fused(KernelTable<T> const& table, Problem<T>& problem, Threshold<V> threshold,
                    std::size_t limit, std::uint32_t first_index = 7) {
  auto const kernel = [&](Threshold<V>& threshold, PackedSpan<V> out) {
    return table.fused_error_feedback(problem.gradient(), problem.residual(), threshold,
                                      first_index, limit, out);
  };
  return run<V>(kernel, std::min(limit, problem.size()), threshold);
}

template <class T, class V = accumulate_t<T>>
Packed<V> run_select(KernelTable<T> const& table, std::span<const T> x, Threshold<V> threshold,
                     std::size_t limit, std::uint32_t first_index = 7) {
  auto const kernel = [&](Threshold<V>& threshold, PackedSpan<V> out) {
    return table.select(x, threshold, first_index, limit, out);
  };
  return run<V>(kernel, std::min(limit, x.size()), threshold);
}

template <class V>
void expect_same(Packed<V> const& actual, Packed<V> const& expected) {
  EXPECT_EQ(actual.indices, expected.indices);
  EXPECT_TRUE(same_entries(actual.values, expected.values));
  EXPECT_EQ(actual.stats.max_magnitude, expected.stats.max_magnitude);
  EXPECT_EQ(actual.stats.finite, expected.stats.finite);
  EXPECT_EQ(actual.stats.complete, expected.stats.complete);
  EXPECT_EQ(actual.ties_left, expected.ties_left);
}

template <class T>
std::vector<Segment<T>> as_segments(Problem<T>& problem, std::size_t length) {
  std::vector<Segment<T>> segments;
  for (std::size_t begin = 0; begin < problem.size(); begin += length) {
    std::size_t const size = std::min(length, problem.size() - begin);
    segments.push_back(
        {problem.gradient().subspan(begin, size), problem.residual().subspan(begin, size)});
  }
  return segments;
}

template <class V>
std::vector<V> sorted_magnitudes(auto& problem) {
  std::vector<V> magnitudes(problem.size());
  for (std::size_t i = 0; i < magnitudes.size(); ++i) magnitudes[i] = std::abs(problem.sum(i));
  std::sort(magnitudes.begin(), magnitudes.end(),
            [](V a, V b) { return magnitude_bits(a) > magnitude_bits(b); });
  return magnitudes;
}

// How many entries a selection of k takes: no zeros, and all that are not finite.
template <class V>
std::size_t expected_count(std::vector<V> const& magnitudes, std::size_t k) {
  std::size_t const zeros = std::count(magnitudes.begin(), magnitudes.end(), V(0));
  std::size_t const finite = std::count_if(magnitudes.begin(), magnitudes.end(),
                                           [](V value) { return std::isfinite(value); });
  return std::max(std::min(k, magnitudes.size() - zeros), magnitudes.size() - finite);
}

template <class T>
class Kernels : public testing::Test {
 public:
  using V = accumulate_t<T>;

  // Calls f(size, fill of the gradient, fill of the residual, random) for many combinations.
  template <class F>
  static void for_each_input(std::vector<std::size_t> const& sizes, F&& f) {
    std::uint64_t const seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    auto const all = fills<V>();
    for (std::size_t const size : sizes) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        for (std::size_t const j : {std::size_t{0}, std::size_t{4}, i}) {
          SCOPED_TRACE(concat(all[i].name, " + ", all[j].name, ", size ", size));
          f(size, all[i], all[j], random);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }

  static std::vector<std::size_t> limits(std::size_t size) {
    return {0, 1, size / 3, size, no_limit};
  }

  static std::vector<Threshold<V>> thresholds() {
    using Limits = std::numeric_limits<V>;
    std::vector<Threshold<V>> all;
    for (V const magnitude : {V(0), V(2), V(4), V(1.5), V(-1), V(-0.0), Limits::max(),
                              Limits::infinity(), Limits::denorm_min(), Limits::quiet_NaN()}) {
      for (std::uint64_t const ties : {0, 1, 37, 1 << 30}) all.push_back({magnitude, ties});
    }
    return all;
  }
};

using ElementTypes = testing::Types<float, double, Half, BFloat16>;
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
    EXPECT_THROW(table.fused_error_feedback(x, residual, threshold, 0, 99, packed.span()),
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
            segment.gradient, segment.residual, remaining, first, limit - count,
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
  std::vector<V> scratch;
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

TYPED_TEST(Kernels, SampledThresholdComesCloseToK) {
  using V = accumulate_t<TypeParam>;
  std::uint64_t const seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::vector<V> scratch;
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
      EXPECT_NEAR(static_cast<double>(chosen.stats.count), expected, 0.19 * expected) << "k " << k;
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
  EXPECT_THROW(scatter<TypeParam>(destination, indices, std::span(values).first(2), V(1), 10),
               InvalidArgument);
}

}  // namespace
}  // namespace sparsecomm
