// What gaussian_threshold reads of a gradient.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cuda/histogram.cuh"
#include "kernels/cuda/tables.h"

namespace sparsecomm::cuda {
namespace {

constexpr std::size_t most_blocks = 256;

struct MomentsShared {
  double sums[block_warps], squares[block_warps];
};

// Writes this block's sums, added up in a fixed order.
template <class T>
__global__ void __launch_bounds__(block_threads)
    sum_blocks(T const* gradient, accumulate_t<T> const* residual, std::size_t size,
               Moments* partial) {
  SPARSECOMM_SHARED(MomentsShared, shared);
  double sum = 0;
  double squares = 0;
  for (std::size_t i = grid_thread(); i < size; i += grid_threads()) {
    auto const entry = widened(gradient[i]);
    auto const value = static_cast<double>(residual == nullptr ? entry : residual[i] + entry);
    sum += value;
    squares += value * value;
  }
  sum = warp_sum(sum);
  squares = warp_sum(squares);
  if (threadIdx.x % warp_lanes == 0) {
    shared.sums[threadIdx.x / warp_lanes] = sum;
    shared.squares[threadIdx.x / warp_lanes] = squares;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned w = 1; w < block_warps; ++w) {
    sum += shared.sums[w];
    squares += shared.squares[w];
  }
  partial[blockIdx.x].sum = sum;
  partial[blockIdx.x].squares = squares;
}

__global__ void add_partial(Moments const* partial, unsigned blocks, Moments* total) {
  for (unsigned block = 0; block < blocks; ++block) {
    total->sum += partial[block].sum;
    total->squares += partial[block].squares;
  }
}

template <class T>
void moments(T const* gradient, accumulate_t<T> const* residual, std::size_t size, Moments* total,
             void* workspace, Stream stream) {
  if (size == 0) return;
  auto* const partial = static_cast<Moments*>(workspace);
  std::size_t const blocks = std::min(most_blocks, striding_blocks(size));
  launch("moments", sum_blocks<T>, blocks, block_threads, stream, gradient, residual, size,
         partial);
  launch("moments", add_partial, 1, 1, stream, partial, static_cast<unsigned>(blocks), total);
}

template <class T>
__global__ void __launch_bounds__(block_threads)
    count_magnitudes(T const* gradient, accumulate_t<T> const* residual, std::size_t size,
                     unsigned shift, std::uint64_t base, std::uint32_t* counts) {
  SPARSECOMM_SHARED(Histogram, histogram);
  clear(histogram);
  for (std::size_t i = grid_thread(); i < size; i += grid_threads()) {
    std::uint64_t const bin = (std::uint64_t{magnitude_at(gradient, residual, i)} >> shift) - base;
    if (bin < histogram_bins) atomicAdd(histogram.counts + bin, 1u);
  }
  add_to(counts, histogram);
}

template <class T>
void magnitude_histogram(T const* gradient, accumulate_t<T> const* residual, std::size_t size,
                         unsigned shift, std::uint64_t base, std::uint32_t* counts, Stream stream) {
  if (size == 0) return;
  require(size <= std::numeric_limits<std::uint32_t>::max(), "magnitude_histogram: ", size,
          " entries are more than a device counts, 2^32 - 1; split them");
  launch("magnitude_histogram", count_magnitudes<T>, striding_blocks(size), block_threads, stream,
         gradient, residual, size, shift, base, counts);
}

}  // namespace

template <class T>
void add_gaussian_kernels(Kernels<T>& table) {
  table.moments = moments<T>;
  table.magnitude_histogram = magnitude_histogram<T>;
}

template void add_gaussian_kernels(Kernels<float>&);
template void add_gaussian_kernels(Kernels<double>&);
template void add_gaussian_kernels(Kernels<Half>&);
template void add_gaussian_kernels(Kernels<BFloat16>&);

}  // namespace sparsecomm::cuda
