// Regions of the index space that hold even shares of all ranks' selections taken together.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "collectives/algorithm.h"

namespace sparsecomm {

// The quantiles of the union of all selections, counted with multiplicity, from sums of histograms:
// first of 16 P bins over the whole range, then of 16 bins in each bin that holds a quantile and
// more than 1/12 of a region, until none does or it is a single index. A region then holds at most
//
//   T/P + 2 max(T/(12 P), P)
//
// entries, T those of all ranks: several ranks may hold one index, and that cannot be divided. So
// it does not matter whether ranks select in similar places, as it does for Ok-Topk's average of
// the ranks' own quantiles (section 3.1.1), which this stands for. O(P) words, and as a rule one
// sum.
class RegionSearch {
 public:
  RegionSearch();
  // Region j of `boundaries.size() + 1` starts at boundary j - 1. With no entries at all the range
  // itself is split evenly.
  void run(Channel& channel, std::span<const std::uint32_t> indices, std::uint64_t extent,
           std::span<std::uint32_t> boundaries);

 private:
  // [first, last) holds `inside` entries, and `before` lie below it.
  struct Interval {
    std::uint64_t first, last;
    std::uint64_t before, inside;

    std::uint64_t bins(std::uint64_t wanted) const;
    std::uint64_t edge(std::uint64_t bin, std::uint64_t bins) const;
  };
  void count(Channel& channel, std::span<const std::uint32_t> indices, std::uint64_t bins);

  std::unique_ptr<DenseAllreduce<std::int64_t>> sum_;
  std::vector<std::int64_t> counts_;
  std::vector<Interval> found_;    // [boundary], where it lies
  std::vector<Interval> divided_;  // those in which a round counts
};

// An upper bound; as a rule one round of several.
Cost regions_cost(int ranks, std::uint64_t extent);

}  // namespace sparsecomm
