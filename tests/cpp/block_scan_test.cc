#include "kernels/block_scan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
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

constexpr std::byte unwritten{0xa5};

// A walk of some slots from block `first` on, by the words of the contract.
struct Walk {
  BlockWalk end;
  std::vector<std::uint32_t> numbers;
  std::vector<std::byte> slots;  // all, with what is not written
};

Walk expected_walk(std::span<const std::byte> bytes, std::size_t block_bytes, std::uint64_t first,
                   std::size_t slots) {
  std::size_t const blocks = (bytes.size() + block_bytes - 1) / block_bytes;
  Walk walk{{.next = first}, {}, std::vector(slots * block_bytes, unwritten)};
  while (walk.end.next < blocks && walk.end.found < slots) {
    std::size_t const begin = walk.end.next * block_bytes;
    std::vector<std::byte> block(block_bytes);  // with zeros behind the last
    std::copy_n(bytes.begin() + begin, std::min(block_bytes, bytes.size() - begin), block.begin());
    if (std::ranges::count(block, std::byte{0}) != std::ssize(block)) {
      walk.numbers.push_back(static_cast<std::uint32_t>(walk.end.next));
      std::ranges::copy(block, walk.slots.begin() + walk.end.found * block_bytes);
      ++walk.end.found;
    }
    ++walk.end.next;
  }
  return walk;
}

// Walks over all bytes, some slots at a time, and compares each part.
void check_walks(BlockKernelTable const& table, std::span<const std::byte> bytes,
                 std::size_t block_bytes, std::size_t most_slots, std::mt19937_64& random) {
  std::size_t const blocks = (bytes.size() + block_bytes - 1) / block_bytes;
  constexpr std::size_t guard = 64;
  std::vector<std::byte> storage;
  std::vector<std::uint32_t> numbers;
  for (std::uint64_t next = 0; next < blocks;) {
    std::size_t const slots = 1 + random() % most_slots;
    std::size_t const offset = random() % guard;
    storage.assign(slots * block_bytes + 2 * guard, unwritten);
    numbers.assign(slots, 77);
    auto const room = std::span(storage).subspan(offset, slots * block_bytes);
    BlockWalk const walk = table.copy_nonzero_blocks(bytes, block_bytes, next, room, numbers);
    Walk const wanted = expected_walk(bytes, block_bytes, next, slots);
    SCOPED_TRACE(concat(table.target, ", ", bytes.size(), " bytes in blocks of ", block_bytes,
                        ", from ", next, ", ", slots, " slots"));
    ASSERT_EQ(walk.next, wanted.end.next);
    ASSERT_EQ(walk.found, wanted.end.found);
    ASSERT_TRUE(std::ranges::equal(std::span(numbers).first(walk.found), wanted.numbers));
    ASSERT_EQ(std::ranges::count(std::span(numbers).subspan(walk.found), 77u),
              std::ssize(numbers) - std::ssize(wanted.numbers));
    ASSERT_TRUE(std::ranges::equal(room, wanted.slots));
    std::ranges::fill(room, unwritten);
    ASSERT_EQ(std::ranges::count(storage, unwritten), std::ssize(storage));
    next = walk.next;
  }
}

TEST(BlockWalkTest, EqualsWhatIsSpecified) {
  std::uint64_t const seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (std::size_t const block_bytes : block_sizes) {
    for (std::size_t const size :
         {std::size_t{1}, block_bytes - 1, block_bytes, block_bytes + 1, 2 * block_bytes - 1,
          16 * block_bytes, 17 * block_bytes + 3, 65 * block_bytes + block_bytes / 2}) {
      for (std::size_t const percent : {0, 10, 50, 100}) {
        std::vector<std::byte> storage(size + 128, std::byte{0xff});
        auto const bytes = std::span(storage).subspan(random() % 64, size);
        std::ranges::fill(bytes, std::byte{0});
        for (std::size_t begin = 0; begin < size; begin += block_bytes) {
          if (random() % 100 >= percent) continue;
          auto const block = bytes.subspan(begin, std::min(block_bytes, size - begin));
          // One bit, or all bytes.
          if (random() % 2 == 0) {
            block[random() % block.size()] = static_cast<std::byte>(1u << random() % 8);
          } else {
            for (std::byte& b : block) b = static_cast<std::byte>(random());
          }
        }
        for (auto const& table : block_kernel_tables()) {
          for (std::size_t const most_slots : {1, 3, 16, 100}) {
            check_walks(table, bytes, block_bytes, most_slots, random);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(BlockWalkTest, EachBitCounts) {
  std::mt19937_64 random(1);
  for (std::size_t const block_bytes : {4, 16, 64, 100, 512, 1024}) {
    std::vector<std::byte> bytes(2 * block_bytes + block_bytes / 2);
    for (auto const& table : block_kernel_tables()) {
      for (std::size_t at = 0; at < bytes.size(); ++at) {
        bytes[at] = static_cast<std::byte>(1u << at % 8);
        check_walks(table, bytes, block_bytes, 2, random);
        if (HasFailure()) return;
        bytes[at] = std::byte{0};
      }
    }
  }
}

TEST(BlockWalkTest, TakesNothingWithoutSlotsOrBlocks) {
  std::vector<std::byte> const bytes(100, std::byte{1});
  std::vector<std::byte> slots(64);
  std::vector<std::uint32_t> numbers(1);
  for (auto const& table : block_kernel_tables()) {
    auto const expect_nothing = [&](BlockWalk walk, std::uint64_t next) {
      EXPECT_EQ(walk.next, next) << table.target;
      EXPECT_EQ(walk.found, 0u) << table.target;
    };
    expect_nothing(table.copy_nonzero_blocks(bytes, 64, 1, {}, {}), 1);
    expect_nothing(table.copy_nonzero_blocks(bytes, 64, 2, slots, numbers), 2);
    expect_nothing(table.copy_nonzero_blocks({}, 64, 0, slots, numbers), 0);
  }
}

TEST(BlockWalkTest, KeepsWhatComparesEqualToZeroOrToNothing) {
  std::vector<float> values(256, 0.0f);
  values[17] = -0.0f;
  values[100] = std::numeric_limits<float>::quiet_NaN();
  values[255] = std::numeric_limits<float>::denorm_min();
  std::vector<std::byte> slots(4 * 64);
  std::vector<std::uint32_t> numbers(4);
  for (auto const& table : block_kernel_tables()) {
    auto const walk =
        table.copy_nonzero_blocks(std::as_bytes(std::span(values)), 64, 0, slots, numbers);
    ASSERT_EQ(walk.found, 3u);
    numbers.resize(3);
    EXPECT_EQ(numbers, (std::vector<std::uint32_t>{1, 6, 15}));
    numbers.resize(4);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(
          std::ranges::equal(std::span(slots).subspan(64 * i, 64),
                             std::as_bytes(std::span(values)).subspan(64 * numbers[i], 64)));
    }
  }
}

TEST(BlockWalkTest, RefusesWhatDoesNotFit) {
  std::vector<std::byte> const bytes(100);
  std::vector<std::byte> slots(128);
  std::vector<std::uint32_t> numbers(2);
  for (auto const& table : block_kernel_tables()) {
    auto const walk = table.copy_nonzero_blocks;
    EXPECT_THROW(walk(bytes, 0, 0, slots, numbers), InvalidArgument);
    EXPECT_THROW(walk(bytes, 6, 0, slots, numbers), InvalidArgument);
    EXPECT_THROW(walk(bytes, 64, 3, slots, numbers), InvalidArgument);
    EXPECT_THROW(walk(bytes, 32, 0, slots, numbers), InvalidArgument);
    EXPECT_THROW(walk(bytes, 64, 0, std::span(slots).first(127), numbers), InvalidArgument);
    EXPECT_NO_THROW(walk(bytes, 64, 2, slots, numbers));
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
    EXPECT_TRUE(std::ranges::equal(std::span(out.blocks).subspan(64, 64), bytes.subspan(384, 64)));
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

TEST(BlockCopies, GoOutAndBack) {
  std::mt19937_64 random(6);
  for (std::size_t const block : {1, 7, 64, 1000}) {
    for (std::size_t const size : {0, 1, 999, 300'000}) {
      std::vector<std::byte> bytes(size);
      for (std::byte& byte : bytes) byte = std::byte(random());
      std::size_t const blocks = part_count(size, block);
      std::vector<std::uint32_t> numbers;
      for (std::size_t b = blocks; b-- > 0;) {
        if (random() % 2 == 0) numbers.push_back(static_cast<std::uint32_t>(b));
      }
      std::vector<std::byte> copies(numbers.size() * block), expected;
      for (std::size_t const number : numbers) {
        for (std::size_t i = number * block; i < (number + 1) * block; ++i) {
          expected.push_back(i < size ? bytes[i] : std::byte{0});
        }
      }
      for (auto const& executor : executors()) {
        SCOPED_TRACE(concat(block, " bytes of ", size, ", ", executor->threads(), " threads"));
        std::ranges::fill(copies, std::byte{0x77});
        block_gather(bytes, block, numbers, copies, *executor);
        ASSERT_EQ(copies, expected);
        std::vector<std::byte> target(size);
        block_scatter(target, block, numbers, copies, *executor);
        for (std::size_t i = 0; i < size; ++i) {
          bool const copied = std::ranges::find(numbers, i / block) != numbers.end();
          ASSERT_EQ(target[i], copied ? bytes[i] : std::byte{0});
          if (size > 1000) i += 997;
        }
      }
    }
  }
}

TEST(BlockCopies, RefuseWhatDoesNotFit) {
  std::vector<std::byte> bytes(10), slots(8);
  std::vector<std::uint32_t> const fitting{2, 0}, outside{3, 0};
  EXPECT_THROW(block_gather(bytes, 4, outside, slots), InvalidArgument);
  EXPECT_THROW(block_scatter(bytes, 4, outside, slots), InvalidArgument);
  EXPECT_THROW(block_gather(bytes, 4, fitting, bytes), InvalidArgument);
  EXPECT_THROW(block_scatter(bytes, 4, fitting, bytes), InvalidArgument);
  EXPECT_THROW(block_gather(bytes, 0, {}, {}), InvalidArgument);
  block_gather(bytes, 4, fitting, slots);
}

}  // namespace
}  // namespace sparsecomm
