#include "kernels/block_scan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "kernels/kernels.h"
#include "thread_executor.h"

namespace sparsecomm {
namespace {

constexpr std::size_t block_sizes[] = {4,   8,   12,  16,   20,   28,   32,   40,   44,
                                       60,  64,  68,  100,  124,  128,  132,  256,  260,
                                       508, 512, 516, 1024, 1028, 2044, 4096, 16384};

struct Scanned {
  std::vector<std::uint64_t> bitmap;
  std::vector<std::uint32_t> numbers;
  std::vector<std::byte> blocks;

  bool operator==(Scanned const&) const = default;
};

Scanned scan(std::span<const std::byte> bytes, std::size_t block_bytes, Executor const& executor,
             BlockKernelTable const& table) {
  std::size_t const blocks = (bytes.size() + block_bytes - 1) / block_bytes;
  // What is not written shows.
  Scanned out{std::vector<std::uint64_t>((blocks + 63) / 64, 0x5555),
              std::vector<std::uint32_t>(blocks, 77), std::vector<std::byte>(bytes.size())};
  std::size_t const found =
      block_scan(bytes, block_bytes, {out.bitmap, out.numbers, out.blocks}, executor, table);
  out.numbers.resize(found);
  std::size_t size = 0;
  for (std::uint32_t const number : out.numbers) {
    size += std::min(block_bytes, bytes.size() - number * block_bytes);
  }
  out.blocks.resize(size);
  return out;
}

// By the words of the contract.
Scanned expected(std::span<const std::byte> bytes, std::size_t block_bytes) {
  std::size_t const blocks = (bytes.size() + block_bytes - 1) / block_bytes;
  Scanned out;
  out.bitmap.resize((blocks + 63) / 64);
  for (std::size_t i = 0; i < blocks; ++i) {
    auto const block =
        bytes.subspan(i * block_bytes, std::min(block_bytes, bytes.size() - i * block_bytes));
    if (std::ranges::count(block, std::byte{0}) == std::ssize(block)) continue;
    out.bitmap[i / 64] |= std::uint64_t{1} << (i % 64);
    out.numbers.push_back(static_cast<std::uint32_t>(i));
    out.blocks.insert(out.blocks.end(), block.begin(), block.end());
  }
  return out;
}

// Each table, and each executor with one of them.
void check(std::span<const std::byte> bytes, std::size_t block_bytes, std::mt19937_64& random) {
  auto const wanted = expected(bytes, block_bytes);
  auto const tables = block_kernel_tables();
  auto const check_one = [&](BlockKernelTable const& table, Executor const& executor) {
    EXPECT_TRUE(scan(bytes, block_bytes, executor, table) == wanted)
        << table.target << ", " << bytes.size() << " bytes in blocks of " << block_bytes << ", "
        << executor.threads() << " threads";
  };
  for (auto const& table : tables) check_one(table, inline_executor());
  if (bytes.size() < 100'000) return;  // one part
  for (auto const& executor : executors()) check_one(tables[random() % tables.size()], *executor);
}

TEST(BlockScan, TheTablesAreThoseOfTheOtherKernels) {
  auto const tables = block_kernel_tables();
  auto const others = kernel_tables<float>();
  ASSERT_EQ(tables.size(), others.size());
  for (std::size_t i = 0; i < tables.size(); ++i) EXPECT_EQ(tables[i].target, others[i].target);
  EXPECT_EQ(block_kernels().target, kernels<float>().target);
}

TEST(BlockScan, EqualsWhatIsSpecified) {
  std::uint64_t const seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (std::size_t const block_bytes : block_sizes) {
    for (std::size_t const size : {std::size_t{0}, std::size_t{1}, block_bytes - 1, block_bytes,
                                   63 * block_bytes + 3, 64 * block_bytes, 129 * block_bytes + 1,
                                   std::max<std::size_t>(200'000, 200 * block_bytes) + 2}) {
      // Steps of density, from nothing to everything.
      for (std::size_t const holding : {0, 1, 64, 4096}) {
        std::vector<std::byte> storage(size + 64);
        std::size_t const offset = random() % 64;
        auto const bytes = std::span(storage).subspan(offset, size);
        std::ranges::fill(storage, std::byte{0xff});
        std::ranges::fill(bytes, std::byte{0});
        std::size_t const blocks = size / block_bytes + 1;
        for (std::size_t i = 0; size > 0 && i < blocks * holding / 64; ++i) {
          bytes[random() % size] = static_cast<std::byte>(1u << random() % 8);
        }
        check(bytes, block_bytes, random);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(BlockScan, EachBitCounts) {
  for (std::size_t const block_bytes : {4, 12, 16, 64, 100, 512}) {
    std::vector<std::byte> bytes(128 * block_bytes + block_bytes / 2);
    for (auto const& table : block_kernel_tables()) {
      std::vector<std::uint64_t> bitmap(3);
      for (std::size_t at = 0; at < bytes.size(); ++at) {
        bytes[at] = static_cast<std::byte>(1u << at % 8);
        ASSERT_EQ(table.nonzero_blocks(bytes, block_bytes, bitmap), 1u);
        std::size_t const block = at / block_bytes;
        ASSERT_EQ(bitmap[block / 64], std::uint64_t{1} << (block % 64));
        bytes[at] = std::byte{0};
      }
      EXPECT_EQ(table.nonzero_blocks(bytes, block_bytes, bitmap), 0u);
    }
  }
}

TEST(BlockScan, KeepsWhatComparesEqualToZeroOrToNothing) {
  std::vector<float> values(256, 0.0f);
  values[17] = -0.0f;
  values[100] = std::numeric_limits<float>::quiet_NaN();
  values[255] = std::numeric_limits<float>::denorm_min();
  auto const bytes = std::as_bytes(std::span(values));
  for (auto const& table : block_kernel_tables()) {
    auto const out = scan(bytes, 64, inline_executor(), table);
    EXPECT_EQ(out.numbers, (std::vector<std::uint32_t>{1, 6, 15}));
    EXPECT_EQ(std::memcmp(out.blocks.data() + 64, &values[96], 64), 0);
  }
}

TEST(BlockScan, RefusesWhatDoesNotFit) {
  std::vector<std::byte> bytes(1000);
  std::vector<std::uint64_t> bitmap(1);
  std::vector<std::uint32_t> numbers(9);
  std::vector<std::byte> blocks(999);
  EXPECT_THROW(block_scan(bytes, 0, {bitmap}), InvalidArgument);
  EXPECT_THROW(block_scan(bytes, 6, {bitmap}), InvalidArgument);
  EXPECT_THROW(block_scan(bytes, 12, {bitmap}), InvalidArgument);
  EXPECT_THROW(block_scan(bytes, 100, {bitmap, numbers}), InvalidArgument);
  EXPECT_THROW(block_scan(bytes, 100, {bitmap, {}, blocks}), InvalidArgument);
  EXPECT_EQ(block_scan(bytes, 100, {bitmap}), 0u);
  for (auto const& table : block_kernel_tables()) {
    EXPECT_THROW(table.nonzero_blocks(bytes, 12, bitmap), InvalidArgument);
  }
}

}  // namespace
}  // namespace sparsecomm
