// The cut of values that one rank has, against their order; how ranks agree on it the tests of
// oktopk say.
#include "collectives/global_cut.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "base/error.h"
#include "base/magnitude.h"

namespace sparsecomm::test {
namespace {

template <class V>
class GlobalCutTest : public ::testing::Test {};
using ValueTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(GlobalCutTest, ValueTypes);

template <class V>
struct Named {
  std::string name;
  std::vector<V> values;
};

template <class V>
std::vector<Named<V>> value_sets(std::size_t count) {
  using Limits = std::numeric_limits<V>;
  std::mt19937_64 random(count);
  std::normal_distribution<V> normal;
  std::vector<Named<V>> sets{{"normal", {}},
                             {"denormal", {}},
                             {"few", {}},
                             {"extreme", {}},
                             {"equal", std::vector<V>(count, V(-0.375))}};
  V const few[] = {V{0}, V{1}, V{-2}, V{4}};
  V const extreme[] = {V{0},          Limits::max(),       -Limits::infinity(), Limits::quiet_NaN(),
                       Limits::min(), Limits::denorm_min()};
  for (std::size_t i = 0; i < count; ++i) {
    V const value = normal(random);
    sets[0].values.push_back(value);
    sets[1].values.push_back(value * 100 * Limits::denorm_min());
    sets[2].values.push_back(few[random() % std::size(few)]);
    sets[3].values.push_back(extreme[random() % std::size(extreme)]);
  }
  return sets;
}

template <class V>
std::vector<std::uint64_t> patterns_of(std::span<const V> values) {
  std::vector<std::uint64_t> patterns;
  for (V const value : values) patterns.push_back(magnitude_bits(value));
  return patterns;
}

// Whether each is kept.
std::vector<bool> kept_by(Cut const& cut, std::span<const std::uint64_t> patterns) {
  std::vector<bool> kept;
  std::uint64_t quota = cut.quota;
  for (std::uint64_t const pattern : patterns) {
    bool const in_quota = pattern >= cut.low && pattern < cut.high && quota > 0;
    quota -= in_quota;
    kept.push_back(pattern >= cut.high || in_quota);
  }
  EXPECT_EQ(quota, 0u);
  return kept;
}

template <class V>
void check(std::string const& name, std::span<const V> values, std::uint64_t k) {
  SCOPED_TRACE(concat(name, ", k = ", k, " of ", values.size()));
  auto const patterns = patterns_of(values);
  std::uint64_t const wanted = std::min<std::uint64_t>(k, values.size());

  GlobalCut<V> search;
  auto kept = kept_by(search.run_everywhere(values, k, ThresholdSource::exact), patterns);
  ASSERT_EQ(search.kept().size(), 1u);
  EXPECT_EQ(search.kept().front(), wanted);
  std::vector<std::size_t> order(values.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, std::ranges::greater{},
                           [&](std::size_t i) { return patterns[i]; });
  for (std::size_t place = 0; place < order.size(); ++place) {
    ASSERT_EQ(kept[order[place]], place < wanted) << "place " << place;
  }
  if (k < values.size()) {
    EXPECT_EQ(magnitude_bits(static_cast<V>(search.threshold())), patterns[order[k - 1]]);
  }

  // Of values that have grown since, within the window, at its end and beyond.
  V const former = static_cast<V>(search.threshold());
  std::uint64_t const window = magnitude_bits(former * 2) - magnitude_bits(former / 2);
  std::uint64_t const bins = GlobalCut<V>::bins(k);
  std::uint64_t const bin = std::bit_ceil((window + bins - 1) / bins);
  for (double const factor : {1.0, 1.3, 2.0, 3.0}) {
    SCOPED_TRACE(concat("times ", factor));
    GlobalCut<V> later;
    later.load_threshold(search.threshold());
    std::vector<V> grown(values.begin(), values.end());
    for (V& value : grown) value *= static_cast<V>(factor);
    auto const grown_patterns = patterns_of<V>(grown);
    Cut const cut = later.run_everywhere(grown, k, ThresholdSource::sampled);
    kept = kept_by(cut, grown_patterns);
    EXPECT_EQ(later.kept().front(), wanted);
    EXPECT_EQ(std::ranges::count(kept, true), static_cast<std::ptrdiff_t>(wanted));
    // Only what lies in one bin is not ordered, and that of an exact search is a single magnitude.
    bool const beyond = factor > 2 && std::isnormal(former) && std::isfinite(3 * former);
    EXPECT_LE(cut.high - cut.low, beyond ? 1 : std::max<std::uint64_t>(1, bin));
    for (std::size_t i = 0; i < grown.size(); ++i) {
      ASSERT_TRUE(kept[i] ? grown_patterns[i] >= cut.low : grown_patterns[i] < cut.high) << i;
    }
  }

  if (former == 0) return;
  Cut const reused = search.run_everywhere(values, k, ThresholdSource::reused);
  EXPECT_EQ(reused.low, magnitude_bits(former));
  EXPECT_EQ(reused.high, reused.low);
  auto const at_least = std::ranges::count_if(
      patterns, [&](std::uint64_t pattern) { return pattern >= magnitude_bits(former); });
  EXPECT_EQ(search.kept().front(), static_cast<std::uint64_t>(at_least));
}

TYPED_TEST(GlobalCutTest, KeepsTheLargestOfAnyValues) {
  for (std::size_t const count : {1u, 100u, 20'000u}) {
    for (auto const& [name, values] : value_sets<TypeParam>(count)) {
      // From the fewest bins to the most.
      for (std::uint64_t const k : {1u, 99u, 1'000u, 19'999u, 20'000u}) {
        check<TypeParam>(name, values, k);
      }
    }
  }
}

TYPED_TEST(GlobalCutTest, ASampledCutIsAsFineAsABin) {
  std::size_t const count = 20'000;
  std::uint64_t const k = 10'000;
  ASSERT_EQ(GlobalCut<TypeParam>::bins(k), 128u);
  GlobalCut<TypeParam> search;
  auto const values = value_sets<TypeParam>(count).front().values;
  search.run_everywhere(values, k, ThresholdSource::exact);
  Cut const cut = search.run_everywhere(values, k, ThresholdSource::sampled);
  // Two octaves by 128 bins.
  EXPECT_EQ(cut.high - cut.low, std::uint64_t{1} << (std::numeric_limits<TypeParam>::digits - 7));
}

TYPED_TEST(GlobalCutTest, NothingIsCutOfNothing) {
  GlobalCut<TypeParam> search;
  for (auto const source : {ThresholdSource::exact, ThresholdSource::sampled}) {
    search.run_everywhere({}, 10, source);
    EXPECT_EQ(search.kept().front(), 0u);
  }
}

}  // namespace
}  // namespace sparsecomm::test
