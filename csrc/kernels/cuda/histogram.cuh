// A block's histogram in shared memory, added to that of the grid at the end.
#pragma once

#include "kernels/cuda/device.h"

namespace sparsecomm::cuda {

struct Histogram {
  std::uint32_t counts[histogram_bins];
};

__device__ inline void clear(Histogram& histogram) {
  for (unsigned bin = threadIdx.x; bin < histogram_bins; bin += blockDim.x) {
    histogram.counts[bin] = 0;
  }
  __syncthreads();
}

__device__ inline void add_to(std::uint32_t* counts, Histogram const& histogram) {
  __syncthreads();
  for (unsigned bin = threadIdx.x; bin < histogram_bins; bin += blockDim.x) {
    if (histogram.counts[bin] > 0) atomicAdd(counts + bin, histogram.counts[bin]);
  }
}

// |gradient + residual| of one entry; without a residual, of the gradient.
template <class T>
__device__ magnitude_bits_t<accumulate_t<T>> magnitude_at(T const* gradient,
                                                          accumulate_t<T> const* residual,
                                                          std::size_t i) {
  using V = accumulate_t<T>;
  V const value = widened(gradient[i]);
  return magnitude_bits(residual == nullptr ? value : residual[i] + value);
}

}  // namespace sparsecomm::cuda
