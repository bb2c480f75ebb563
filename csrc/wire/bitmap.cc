#include "wire/bitmap.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "wire/codecs.h"
#include "wire/index_kernels.h"

namespace sparsecomm::bitmap {

std::size_t encode(IndexKernels const&, std::span<const std::uint32_t> indices,
                   std::uint32_t first_index, std::uint32_t extent, std::span<std::byte> out) {
  std::size_t const length = bytes(indices.size(), extent);
  if (length > out.size()) return does_not_fit;
  std::ranges::fill(out.first(length), std::byte{0});
  for (std::uint32_t const index : indices) {
    std::uint32_t const position = index - first_index;
    out[position / 8] |= std::byte(1u << (position % 8));
  }
  return length;
}

void decode(IndexKernels const& kernels, std::span<const std::byte> in, std::uint32_t first_index,
            std::uint32_t extent, std::span<std::uint32_t> indices) {
  std::size_t const length = bytes(indices.size(), extent);
  require<MalformedFrame>(in.size() == length, "bitmap indices: index_bytes is ", in.size(),
                          ", must be ", length, " for extent ", extent);
  // As long as there is room for what ones() may write beyond.
  Ones const found = kernels.ones(
      in, first_index, indices.size() - std::min(indices.size(), ones_slack), indices.data());
  std::size_t count = found.count;
  for (std::size_t at = found.bytes; at < in.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, in.data() + at, std::min(sizeof(word), in.size() - at));
    auto const ones = static_cast<std::size_t>(std::popcount(word));
    require<MalformedFrame>(count + ones <= indices.size(), "bitmap indices: ones are ",
                            count + ones, " or more, must be count ", indices.size());
    auto const base = first_index + static_cast<std::uint32_t>(at * 8);
    for (; word != 0; word &= word - 1) {
      indices[count++] = base + static_cast<std::uint32_t>(std::countr_zero(word));
    }
  }
  require<MalformedFrame>(count == indices.size(), "bitmap indices: ones are ", count,
                          ", must be count ", indices.size());
  // All others lie in range: one past the last byte's use would be padding.
  require<MalformedFrame>(indices.empty() || indices.back() - first_index < extent,
                          "bitmap indices: padding is not 0");
}

}  // namespace sparsecomm::bitmap
