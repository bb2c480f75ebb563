// What the scalar and the SIMD kernels over blocks share: the block at a time rule.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "base/executor.h"
#include "kernels/block_scan.h"

namespace sparsecomm {

inline void require_block_size(std::size_t block_bytes) {
  require(block_bytes > 0 && block_bytes % 4 == 0, "blocks of ", block_bytes,
          " bytes: the size must be a positive multiple of 4");
}

inline void require_blocks(std::size_t bytes, std::size_t block_bytes, std::size_t bitmap_words) {
  require_block_size(block_bytes);
  std::size_t const blocks = part_count(bytes, block_bytes);
  require(bitmap_words >= part_count(blocks, 64), "a bitmap of ", blocks, " blocks needs ",
          part_count(blocks, 64), " words, not ", bitmap_words);
}

inline void require_walk(std::size_t bytes, std::size_t block_bytes, std::uint64_t first,
                         std::size_t slot_bytes, std::size_t numbers) {
  require_block_size(block_bytes);
  std::size_t const blocks = part_count(bytes, block_bytes);
  require(first <= blocks, "a walk over ", blocks, " blocks cannot begin at ", first);
  require(blocks <= std::uint64_t{1} << 32, blocks,
          " blocks do not all have 32-bit numbers; use blocks of more than ", block_bytes,
          " bytes");
  require(slot_bytes % block_bytes == 0 && slot_bytes / block_bytes == numbers, "slots of ",
          slot_bytes, " bytes and room for ", numbers, " numbers of blocks of ", block_bytes,
          " bytes, must both be of the same number of blocks");
}

inline std::span<const std::byte> block_of(std::span<const std::byte> bytes,
                                           std::size_t block_bytes, std::uint64_t number) {
  std::size_t const begin = number * block_bytes;
  return bytes.subspan(begin, std::min(block_bytes, bytes.size() - begin));
}

inline bool holds_bits_range(std::span<const std::byte> block) {
  return std::ranges::any_of(block, [](std::byte b) { return b != std::byte{0}; });
}

// Goes on where `walk` has come to.
inline BlockWalk copy_nonzero_range(std::span<const std::byte> bytes, std::size_t block_bytes,
                                    BlockWalk walk, std::span<std::byte> slots,
                                    std::span<std::uint32_t> numbers) {
  std::size_t const blocks = part_count(bytes.size(), block_bytes);
  for (; walk.next < blocks && walk.found < numbers.size(); ++walk.next) {
    auto const block = block_of(bytes, block_bytes, walk.next);
    if (!holds_bits_range(block)) continue;
    auto const slot = slots.subspan(walk.found * block_bytes, block_bytes);
    std::ranges::copy(block, slot.begin());
    std::ranges::fill(slot.subspan(block.size()), std::byte{0});
    numbers[walk.found++] = static_cast<std::uint32_t>(walk.next);
  }
  return walk;
}

// The blocks from `begin` on, a multiple of 64.
inline std::size_t nonzero_block_range(std::span<const std::byte> bytes, std::size_t block_bytes,
                                       std::size_t begin, std::span<std::uint64_t> bitmap) {
  std::size_t const blocks = part_count(bytes.size(), block_bytes);
  std::size_t found = 0;
  for (std::size_t block = begin; block < blocks; ++block) {
    if (block % 64 == 0) bitmap[block / 64] = 0;
    bool const holds = holds_bits_range(block_of(bytes, block_bytes, block));
    bitmap[block / 64] |= std::uint64_t{holds} << (block % 64);
    found += holds;
  }
  return found;
}

}  // namespace sparsecomm
