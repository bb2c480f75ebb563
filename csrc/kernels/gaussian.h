// The steps of gaussian_threshold, for kernels that find moments and histograms elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/kernels.h"

namespace sparsecomm {

// Which histogram to make (see KernelTable::magnitude_histogram), and the bin of the estimate.
struct GaussianBins {
  unsigned shift;
  std::uint64_t base;
  std::uint64_t start;
};

// From the sums over `size` entries of which k < size are wanted.
template <class V>
GaussianBins gaussian_bins(Moments const& moments, std::size_t size, std::uint64_t k);

// From the histogram, of histogram_bins bins.
template <class V>
Threshold<V> gaussian_cut(GaussianBins const& bins, std::span<const std::uint64_t> counts,
                          std::uint64_t k);

}  // namespace sparsecomm
