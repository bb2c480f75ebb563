// A sample of magnitudes that brackets the k-th largest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/executor.h"
#include "kernels/kernels.h"

namespace sparsecomm {

// Bit patterns [low, high), 1 <= low, that almost surely hold that of the k-th largest magnitude,
// and little else. Not narrow: the values at rank k have too many equals for that.
struct Bracket {
  std::uint64_t low, high;
  bool narrow;
  std::uint64_t most;  // almost surely no more entries have `low` or above
};

// Of gradient + residual, `size` entries, or the gradient alone where residuals are empty; 1 <= k <
// size. `scratch` holds the sample: about 32,768 entries.
template <class T>
Bracket sampled_bracket(std::span<const Segment<T>> segments, std::size_t size, std::uint64_t k,
                        std::vector<accumulate_t<T>>& scratch, Executor const& executor,
                        KernelTable<T> const& kernel);

}  // namespace sparsecomm
