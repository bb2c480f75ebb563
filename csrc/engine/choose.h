// Which algorithm reduces a vector: from numbers that all ranks have agreed on, so that all choose
// alike.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

// What the choice depends on; the same on every rank.
struct ReductionShape {
  int ranks = 1;
  std::uint64_t extent = 0;
  DType dtype = DType::f32;        // half precision travels in f32 unless the algorithm rounds once
  std::uint64_t most_entries = 0;  // of any rank's contribution
  std::uint64_t total_entries = 0;  // of all contributions
};

// Whether the entry gives the exact reduction, but for the rounding of sums.
bool can_reduce(AlgorithmEntry const& entry);

// The entry of that name, null for "auto". Throws InvalidArgument that lists those that can where
// this one is unknown, or cuts or rounds its result.
AlgorithmEntry const* find_reducing(std::string_view name);

// The cheapest entry by its cost function, at 20 us a round, 1 ns a byte received and 2 ns an entry
// handled: a link of 8 Gbit/s. O(lines of the table).
AlgorithmEntry const& choose(ReductionShape const& shape);

}  // namespace sparsecomm
