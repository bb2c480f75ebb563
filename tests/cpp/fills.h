// Adversarial values for the tests of the kernels, and how results are compared.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/magnitude.h"

namespace sparsecomm {

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

template <class T>
void expect_equal(std::vector<T> const& actual, std::vector<T> const& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  auto const equal = [](T x, T y) { return same(widen(x), widen(y)); };
  EXPECT_EQ(std::ranges::mismatch(actual, expected, equal).in1 - actual.begin(),
            static_cast<std::ptrdiff_t>(expected.size()));
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
      {"NaN", pick({Limits::quiet_NaN(), -Limits::quiet_NaN()})},
      {"infinite", pick({Limits::infinity(), -Limits::infinity()})},
      {"steps of density",
       [drawn = std::size_t{0}](std::mt19937_64& random) mutable {
         switch (drawn++ / 700 % 4) {
           case 0:
             return V(0);
           case 1:
             return V(3);
           case 2:
             return std::normal_distribution<V>()(random);
           default:
             return random() % 50 == 0 ? V(-5) : V(0.25);
         }
       }},
      {"huge", pick({Limits::max(), -Limits::max(), Limits::max() / 2, V(1)})},
  };
}

}  // namespace sparsecomm
