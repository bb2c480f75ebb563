// Gradients and residuals for the tests of the kernels, and what is done with them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "fills.h"
#include "kernels/kernels.h"
#include "kernels/magnitude.h"

namespace sparsecomm {

inline constexpr std::size_t no_limit = std::numeric_limits<std::size_t>::max();

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

  Packed(std::size_t room) : indices(room), values(room) {}
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
    return table.fused_error_feedback({problem.gradient(), problem.residual()}, threshold,
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
class KernelInputs : public testing::Test {
 public:
  using V = accumulate_t<T>;

  // Calls f(size, fill of the gradient, fill of the residual, random) for many combinations.
  template <class F>
  static void for_each_input(std::vector<std::size_t> const& sizes, F&& f) {
    std::uint64_t const seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    auto const all = fills<V>();
#ifdef __SANITIZE_THREAD__
    constexpr std::size_t stride = 4;  // races between threads do not depend on the input
#else
    constexpr std::size_t stride = 1;
#endif
    for (std::size_t const size : sizes) {
      for (std::size_t i = 0; i < all.size(); i += stride) {
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

}  // namespace sparsecomm
