// Values for codecs that round: of all magnitudes, to a whole number of buckets and not.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"

namespace sparsecomm::test {

template <class V>
bool same_bits(std::vector<V> const& a, std::vector<V> const& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(V)) == 0);
}

template <class V>
struct ValueSet {
  std::string name;
  std::vector<V> values;
};

template <class V>
std::vector<ValueSet<V>> value_sets() {
  using Limits = std::numeric_limits<V>;
  std::vector<ValueSet<V>> sets{
      {"empty", {}},
      {"zeros", std::vector<V>(5, V{0})},
      {"negative_zeros", std::vector<V>(1030, V(-0.0))},
      {"one", {V(-3.7)}},
      {"least", {Limits::denorm_min()}},
      {"subnormal", {Limits::min() / 3, -Limits::min() / 7, Limits::denorm_min(), V(-0.0)}},
      {"least_normal", {Limits::min(), -Limits::min() * V(1.5), Limits::denorm_min() * 5}},
      {"largest", {Limits::max(), -Limits::max(), Limits::max() / 3, 1, Limits::min(), 0}},
      {"beyond_f16", {V(65504), V(65519), V(65520), V(-70000), V(6e-8), V(-2.9e-8), V(1e-9)}},
      {"equal", std::vector<V>(2000, V(0.1))},
  };
  std::mt19937_64 generator(17);
  std::normal_distribution<double> normal;
  for (std::size_t size : {3u, 4u, 1023u, 1024u, 1025u, 3000u}) {
    ValueSet<V> set{concat("normal_", size), {}};
    for (std::size_t i = 0; i < size; ++i) set.values.push_back(V(normal(generator)));
    sets.push_back(set);
  }
  for (double spread : {1.0, 5.0, 20.0}) {
    ValueSet<V> set{concat("log_normal_", spread), {}};
    for (std::size_t i = 0; i < 1500; ++i) {
      set.values.push_back(V(normal(generator) * std::exp(spread * normal(generator))));
    }
    sets.push_back(set);
  }
  // The values of levels, and a few beside each.
  for (int top : {1, 7, 127}) {
    for (V scale : {V(0.7), V(3.3), Limits::max(), Limits::min() * 1000}) {
      ValueSet<V> set{concat("around_", top, "_levels_of_", scale), {scale}};
      for (int level = 0; level <= top; ++level) {
        V const value = level == top ? scale : scale / V(top) * V(level);
        V below = value;
        V above = value;
        for (int step = 0; step < 3; ++step) {
          set.values.insert(set.values.end(), {below, -above});
          below = std::nextafter(below, V(0));
          above = std::nextafter(above, scale);
        }
      }
      sets.push_back(set);
    }
  }
  // Every value that is a few times the least there is.
  for (int largest : {2, 3, 7, 8, 11, 100, 126, 127, 128, 129, 190, 253, 254, 255, 500}) {
    ValueSet<V> set{concat("units_", largest), {}};
    for (int i = -largest; i <= largest; ++i) set.values.push_back(V(i) * Limits::denorm_min());
    sets.push_back(set);
  }
  return sets;
}

}  // namespace sparsecomm::test
