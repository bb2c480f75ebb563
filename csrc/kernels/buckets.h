// What the scalar and the SIMD kernels over buckets share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/error.h"
#include "kernels/kernels.h"
#include "kernels/magnitude.h"

namespace sparsecomm {

template <class V>
inline constexpr magnitude_bits_t<V> infinity_bits = largest_finite_bits<V> + 1;

// The rank of an entry in a top-k, alike for all that are not finite. Without std::min, which takes
// its arguments by reference: a constant of the host has no address on a device.
template <class V>
constexpr magnitude_bits_t<V> rank_bits(V value) {
  auto const bits = magnitude_bits(value);
  return bits < infinity_bits<V> ? bits : infinity_bits<V>;
}

template <class V>
void require_buckets(std::size_t size, std::size_t bucket, std::size_t k, std::uint32_t first_index,
                     PackedSpan<V> const& out) {
  require(bucket >= 1 && bucket <= max_bucket, "buckets of ", bucket, " entries: choose 1 to ",
          max_bucket);
  std::uint64_t const count = bucket_top_k_count(size, bucket, k);
  require(out.indices.size() == count && out.values.size() == count, "the ", k, " largest of each ",
          bucket, " of ", size, " entries are ", count, ", but there is room for ",
          out.indices.size(), " indices and ", out.values.size(), " values");
  require(size <= (std::uint64_t{1} << 32) - first_index, "entries ", first_index, " to ",
          first_index + std::uint64_t{size}, " do not all have 32-bit indices");
}

}  // namespace sparsecomm
