#include "kernels/block_scan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "kernels/blocks.h"

namespace sparsecomm {
namespace {

// Of the input: is still in the second cache when its blocks are copied.
constexpr std::size_t part_bytes = std::size_t{1} << 17;

// Calls f(first, count) for each run of bits that are set.
template <class F>
void for_each_run(std::span<const std::uint64_t> bitmap, F&& f) {
  std::size_t begin = 0, count = 0;
  for (std::size_t i = 0; i < bitmap.size(); ++i) {
    std::uint64_t word = bitmap[i];
    while (word != 0) {
      int const at = std::countr_zero(word);
      int const length = std::countr_one(word >> at);
      std::size_t const first = i * 64 + static_cast<std::size_t>(at);
      if (first != begin + count) {
        if (count > 0) f(begin, count);
        begin = first;
        count = 0;
      }
      count += static_cast<std::size_t>(length);
      if (at + length == 64) break;
      word &= ~std::uint64_t{0} << (at + length);
    }
  }
  if (count > 0) f(begin, count);
}

void require_slots(std::size_t bytes, std::size_t block_bytes,
                   std::span<const std::uint32_t> numbers, std::size_t slots) {
  require(block_bytes > 0, "blocks of 0 bytes: use 1 or more");
  require(slots == numbers.size() * block_bytes, numbers.size(), " blocks of ", block_bytes,
          " bytes are ", numbers.size() * block_bytes, " bytes, not ", slots);
  std::size_t const blocks = part_count(bytes, block_bytes);
  for (std::uint32_t const number : numbers) {
    require(number < blocks, "block ", number, " is not in [0, ", blocks, ")");
  }
}

// Calls f(i) for i < count, in parts of about part_bytes.
template <class F>
void for_each_block(std::size_t count, std::size_t block_bytes, Executor const& executor, F&& f) {
  std::size_t const of_part = part_count(part_bytes, block_bytes);
  for_each_part(executor, part_count(count, of_part), [&](std::size_t part, std::size_t) {
    std::size_t const end = std::min(count, (part + 1) * of_part);
    for (std::size_t i = part * of_part; i < end; ++i) f(i);
  });
}

}  // namespace

std::size_t block_scan(std::span<const std::byte> bytes, std::size_t block_bytes,
                       BlockOutput const& out, Executor const& executor,
                       BlockKernelTable const& kernel) {
  require_blocks(bytes.size(), block_bytes, out.bitmap.size());
  std::size_t const blocks = part_count(bytes.size(), block_bytes);
  require(out.numbers.empty() || out.numbers.size() >= blocks, "the numbers of ", blocks,
          " blocks do not fit into ", out.numbers.size());
  require(out.numbers.empty() || blocks <= std::uint64_t{1} << 32, blocks,
          " blocks do not all have 32-bit numbers; use blocks of more than ", block_bytes,
          " bytes");
  require(out.blocks.empty() || out.blocks.size() >= bytes.size(), "blocks of ", bytes.size(),
          " bytes do not fit into ", out.blocks.size());

  // Parts share no word of the bitmap.
  std::size_t const part_blocks = part_count(part_bytes / block_bytes + 1, 64) * 64;
  std::size_t const parts = part_count(blocks, part_blocks);
  auto const words_of = [&](std::size_t part) {
    std::size_t const begin = part * part_blocks / 64;
    return out.bitmap.subspan(begin, std::min(part_blocks / 64, part_count(blocks, 64) - begin));
  };
  struct Share {
    std::size_t place, count;
  };
  std::vector<Share> shares(std::min(executor.threads(), parts));
  std::size_t total = 0;
  for_each_part_in_order(
      executor, parts,
      [&](std::size_t part, std::size_t worker) {
        std::size_t const begin = part * part_blocks * block_bytes;
        std::size_t const size = std::min(part_blocks * block_bytes, bytes.size() - begin);
        shares[worker].count =
            kernel.nonzero_blocks(bytes.subspan(begin, size), block_bytes, words_of(part));
      },
      [&](std::size_t, std::size_t worker) {
        shares[worker].place = total;
        total += shares[worker].count;
      },
      [&](std::size_t part, std::size_t worker) {
        if (shares[worker].count == 0) return;
        std::size_t place = shares[worker].place;
        for_each_run(words_of(part), [&](std::size_t first, std::size_t count) {
          std::size_t const block = part * part_blocks + first;
          if (!out.numbers.empty()) {
            for (std::size_t i = 0; i < count; ++i) {
              out.numbers[place + i] = static_cast<std::uint32_t>(block + i);
            }
          }
          if (!out.blocks.empty()) {
            std::size_t const begin = block * block_bytes;
            std::memcpy(out.blocks.data() + place * block_bytes, bytes.data() + begin,
                        std::min(count * block_bytes, bytes.size() - begin));
          }
          place += count;
        });
      });
  return total;
}

void block_gather(std::span<const std::byte> bytes, std::size_t block_bytes,
                  std::span<const std::uint32_t> numbers, std::span<std::byte> out,
                  Executor const& executor) {
  require_slots(bytes.size(), block_bytes, numbers, out.size());
  for_each_block(numbers.size(), block_bytes, executor, [&](std::size_t i) {
    auto const block = block_of(bytes, block_bytes, numbers[i]);
    auto const to = out.subspan(i * block_bytes, block_bytes);
    std::ranges::copy(block, to.begin());
    std::ranges::fill(to.subspan(block.size()), std::byte{0});
  });
}

void block_scatter(std::span<std::byte> bytes, std::size_t block_bytes,
                   std::span<const std::uint32_t> numbers, std::span<const std::byte> blocks,
                   Executor const& executor) {
  require_slots(bytes.size(), block_bytes, numbers, blocks.size());
  for_each_block(numbers.size(), block_bytes, executor, [&](std::size_t i) {
    std::size_t const begin = numbers[i] * block_bytes;
    std::size_t const length = std::min(block_bytes, bytes.size() - begin);
    std::ranges::copy(blocks.subspan(i * block_bytes, length),
                      bytes.begin() + static_cast<std::ptrdiff_t>(begin));
  });
}

}  // namespace sparsecomm
