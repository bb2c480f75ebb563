// This file is compiled once per instruction set: foreach_target.h includes it again for each.
#include "kernels/index_set.h"

#include <bit>
#include <cstddef>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/index_set.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

void insert(std::span<std::uint64_t> bitmap, std::uint32_t first,
            std::span<const std::uint32_t> indices) {
  for (std::uint32_t const index : indices) {
    std::uint32_t const bit = index - first;
    bitmap[bit / 64] |= std::uint64_t{1} << bit % 64;
  }
}

std::size_t rank(std::span<const std::uint64_t> bitmap, std::uint32_t first,
                 std::span<std::uint32_t> ranks, std::uint32_t* members) {
  std::uint32_t count = 0;
  for (std::size_t word = 0; word < bitmap.size(); ++word) {
    ranks[word] = count;
    std::uint32_t const base = first + static_cast<std::uint32_t>(word) * 64;
    for (std::uint64_t bits = bitmap[word]; bits != 0; bits &= bits - 1) {
      members[count++] = base + static_cast<std::uint32_t>(std::countr_zero(bits));
    }
  }
  return count;
}

void places(std::span<const std::uint64_t> bitmap, std::uint32_t first,
            std::span<const std::uint32_t> ranks, std::span<const std::uint32_t> indices,
            std::uint32_t* places) {
  for (std::size_t n = 0; n < indices.size(); ++n) {
    std::uint32_t const bit = indices[n] - first;
    std::uint64_t const below = bitmap[bit / 64] & ((std::uint64_t{1} << bit % 64) - 1);
    places[n] = ranks[bit / 64] + static_cast<std::uint32_t>(hwy::PopCount(below));
  }
}

void kernels(IndexSetKernels& all) { all = {insert, rank, places}; }

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsecomm {

HWY_EXPORT(kernels);

IndexSetKernels const& index_set_kernels() {
  static IndexSetKernels const chosen = [] {
    IndexSetKernels all{};
    HWY_DYNAMIC_DISPATCH(kernels)(all);
    return all;
  }();
  return chosen;
}

}  // namespace sparsecomm
#endif
