// A set of indices as a bitmap, and the place of each index in it: the union of sorted lists in
// time proportional to their entries, whatever the number of lists.
#pragma once

#include <cstdint>
#include <span>

namespace sparsecomm {

// Functions on a bitmap that starts at `first`: bit i % 64 of word i / 64 stands for first + i.
// Compiled per instruction set, for the count of bits in a word.
struct IndexSetKernels {
  // Sets the bits of `indices`, all of which must lie in the bitmap.
  void (*insert)(std::span<std::uint64_t> bitmap, std::uint32_t first,
                 std::span<const std::uint32_t> indices);

  // ranks[w] = the members before word w. Writes the members in order to `members`, which has room
  // for them, and returns how many there are.
  std::size_t (*rank)(std::span<const std::uint64_t> bitmap, std::uint32_t first,
                      std::span<std::uint32_t> ranks, std::uint32_t* members);

  // places[n] = how many members are below indices[n], a member itself.
  void (*places)(std::span<const std::uint64_t> bitmap, std::uint32_t first,
                 std::span<const std::uint32_t> ranks, std::span<const std::uint32_t> indices,
                 std::uint32_t* places);
};

// The fastest that this machine can run.
IndexSetKernels const& index_set_kernels();

}  // namespace sparsecomm
