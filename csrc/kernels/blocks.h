// What the scalar and the SIMD kernels over blocks share: the block at a time rule.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "base/executor.h"

namespace sparsecomm {

inline void require_blocks(std::size_t bytes, std::size_t block_bytes, std::size_t bitmap_words) {
  require(block_bytes > 0 && block_bytes % 4 == 0, "blocks of ", block_bytes,
          " bytes: the size must be a positive multiple of 4");
  std::size_t const blocks = part_count(bytes, block_bytes);
  require(bitmap_words >= part_count(blocks, 64), "a bitmap of ", blocks, " blocks needs ",
          part_count(blocks, 64), " words, not ", bitmap_words);
}

// The blocks from `begin` on, a multiple of 64.
inline std::size_t nonzero_block_range(std::span<const std::byte> bytes, std::size_t block_bytes,
                                       std::size_t begin, std::span<std::uint64_t> bitmap) {
  std::size_t const blocks = part_count(bytes.size(), block_bytes);
  std::size_t found = 0;
  for (std::size_t block = begin; block < blocks; ++block) {
    if (block % 64 == 0) bitmap[block / 64] = 0;
    auto const in_block = bytes.subspan(block * block_bytes,
                                        std::min(block_bytes, bytes.size() - block * block_bytes));
    bool const holds = std::ranges::any_of(in_block, [](std::byte b) { return b != std::byte{0}; });
    bitmap[block / 64] |= std::uint64_t{holds} << (block % 64);
    found += holds;
  }
  return found;
}

}  // namespace sparsecomm
