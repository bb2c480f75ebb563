#include "kernels/block_top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "kernel_problems.h"
#include "thread_executor.h"

namespace sparsecomm {
namespace {

// By the words of block_top_k.h, for squares whose sums are exact.
template <class T>
std::vector<std::uint32_t> expected_blocks(std::span<const T> x, std::size_t block, std::size_t k) {
  std::size_t const blocks = (x.size() + block - 1) / block;
  std::vector<double> squares(blocks);
  for (std::size_t i = 0; i < x.size(); ++i) {
    auto const value = static_cast<double>(widen(x[i]));
    squares[i / block] += value * value;
  }
  for (double& sum : squares) {
    if (!std::isfinite(sum)) sum = std::numeric_limits<double>::infinity();
  }
  std::vector<std::uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::stable_sort(order, [&](auto a, auto b) { return squares[a] > squares[b]; });
  order.resize(std::min(k, blocks));
  std::ranges::sort(order);
  return order;
}

template <class T>
class BlockTopK : public ::testing::Test {};
TYPED_TEST_SUITE(BlockTopK, ElementTypes);

TYPED_TEST(BlockTopK, ChoosesTheLargestNorms) {
  auto const all_executors = executors();
  BlockTopKScratch scratch;
  std::mt19937_64 random(7);
  for (std::size_t const size : {0, 1, 16, 17, 1000, 70'001}) {
    for (std::size_t const block : {1, 16, 100, 256, 4096}) {
      // Small whole numbers, so that sums tie, and are exact in any order.
      std::vector<TypeParam> x(size);
      for (TypeParam& entry : x) {
        entry = static_cast<TypeParam>(static_cast<float>(random() % 9) - 4.0f);
      }
      if (size > 100 && block == 100) {
        using V = accumulate_t<TypeParam>;
        x[size / 3] = static_cast<TypeParam>(std::numeric_limits<V>::quiet_NaN());
        x[size - 1] = static_cast<TypeParam>(-std::numeric_limits<V>::infinity());
      }
      std::size_t const blocks = part_count(size, block);
      for (std::size_t const k :
           {std::size_t{0}, std::size_t{1}, blocks / 50, blocks / 2, blocks, blocks + 1}) {
        auto const expected = expected_blocks<TypeParam>(x, block, k);
        for (auto const& table : kernel_tables<TypeParam>()) {
          auto const& executor = *all_executors[random() % all_executors.size()];
          SCOPED_TRACE(concat(table.target, ", ", size, " entries, block ", block, ", k ", k));
          auto const numbers = block_top_k<TypeParam>(x, block, k, scratch, executor, table);
          ASSERT_TRUE(std::ranges::equal(numbers, expected));
        }
      }
    }
  }
}

// The order is that of the norms also where squares leave the range of the entries' type.
TEST(BlockTopKTest, SquaresNeitherOverflowNorVanish) {
  std::vector<float> x(48);
  x[0] = 1e30f;
  x[16] = 2e30f;
  x[32] = 1e-30f;
  BlockTopKScratch scratch;
  EXPECT_TRUE(std::ranges::equal(block_top_k<float>(x, 16, 1, scratch), std::vector{1u}));
  x[0] = x[16] = 0;
  EXPECT_TRUE(std::ranges::equal(block_top_k<float>(x, 16, 1, scratch), std::vector{2u}));
}

TEST(BlockTopKTest, NoBlockIsEmpty) {
  BlockTopKScratch scratch;
  EXPECT_THROW(block_top_k<float>(std::vector<float>(3), 0, 1, scratch), InvalidArgument);
}

}  // namespace
}  // namespace sparsecomm
