// Which blocks of some bytes hold anything, what OmniReduce sends of a gradient; and copies of
// blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/executor.h"

namespace sparsecomm {

// Where a walk over blocks has come to.
struct BlockWalk {
  std::uint64_t next = 0;  // the block at which it goes on; past the last: at the end
  std::size_t found = 0;   // blocks that are not zero
};

// One instruction set's kernels over blocks.
struct BlockKernelTable {
  std::string_view target;

  // Sets bit i % 64 of bitmap[i / 64] where block i has a bit that is set, so that a NaN and -0.0
  // count, and clears it where it has none; returns how many have. The last block may be shorter.
  // `block_bytes` is a multiple of 4, and the bitmap has a word for every 64 blocks. Reads no byte
  // twice.
  std::size_t (*nonzero_blocks)(std::span<const std::byte> bytes, std::size_t block_bytes,
                                std::span<std::uint64_t> bitmap);

  // Walks from block `first` on until there is a block that is not zero, as above, in every slot or
  // the bytes end: copies such a block to the next slot, with zeros behind the last one if that is
  // shorter, and its number to `numbers`. A slot is block_bytes of `slots`, and there are as many
  // as there is room for numbers. What lies behind the blocks that were found stays as it is. A
  // block is tested until a bit is found and copied at once, so each byte is read from memory once.
  BlockWalk (*copy_nonzero_blocks)(std::span<const std::byte> bytes, std::size_t block_bytes,
                                   std::uint64_t first, std::span<std::byte> slots,
                                   std::span<std::uint32_t> numbers);
};

// The fastest table this machine can run, and all that it can run (scalar first).
BlockKernelTable const& block_kernels();
std::span<BlockKernelTable const> block_kernel_tables();

struct BlockOutput {
  std::span<std::uint64_t> bitmap;  // a word for every 64 blocks, as above
  // In order, the numbers of the blocks that are not zero; room for all blocks. Empty: not wanted.
  std::span<std::uint32_t> numbers = {};
  // Those blocks, one behind another; room for all bytes. Empty: not wanted.
  std::span<std::byte> blocks = {};
};

// Finds, and copies, the blocks that are not zero; returns how many they are. Throws
// InvalidArgument where block_bytes is not a positive multiple of 4 or room is lacking. Reads the
// bytes once: what is copied comes from the cache. Source: Fei et al. 2021 (OmniReduce); Gu
// et al. 2024 (OmNICCL), section 2.
std::size_t block_scan(std::span<const std::byte> bytes, std::size_t block_bytes,
                       BlockOutput const& out, Executor const& executor = inline_executor(),
                       BlockKernelTable const& kernel = block_kernels());

// Copies the blocks of those numbers one after another to `out`, with zeros behind one that is
// shorter. Throws InvalidArgument where block_bytes is 0, no block has a number, or `out` is not of
// that size; so does the next.
void block_gather(std::span<const std::byte> bytes, std::size_t block_bytes,
                  std::span<const std::uint32_t> numbers, std::span<std::byte> out,
                  Executor const& executor = inline_executor());

// The same back, into `bytes`; the numbers differ from each other.
void block_scatter(std::span<std::byte> bytes, std::size_t block_bytes,
                   std::span<const std::uint32_t> numbers, std::span<const std::byte> blocks,
                   Executor const& executor = inline_executor());

}  // namespace sparsecomm
