// Which indices two sorted lists share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace sparsecomm {

// What a kernel may write behind the positions it has found.
inline constexpr std::size_t intersect_slack = 64;

// One instruction set's kernel.
struct IntersectKernelTable {
  std::string_view target;

  // Writes the positions in `one` of the indices that `other` holds too, in order, and returns how
  // many they are. Both are strictly increasing; `positions` has room for as many as `one` has and
  // intersect_slack more. O(one + other), whatever they share.
  std::size_t (*intersect)(std::span<const std::uint32_t> one, std::span<const std::uint32_t> other,
                           std::uint32_t* positions);
};

// The fastest table this machine can run, and all that it can run (scalar first).
IntersectKernelTable const& intersect_kernels();
std::span<IntersectKernelTable const> intersect_kernel_tables();

// From (i, j) on, without a branch that depends on the lists: what is left to a vector kernel too.
inline std::size_t intersect_range(std::span<const std::uint32_t> one,
                                   std::span<const std::uint32_t> other, std::size_t i,
                                   std::size_t j, std::uint32_t* positions, std::size_t found) {
  while (i < one.size() && j < other.size()) {
    std::uint32_t const a = one[i];
    std::uint32_t const b = other[j];
    positions[found] = static_cast<std::uint32_t>(i);
    found += a == b;
    i += a <= b;
    j += b <= a;
  }
  return found;
}

}  // namespace sparsecomm
