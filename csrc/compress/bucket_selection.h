// Steps of a selection by buckets or blocks (SelectionRule) in any memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "base/executor.h"
#include "compress/schedule.h"
#include "compress/selection_rule.h"
#include "kernels/kernels.h"

namespace sparsecomm {

// k: how many of `extent` entries that rule selects at a density.
inline std::uint64_t entries_wanted(SelectionRule const& rule, double density,
                                    std::uint64_t extent) {
  if (std::size_t const bucket = rule.bucket; bucket > 0) {
    return std::max<std::uint64_t>(1,
                                   bucket_top_k_count(extent, bucket, entries_at(density, bucket)));
  }
  if (std::size_t const block = rule.block; block > 0) {
    std::uint64_t const entries = block * entries_at(density, part_count(extent, block));
    return std::min(entries, std::max<std::uint64_t>(1, extent));
  }
  return entries_at(density, extent);
}

// How many of each bucket are wanted where k are wanted of all: the least that gives as many.
inline std::size_t of_each_bucket(std::uint64_t extent, std::size_t bucket, std::uint64_t k) {
  std::size_t each = 1;
  while (each < bucket && bucket_top_k_count(extent, bucket, each) < k) ++each;
  return each;
}

// That part of all segments, which buckets and blocks may reach over. Throws InvalidArgument unless
// they are one piece.
template <class T, class E>
std::span<E> joined(std::span<const Segment<T>> segments, std::span<E> Segment<T>::* part,
                    std::uint64_t extent) {
  if (segments.empty()) return {};
  for (std::size_t i = 1; i < segments.size(); ++i) {
    auto const former = segments[i - 1].*part;
    require(former.data() + former.size() == (segments[i].*part).data(),
            "buckets and blocks need the residuals of a group in one piece: segment ", i,
            " does not begin where the one before it ends");
  }
  return {(segments.front().*part).data(), extent};
}

}  // namespace sparsecomm
