// Adversarial values, and how results are compared.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/magnitude.h"

namespace sparsecomm::test {

template <class V>
bool same(V a, V b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<magnitude_bits_t<V>>(a) == std::bit_cast<magnitude_bits_t<V>>(b);
}

template <class T>
std::size_t first_difference(std::span<const T> a, std::span<const T> b) {
  return std::ranges::mismatch(a, b, [](T x, T y) { return same(widen(x), widen(y)); }).in1 -
         a.begin();
}

template <class T>
void expect_equal(std::vector<T> const& actual, std::vector<T> const& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  EXPECT_EQ(first_difference<T>(actual, expected), expected.size());
}

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
      {"mostly zeros", pick({V(0), V(0), V(-0.0), V(0), V(0), V(0), V(1), V(-2)})},
      {"denormals", pick({Limits::denorm_min(), -Limits::denorm_min(), Limits::min() / 2, V(6e-8),
                          V(-9e-41), V(0), Limits::min()})},
      {"not finite", pick({V(1), V(2), V(-2), V(3), V(0), Limits::infinity(), -Limits::infinity(),
                           Limits::quiet_NaN(), V(0.5), V(-1)})},
      {"huge", pick({Limits::max(), -Limits::max(), Limits::max() / 2, V(1)})},
  };
}

}  // namespace sparsecomm::test
