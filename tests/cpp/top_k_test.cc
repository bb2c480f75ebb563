#include "kernels/top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "kernel_problems.h"
#include "thread_executor.h"

namespace sparsecomm {
namespace {

// By the words of top_k.h.
template <class T>
std::vector<std::uint32_t> expected_top_k(std::span<const T> x, std::size_t k) {
  std::vector<std::uint32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0u);
  auto const comes_first = [&](std::uint32_t a, std::uint32_t b) {
    auto const left = widen(x[a]), right = widen(x[b]);
    if (std::isfinite(left) != std::isfinite(right)) return std::isfinite(right);
    if (!std::isfinite(left) || std::abs(left) == std::abs(right)) return a < b;
    return std::abs(left) > std::abs(right);
  };
  std::size_t const count = std::min(k, order.size());
  std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(),
                   comes_first);
  order.resize(count);
  std::ranges::sort(order);
  return order;
}

template <class T>
void expect_entries(std::span<const T> x, Packed<accumulate_t<T>> const& packed,
                    std::vector<std::uint32_t> const& expected) {
  ASSERT_EQ(packed.indices, expected);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(same(packed.values[i], widen(x[expected[i]])));
  }
}

template <class T>
using TopK = KernelInputs<T>;
TYPED_TEST_SUITE(TopK, ElementTypes);

TYPED_TEST(TopK, ChoosesExactlyK) {
  using V = accumulate_t<TypeParam>;
  TopKScratch<V> scratch;
  auto const all_executors = executors();
  this->for_each_input({0, 1, 15, 16, 17, 1000, 5000, 70'000}, [&](std::size_t size, auto& g, auto&,
                                                                   auto& random) {
    Problem<TypeParam> problem(size, random() % 16, g, g, random);
    std::span<const TypeParam> const x = problem.gradient();
    for (std::size_t const k : {std::size_t{0}, std::size_t{1}, size / 1000, size / 100, size / 3,
                                size - size / 8, size - 1, size, size + 1}) {
      if (k > size + 1 || (size > 5000 && random() % 4 != 0)) continue;
      auto const expected = expected_top_k(x, k);
      for (auto const& table : kernel_tables<TypeParam>()) {
        auto const& executor = *all_executors[random() % all_executors.size()];
        SCOPED_TRACE(concat(table.target, ", k ", k, ", ", executor.threads(), " threads"));
        Packed<V> packed(std::min(k, size));
        packed.stats.count = exact_top_k<TypeParam>(x, k, packed.span(), scratch, executor, table);
        packed.trim();
        expect_entries(x, packed, expected);
        if (testing::Test::HasFailure()) return;
      }
    }
  });
  Packed<V> small(9);
  std::vector<TypeParam> x(100);
  EXPECT_THROW(exact_top_k<TypeParam>(x, 10, small.span(), scratch), InvalidArgument);
}

TYPED_TEST(TopK, ChoosesExactlyKOfMany) {
  using V = accumulate_t<TypeParam>;
  TopKScratch<V> scratch;
  std::mt19937_64 random(5);
  for (auto const& fill : fills<V>()) {
    Problem<TypeParam> problem((std::size_t{1} << 20) + 3, 1, fill, fill, random);
    std::span<const TypeParam> const x = problem.gradient();
    std::size_t const k = x.size() / 100;
    auto const expected = expected_top_k(x, k);
    for (auto const& table : kernel_tables<TypeParam>()) {
      SCOPED_TRACE(concat(fill.name, ", ", table.target));
      Packed<V> packed(k);
      packed.stats.count =
          exact_top_k<TypeParam>(x, k, packed.span(), scratch, ThreadExecutor(2), table);
      packed.trim();
      expect_entries(x, packed, expected);
    }
  }
}

TYPED_TEST(TopK, OfEachBucket) {
  using V = accumulate_t<TypeParam>;
  auto const all_executors = executors();
  for (std::size_t const row : {1, 17, 512, 1000, 70'001}) {
    this->for_each_input({3 * row}, [&](std::size_t size, auto& g, auto&, auto& random) {
      Problem<TypeParam> problem(size, random() % 16, g, g, random);
      std::span<const TypeParam> const x = problem.gradient();
      for (std::size_t const bucket : {1, 16, 17, 512, 4096}) {
        for (std::size_t const k : {std::size_t{0}, std::size_t{1}, std::size_t{5}, bucket / 2,
                                    bucket - 1, bucket, bucket + 1}) {
          if (row > 1000 && random() % 8 != 0) continue;
          std::vector<std::uint32_t> indices;
          std::vector<V> values;
          for (std::size_t begin = 0; begin < size; begin += row) {
            for (std::size_t at = 0; at < row; at += bucket) {
              auto const entries = x.subspan(begin + at, std::min(bucket, row - at));
              for (std::uint32_t const place : expected_top_k(entries, k)) {
                indices.push_back(static_cast<std::uint32_t>(at) + place);
                values.push_back(widen(entries[place]));
              }
            }
          }
          ASSERT_EQ(indices.size(), 3 * bucket_top_k_count(row, bucket, k));
          for (auto const& table : kernel_tables<TypeParam>()) {
            auto const& executor = *all_executors[random() % all_executors.size()];
            SCOPED_TRACE(concat(table.target, ", bucket ", bucket, ", k ", k));
            std::vector<std::uint32_t> actual_indices(indices.size());
            std::vector<V> actual_values(indices.size());
            top_k_per_bucket<TypeParam>(x, row, bucket, k, {actual_indices, actual_values},
                                        executor, table);
            ASSERT_EQ(actual_indices, indices);
            ASSERT_TRUE(same_entries(actual_values, values));
          }
        }
      }
    });
    if (testing::Test::HasFailure()) return;
  }
}

TYPED_TEST(TopK, OfEachRow) {
  using V = accumulate_t<TypeParam>;
  TopKScratch<V> scratch;
  for (std::size_t const row : {1, 100, 4096, 4097, 20'000}) {
    this->for_each_input({4 * row}, [&](std::size_t size, auto& g, auto&, auto& random) {
      Problem<TypeParam> problem(size, random() % 16, g, g, random);
      std::span<const TypeParam> const x = problem.gradient();
      for (std::size_t const k : {std::size_t{1}, row / 100, row}) {
        std::size_t const each = std::min(k, row);
        Packed<V> packed(4 * each);
        top_k_of_rows<TypeParam>(x, row, k, packed.span(), scratch, ThreadExecutor(2));
        for (std::size_t i = 0; i < 4; ++i) {
          auto const expected = expected_top_k(x.subspan(i * row, row), k);
          for (std::size_t j = 0; j < each; ++j) {
            ASSERT_EQ(packed.indices[i * each + j], expected[j]) << "row " << i << ", k " << k;
            ASSERT_TRUE(same(packed.values[i * each + j], widen(x[i * row + expected[j]])));
          }
        }
      }
    });
  }
}

TYPED_TEST(TopK, RefusesWhatDoesNotFit) {
  using V = accumulate_t<TypeParam>;
  std::vector<TypeParam> x(100);
  std::vector<std::uint32_t> indices(20);
  std::vector<V> values(20);
  auto const top = [&](std::size_t row, std::size_t bucket, std::size_t k) {
    top_k_per_bucket<TypeParam>(x, row, bucket, k, {indices, values});
  };
  EXPECT_NO_THROW(top(100, 10, 2));
  EXPECT_NO_THROW(top(50, 10, 2));
  EXPECT_THROW(top(100, 10, 3), InvalidArgument);
  EXPECT_THROW(top(100, 0, 2), InvalidArgument);
  EXPECT_THROW(top(100, max_bucket + 1, 20), InvalidArgument);
  EXPECT_THROW(top(30, 10, 2), InvalidArgument);
  EXPECT_THROW(top(0, 10, 2), InvalidArgument);
  for (auto const& table : kernel_tables<TypeParam>()) {
    EXPECT_THROW(table.top_k_of_buckets(x, 10, 3, 0, {indices, values}), InvalidArgument);
    EXPECT_THROW(table.top_k_of_buckets(x, 10, 2, 0xffffffffu - 98, {indices, values}),
                 InvalidArgument);
  }
}

}  // namespace
}  // namespace sparsecomm
