#include "kernels/block_top_k.h"

#include <algorithm>

#include "base/error.h"

namespace sparsecomm {
namespace {

constexpr std::size_t entries_of_part = std::size_t{1} << 16;

}  // namespace

template <class T>
std::span<const std::uint32_t> block_top_k(std::span<const T> x, std::size_t block, std::uint64_t k,
                                           BlockTopKScratch& scratch, Executor const& executor,
                                           KernelTable<T> const& kernel) {
  require(block > 0, "blocks of 0 entries: use 1 or more");
  std::size_t const blocks = part_count(x.size(), block);
  std::span<double> const squares = scratch.squares.take(blocks);
  std::size_t const blocks_of_part = std::max<std::size_t>(1, entries_of_part / block);
  for_each_part(executor, part_count(blocks, blocks_of_part),
                [&](std::size_t part, std::size_t /*worker*/) {
                  std::size_t const end = std::min(blocks, (part + 1) * blocks_of_part);
                  for (std::size_t number = part * blocks_of_part; number < end; ++number) {
                    auto const entries =
                        x.subspan(number * block, std::min(block, x.size() - number * block));
                    squares[number] = kernel.moments(entries, {}).squares;
                  }
                });
  std::size_t const wanted = std::min<std::uint64_t>(k, blocks);
  auto const numbers = scratch.numbers.take(wanted);
  exact_top_k<double>(squares, wanted, {numbers, scratch.largest.take(wanted)}, scratch.top,
                      executor);
  return numbers;
}

#define SPARSECOMM_INSTANTIATE(T)                                                       \
  template std::span<const std::uint32_t> block_top_k(std::span<const T>, std::size_t,  \
                                                      std::uint64_t, BlockTopKScratch&, \
                                                      Executor const&, KernelTable<T> const&)
SPARSECOMM_INSTANTIATE(float);
SPARSECOMM_INSTANTIATE(double);
SPARSECOMM_INSTANTIATE(Half);
SPARSECOMM_INSTANTIATE(BFloat16);
#undef SPARSECOMM_INSTANTIATE

}  // namespace sparsecomm
