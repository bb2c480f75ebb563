// What a selection by buckets (SelectionRule::bucket) needs, in any memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "kernels/kernels.h"

namespace sparsecomm {

// How many of each bucket are wanted where k are wanted of all: the least that gives as many.
inline std::size_t of_each_bucket(std::uint64_t extent, std::size_t bucket, std::uint64_t k) {
  std::size_t each = 1;
  while (each < bucket && bucket_top_k_count(extent, bucket, each) < k) ++each;
  return each;
}

// All residuals, which buckets may reach over. Throws InvalidArgument unless they are one piece.
template <class T>
std::span<accumulate_t<T>> joined_residual(std::span<const Segment<T>> segments,
                                           std::uint64_t extent) {
  if (segments.empty()) return {};
  for (std::size_t i = 1; i < segments.size(); ++i) {
    auto const former = segments[i - 1].residual;
    require(former.data() + former.size() == segments[i].residual.data(),
            "buckets need the residuals of a group in one piece");
  }
  return {segments.front().residual.data(), extent};
}

}  // namespace sparsecomm
