#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <ranges>
#include <span>
#include <vector>

#include "allocations.h"
#include "kernels/block_scan.h"
#include "sparse/intersection.h"
#include "sparse/stream.h"
#include "sparse/sum.h"

namespace sparsecomm {
namespace {

constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();

template <class V>
struct Pairs {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  SparseView<V> view() const { return {indices, values}; }
};

template <class V>
Pairs<V> random_pairs(std::mt19937_64& generator, std::uint32_t first, std::uint32_t extent,
                      std::uint64_t one_in) {
  Pairs<V> pairs;
  for (std::uint32_t i = 0; i < extent; ++i) {
    if (generator() % one_in != 0) continue;
    pairs.indices.push_back(first + i);
    pairs.values.push_back(V(int(generator() % 9) - 4));
  }
  return pairs;
}

template <class V>
class Streams : public testing::Test {};
using ValueTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(Streams, ValueTypes);

TYPED_TEST(Streams, SumsEqualAnOracle) {
  using V = TypeParam;
  std::uint64_t const seed = std::random_device{}();
  SCOPED_TRACE(concat("seed ", seed));
  std::mt19937_64 generator(seed);
  SparseStream<V> stream;
  for (int round = 0; round < 300; ++round) {
    auto const extent = static_cast<std::uint32_t>(1 + generator() % 500);
    auto const first = static_cast<std::uint32_t>(generator() % (never >> 32)) - extent + 1;
    if (std::uint64_t{first} + extent > never >> 31) continue;
    std::uint64_t const delta = generator() % 3 == 0 ? never : generator() % (extent + 1);
    stream.reset(first, extent, delta);
    std::map<std::uint32_t, V> oracle;
    bool dense = false;
    std::uint64_t const terms = generator() % 6;
    for (std::uint64_t term = 0; term < terms; ++term) {
      // Terms within a part of the range also come disjoint, before or behind what is there.
      auto const begin = static_cast<std::uint32_t>(generator() % extent);
      auto const length = static_cast<std::uint32_t>(generator() % (extent - begin)) + 1;
      auto const pairs = random_pairs<V>(generator, first + begin, length, 1 + generator() % 20);
      if (!pairs.indices.empty() && oracle.size() + pairs.indices.size() > delta) dense = true;
      stream.add(pairs.view());
      for (std::size_t i = 0; i < pairs.indices.size(); ++i) {
        oracle[pairs.indices[i]] += pairs.values[i];
      }
      ASSERT_EQ(stream.is_dense(), dense);
      ASSERT_EQ(stream.nnz(), dense ? extent : oracle.size());
    }
    if (generator() % 2 == 0) {
      auto const all = stream.dense();
      ASSERT_EQ(all.size(), extent);
      for (std::uint32_t i = 0; i < extent; ++i) {
        auto const entry = oracle.find(first + i);
        ASSERT_EQ(all[i], entry == oracle.end() ? V{0} : entry->second);
      }
      dense = true;
    }
    if (dense) std::erase_if(oracle, [](auto const& entry) { return entry.second == 0; });
    auto const view = stream.sparse();
    ASSERT_FALSE(stream.is_dense());
    ASSERT_EQ(view.nnz(), oracle.size());
    std::size_t i = 0;
    for (auto const& [index, value] : oracle) {
      ASSERT_EQ(view.indices[i], index);
      ASSERT_EQ(view.values[i++], value);
    }
  }
}

TYPED_TEST(Streams, DeltaIsTheLastSparseSize) {
  using V = TypeParam;
  Pairs<V> const two{{1, 3}, {1, 1}};
  Pairs<V> const three{{1, 2, 3}, {1, 1, 1}};
  SparseStream<V> stream;
  stream.reset(0, 100, 5);
  stream.add(two.view());
  stream.add(three.view());  // the bound is 5, though the union has 3
  EXPECT_FALSE(stream.is_dense());
  EXPECT_EQ(stream.nnz(), 3u);
  stream.add(two.view());  // 3 + 2
  EXPECT_FALSE(stream.is_dense());
  stream.add(three.view());  // 3 + 3
  EXPECT_TRUE(stream.is_dense());
  EXPECT_EQ(stream.nnz(), 100u);
  EXPECT_EQ(stream.dense()[1], V{4});
  stream.reset(0, 100, 0);
  stream.add({});
  EXPECT_FALSE(stream.is_dense());
}

TYPED_TEST(Streams, DefaultDeltaIsWherePairsOutgrowTheVector) {
  using V = TypeParam;
  for (std::uint64_t extent : {0ull, 1ull, 2ull, 3ull, 100ull, 1ull << 24, (1ull << 32) - 1}) {
    std::uint64_t const delta = default_delta<V>(extent);
    EXPECT_LE(delta * (4 + sizeof(V)), extent * sizeof(V));
    EXPECT_GT((delta + 1) * (4 + sizeof(V)), extent * sizeof(V));
  }
}

TYPED_TEST(Streams, CancelledAndNegativeZerosStayEntries) {
  using V = TypeParam;
  SparseStream<V> stream;
  stream.reset(0, 100, never);
  stream.add(Pairs<V>{{1, 5, 9}, {2, V(-0.0), 3}}.view());
  stream.add(Pairs<V>{{1, 7}, {-2, V(-0.0)}}.view());
  auto const view = stream.sparse();
  ASSERT_EQ(view.nnz(), 4u);
  EXPECT_EQ(view.values[0], V{0});
  EXPECT_TRUE(std::signbit(view.values[1]));
  EXPECT_TRUE(std::signbit(view.values[2]));
  EXPECT_EQ(view.indices[2], 7u);
}

TYPED_TEST(Streams, NonFiniteValuesSurvive) {
  using V = TypeParam;
  V const inf = std::numeric_limits<V>::infinity();
  for (std::uint64_t delta : {never, std::uint64_t{0}}) {
    SparseStream<V> stream;
    stream.reset(0, 10, delta);
    stream.add(Pairs<V>{{1, 2, 3}, {std::numeric_limits<V>::quiet_NaN(), inf, 1}}.view());
    stream.add(Pairs<V>{{2, 3}, {-inf, inf}}.view());
    auto const view = stream.sparse();
    ASSERT_EQ(view.nnz(), 3u);
    EXPECT_TRUE(std::isnan(view.values[0]));
    EXPECT_TRUE(std::isnan(view.values[1]));
    EXPECT_EQ(view.values[2], inf);
  }
}

TYPED_TEST(Streams, RefusesEntriesOutsideTheRange) {
  using V = TypeParam;
  SparseStream<V> stream;
  stream.reset(10, 5);
  EXPECT_THROW(stream.add(Pairs<V>{{9}, {1}}.view()), InvalidArgument);
  EXPECT_THROW(stream.add(Pairs<V>{{15}, {1}}.view()), InvalidArgument);
  EXPECT_THROW(stream.add(Pairs<V>{{11, 12}, {1}}.view()), InvalidArgument);
  EXPECT_NO_THROW(stream.add(Pairs<V>{{10, 14}, {1, 1}}.view()));
  EXPECT_THROW(stream.reset(1, never >> 32 << 1), InvalidArgument);
  EXPECT_NO_THROW(stream.reset(1, never >> 32));
  EXPECT_NO_THROW(stream.add(Pairs<V>{{1, 0xffffffffu}, {1, 1}}.view()));
}

TYPED_TEST(Streams, NothingIsAllocatedAfterTheFirstSumOfASize) {
  using V = TypeParam;
  std::mt19937_64 generator(1);
  std::vector<Pairs<V>> terms;
  for (int i = 0; i < 5; ++i) terms.push_back(random_pairs<V>(generator, 0, 2000, 10));
  SparseStream<V> stream;
  for (std::uint64_t delta : {never, std::uint64_t{600}}) {
    std::size_t counted = 0;
    for (int round = 0; round < 4; ++round) {
      test::counting = true;
      std::size_t const before = test::allocations;
      stream.reset(0, 2000, delta);
      for (auto const& term : terms) stream.add(term.view());
      if (delta != never) stream.dense();
      stream.sparse();
      counted = test::allocations - before;
      test::counting = false;
      if (round == 0 && delta == never) {
        EXPECT_GT(counted, 0u);
      }
      if (round > 0) {
        EXPECT_EQ(counted, 0u) << "round " << round;
      }
    }
  }
}

TEST(SparseView, RangeHoldsWhatLiesBetween) {
  std::vector<std::uint32_t> const indices{0, 4, 5, 9, 0xffffffffu};
  std::vector<float> const values{1, 2, 3, 4, 5};
  SparseView<float> const view{indices, values};
  EXPECT_EQ(view.range(0, std::uint64_t{1} << 32).nnz(), 5u);
  EXPECT_EQ(view.range(0, 0xffffffffu).nnz(), 4u);
  EXPECT_EQ(view.range(4, 9).nnz(), 2u);
  EXPECT_EQ(view.range(4, 9).values[0], 2.0f);
  EXPECT_EQ(view.range(6, 9).nnz(), 0u);
  EXPECT_EQ(view.range(9, 4).nnz(), 0u);
  EXPECT_EQ(view.range(10, std::uint64_t{1} << 32).indices[0], 0xffffffffu);
  EXPECT_EQ(SparseView<float>{}.range(0, 10).nnz(), 0u);
}

// Bit for bit the sum of one stream after the other.
template <class V>
void check_sums() {
  std::mt19937_64 generator(11);
  SparseSum<V> sum;
  for (int round = 0; round < 300; ++round) {
    // At times several windows of the sum.
    bool const wide = round % 20 == 0;
    auto const extent = static_cast<std::uint32_t>(1 + generator() % (wide ? 200'000 : 5000));
    auto const first =
        static_cast<std::uint32_t>(generator() % 1000) + (round % 2 ? 0xffff0000u : 0u);
    sum.reset(first, extent);
    std::map<std::uint32_t, V> expected;
    std::deque<Pairs<V>> streams;
    std::uint64_t const sparsest = round % 3 == 0 ? 4000 : 400;
    for (std::uint64_t stream = generator() % 9; stream > 0; --stream) {
      auto& pairs = streams.emplace_back(
          random_pairs<V>(generator, first, extent, 1 + generator() % sparsest));
      for (V& value : pairs.values) value = value == 0 ? static_cast<V>(-0.0) : value / V{3};
      if (generator() % 2 == 0) {
        sum.add(pairs.view());
      } else {
        sum.add_from([&](auto& indices, auto& values) {
          indices.insert(indices.end(), pairs.indices.begin(), pairs.indices.end());
          values.insert(values.end(), pairs.values.begin(), pairs.values.end());
        });
      }
      for (std::size_t i = 0; i < pairs.indices.size(); ++i) {
        auto const [entry, is_first] = expected.try_emplace(pairs.indices[i], pairs.values[i]);
        if (!is_first) entry->second = static_cast<V>(entry->second + pairs.values[i]);
      }
      if (generator() % 4 == 0) sum.fold();
    }
    auto const found = sum.sum();
    ASSERT_TRUE(std::ranges::equal(found.indices, std::views::keys(expected)));
    std::vector<V> values;
    std::ranges::copy(std::views::values(expected), std::back_inserter(values));
    ASSERT_TRUE(std::ranges::equal(std::as_bytes(found.values), std::as_bytes(std::span(values))));
  }
}

TEST(SparseSum, EqualsAddingOneByOne) {
  check_sums<float>();
  check_sums<double>();
  check_sums<std::int32_t>();
  check_sums<std::int64_t>();
}

TEST(SparseSum, NothingIsAllocatedAfterTheFirstOfASize) {
  std::mt19937_64 generator(23);
  for (std::uint64_t const one_in : {5, 5000}) {
    for (int const streams : {1, 2, 3, 6, 7}) {
      std::vector<Pairs<float>> terms;
      for (int i = 0; i < streams; ++i) {
        terms.push_back(random_pairs<float>(generator, 0, 100'000, one_in));
      }
      SparseSum<float> sum;
      for (int round = 0; round < 3; ++round) {
        test::counting = true;
        std::size_t const before = test::allocations;
        sum.reset(0, 100'000);
        for (auto const& term : terms) {
          sum.add(term.view());
          if (streams == 7 && &term != &terms.front()) sum.fold();
        }
        sum.sum();
        std::size_t const counted = test::allocations - before;
        test::counting = false;
        EXPECT_EQ(counted > 0, round == 0) << streams << " streams, one in " << one_in;
      }
    }
  }
}

TEST(SparseSum, RefusesWhatLiesOutside) {
  SparseSum<float> sum;
  sum.reset(10, 5);
  Pairs<float> const below{{9}, {1}};
  Pairs<float> const above{{12, 15}, {1, 1}};
  Pairs<float> const within{{12}, {1}};
  EXPECT_THROW(sum.add(below.view()), InvalidArgument);
  EXPECT_THROW(sum.add(above.view()), InvalidArgument);
  EXPECT_THROW(sum.add({within.indices, {}}), InvalidArgument);
  sum.add(within.view());
  EXPECT_EQ(sum.sum().nnz(), 1u);
  EXPECT_THROW(sum.reset(1, std::uint64_t{1} << 32), InvalidArgument);
}

// Every table against set operations, for lists of about the same length and far from it.
template <class V>
void check_intersections() {
  std::mt19937_64 generator(19);
  for (IntersectKernelTable const& table : intersect_kernel_tables()) {
    SparseIntersection<V> intersection(table);
    for (int round = 0; round < 400; ++round) {
      SCOPED_TRACE(concat(table.target, ", round ", round));
      auto const extent = static_cast<std::uint32_t>(1 + generator() % 3000);
      std::uint32_t const first = round % 2 == 0 ? 0 : 0xffffffffu - extent;
      std::uint64_t const sparse = std::uint64_t{1} << generator() % 12;
      auto const one = random_pairs<V>(generator, first, extent, 1 + generator() % sparse);
      auto const other = random_pairs<V>(generator, first, extent, 1 + generator() % 5);
      for (auto const& [a, b] : {std::pair(&one, &other), std::pair(&other, &one), {&one, &one}}) {
        std::vector<std::uint32_t> expected;
        std::ranges::set_intersection(a->indices, b->indices, std::back_inserter(expected));
        auto const value_in = [&](Pairs<V> const& pairs, std::size_t i) {
          auto const at = std::ranges::lower_bound(pairs.indices, expected[i]);
          return pairs.values[static_cast<std::size_t>(at - pairs.indices.begin())];
        };
        SparseView<V> const alone = intersection.run(a->view(), b->indices);
        ASSERT_TRUE(std::ranges::equal(alone.indices, expected));
        for (std::size_t i = 0; i < expected.size(); ++i) {
          ASSERT_EQ(alone.values[i], value_in(*a, i));
        }
        auto const both = intersection.run(a->view(), b->view());
        ASSERT_TRUE(std::ranges::equal(both.indices, expected));
        for (std::size_t i = 0; i < expected.size(); ++i) {
          ASSERT_EQ(both.one[i], value_in(*a, i));
          ASSERT_EQ(both.other[i], value_in(*b, i));
        }
        expected.clear();
        std::ranges::set_difference(a->indices, b->indices, std::back_inserter(expected));
        SparseView<V> const rest = intersection.difference(a->view(), b->indices);
        ASSERT_TRUE(std::ranges::equal(rest.indices, expected));
        ASSERT_EQ(rest.values.size(), expected.size());
        for (std::size_t i = 0; i < expected.size(); ++i) {
          ASSERT_EQ(rest.values[i], value_in(*a, i));
        }
      }
    }
  }
}

TEST(SparseIntersection, HasWhatBothHaveAndWhatOneLacks) {
  check_intersections<float>();
  check_intersections<double>();
  check_intersections<std::int32_t>();
  check_intersections<std::int64_t>();
}

TEST(SparseIntersection, TheTablesAreThoseOfTheOtherKernels) {
  auto const tables = intersect_kernel_tables();
  auto const others = block_kernel_tables();
  ASSERT_EQ(tables.size(), others.size());
  for (std::size_t i = 0; i < tables.size(); ++i) EXPECT_EQ(tables[i].target, others[i].target);
}

// Against the reduction of whole vectors, at every delta, with sparse and dense operands.
template <class V>
void check_reductions() {
  std::mt19937_64 random(17);
  std::size_t const extent = 60;
  for (ReductionEntry const& entry : reductions()) {
    for (std::uint64_t delta = 0; delta <= extent; delta += 5) {
      V const absent = neutral<V>(entry.id);
      SparseStream<V> stream;
      stream.reset(3, extent, delta, entry.id);
      std::vector<V> expected(extent, absent);
      for (int operand = 0; operand < 4; ++operand) {
        std::vector<std::uint32_t> indices;
        std::vector<V> values;
        std::vector<V> whole(extent, absent);
        for (std::uint32_t i = 0; i < extent; ++i) {
          if (random() % 4 != 0) continue;
          indices.push_back(3 + i);
          values.push_back(static_cast<V>(static_cast<int>(random() % 9) - 4));
          whole[i] = values.back();
        }
        if (operand == 3) {
          stream.add_dense(whole);
        } else {
          stream.add({indices, values});
        }
        visit_reduction<V>(entry.id, [&](auto combine) {
          for (std::size_t i = 0; i < extent; ++i) expected[i] = combine(expected[i], whole[i]);
        });
      }
      EXPECT_TRUE(stream.view().is_dense);
      auto const pairs = stream.sparse();
      std::vector<V> actual(extent, absent);
      for (std::size_t i = 0; i < pairs.nnz(); ++i) actual[pairs.indices[i] - 3] = pairs.values[i];
      EXPECT_EQ(actual, expected) << entry.name << ", delta " << delta;
      EXPECT_TRUE(std::ranges::equal(stream.dense(), expected)) << entry.name;
    }
  }
}

TEST(SparseStream, EveryReductionOfEveryTypeAgreesWithThatOfWholeVectors) {
  check_reductions<float>();
  check_reductions<double>();
  check_reductions<std::int32_t>();
  check_reductions<std::int64_t>();
}

TEST(Reduction, IntegersWrapAroundAndNanWins) {
  EXPECT_EQ((Combine<Reduction::sum, std::int32_t>{}(INT32_MAX, 1)), INT32_MIN);
  EXPECT_EQ((Combine<Reduction::product, std::int64_t>{}(INT64_MAX, 2)), -2);
  float const nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(Combine<Reduction::min, float>{}(nan, 1)));
  EXPECT_TRUE(std::isnan(Combine<Reduction::min, float>{}(1, nan)));
  EXPECT_TRUE(std::isnan(Combine<Reduction::max, float>{}(nan, 1)));
  EXPECT_TRUE(std::isnan(Combine<Reduction::max, float>{}(1, nan)));
}

}  // namespace
}  // namespace sparsecomm
