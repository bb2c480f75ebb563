// The blocks of consecutive entries whose norms are the largest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/executor.h"
#include "kernels/kernels.h"
#include "kernels/top_k.h"

namespace sparsecomm {

// What block_top_k keeps between calls, so that it need not allocate.
struct BlockTopKScratch {
  Buffer<double> squares;
  Buffer<std::uint32_t> numbers;
  Buffer<double> largest;
  TopKScratch<double> top;
};

// The numbers, in order, of the min(k, blocks) blocks of `block` consecutive entries whose sums of
// squares, in double, are the largest; among equals the lowest number comes first, and sums that
// are not finite come before all others; of entries below 1e-162 squares are zero. The last block
// may be shorter. Valid until the next call
// with that scratch. Throws InvalidArgument unless block is positive. Reads N once, and N / block
// sums as exact_top_k does.
template <class T>
std::span<const std::uint32_t> block_top_k(std::span<const T> x, std::size_t block, std::uint64_t k,
                                           BlockTopKScratch& scratch,
                                           Executor const& executor = inline_executor(),
                                           KernelTable<T> const& kernel = kernels<T>());

}  // namespace sparsecomm
