// Top-k of buckets: one block of threads per bucket, whose rank bits lie in shared memory. The k-th
// is found digit by digit, as exact_threshold does.
#include "kernels/buckets.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tables.h"

namespace sparsecomm::cuda {
namespace {

constexpr unsigned digit_bits = 8;
constexpr unsigned digits = 1u << digit_bits;
static_assert(digits == block_threads);

template <class V>
struct BucketShared {
  magnitude_bits_t<V> keys[max_bucket];
  std::uint32_t counts[digits];
  unsigned digit, rank;
  unsigned larger[block_warps], ties[block_warps];
};

// Where the buckets of `row` entries each lie, and what is packed of them.
struct BucketLayout {
  std::size_t row, bucket, k;
  std::size_t per_row, packed_per_row;
};

// By the first warp: which digit the rank-th largest key has, and its rank among those that share
// it.
template <class V>
__device__ void pick_digit(BucketShared<V>& shared, unsigned rank) {
  constexpr unsigned each = digits / warp_lanes;
  unsigned const lane = threadIdx.x % warp_lanes;
  unsigned const highest = digits - 1 - lane * each;
  unsigned own = 0;
  for (unsigned j = 0; j < each; ++j) own += shared.counts[highest - j];
  unsigned up_to = own;
  for (unsigned offset = 1; offset < warp_lanes; offset *= 2) {
    unsigned const other = __shfl_up_sync(all_lanes, up_to, offset);
    up_to += lane >= offset ? other : 0;
  }
  unsigned before = up_to - own;
  if (rank <= before || rank > up_to) return;
  unsigned digit = highest;
  while (rank > before + shared.counts[digit]) before += shared.counts[digit--];
  shared.digit = digit;
  shared.rank = rank - before;
}

template <class T>
__global__ void __launch_bounds__(block_threads)
    top_k_of_buckets(T const* x, std::size_t buckets, BucketLayout layout,
                     Packed<accumulate_t<T>> out) {
  using V = accumulate_t<T>;
  using Bits = magnitude_bits_t<V>;
  SPARSECOMM_SHARED(BucketShared<V>, shared);
  unsigned const lane = threadIdx.x % warp_lanes;
  unsigned const warp = threadIdx.x / warp_lanes;
  for (std::size_t number = blockIdx.x; number < buckets; number += gridDim.x) {
    std::size_t const first = number % layout.per_row * layout.bucket;  // in its row
    std::size_t const left = layout.row - first;
    auto const size = static_cast<unsigned>(left < layout.bucket ? left : layout.bucket);
    auto const wanted = static_cast<unsigned>(layout.k < size ? layout.k : size);
    T const* const entries = x + number / layout.per_row * layout.row + first;
    for (unsigned i = threadIdx.x; i < size; i += block_threads) {
      shared.keys[i] = rank_bits(widened(entries[i]));
    }

    Bits lowest = 0;  // the digits found so far
    unsigned rank = wanted;
    for (unsigned shift = 8 * sizeof(Bits); shift > 0;) {
      shift -= digit_bits;
      shared.counts[threadIdx.x] = 0;
      __syncthreads();
      for (unsigned i = threadIdx.x; i < size; i += block_threads) {
        Bits const key = shared.keys[i];
        if (((key ^ lowest) >> shift) >> digit_bits == 0) {
          atomicAdd(shared.counts + (key >> shift & (digits - 1)), 1u);
        }
      }
      __syncthreads();
      if (warp == 0) pick_digit(shared, rank);
      __syncthreads();
      lowest |= Bits{shared.digit} << shift;
      rank = shared.rank;
    }

    // Each warp packs a run of its own: of the larger all, of those that equal the k-th `rank`.
    auto const run = static_cast<unsigned>(divided_up(size, block_threads)) * warp_lanes;
    unsigned larger = 0;
    unsigned ties = 0;
    for (unsigned i = warp * run; i < (warp + 1) * run; i += warp_lanes) {
      Bits const key = i + lane < size ? shared.keys[i + lane] : 0;
      larger += __popc(__ballot_sync(all_lanes, i + lane < size && key > lowest));
      ties += __popc(__ballot_sync(all_lanes, i + lane < size && key == lowest));
    }
    if (lane == 0) {
      shared.larger[warp] = larger;
      shared.ties[warp] = ties;
    }
    __syncthreads();
    larger = ties = 0;
    for (unsigned w = 0; w < warp; ++w) {
      larger += shared.larger[w];
      ties += shared.ties[w];
    }
    std::size_t const place =
        number / layout.per_row * layout.packed_per_row +
        number % layout.per_row * (layout.k < layout.bucket ? layout.k : layout.bucket);
    unsigned const lanes_before = (1u << lane) - 1;
    for (unsigned i = warp * run; i < (warp + 1) * run; i += warp_lanes) {
      unsigned const at = i + lane;
      Bits const key = at < size ? shared.keys[at] : 0;
      unsigned const larger_lanes = __ballot_sync(all_lanes, at < size && key > lowest);
      unsigned const tied_lanes = __ballot_sync(all_lanes, at < size && key == lowest);
      unsigned const ties_before = ties + __popc(tied_lanes & lanes_before);
      if (at < size && (key > lowest || (key == lowest && ties_before < rank))) {
        std::size_t const to = place + larger + __popc(larger_lanes & lanes_before) +
                               (ties_before < rank ? ties_before : rank);
        out.indices[to] = static_cast<std::uint32_t>(first + at);
        out.values[to] = widened(entries[at]);
      }
      larger += __popc(larger_lanes);
      ties += __popc(tied_lanes);
    }
    __syncthreads();  // before the next bucket's keys come
  }
}

template <class T>
void top_k_per_bucket(T const* x, std::size_t size, std::size_t row, std::size_t bucket,
                      std::size_t k, Packed<accumulate_t<T>> out, Stream stream) {
  constexpr char const* call = "top_k_per_bucket";
  require(bucket >= 1 && bucket <= max_bucket, call, ": buckets of ", bucket,
          " entries: choose 1 to ", max_bucket);
  require(row == 0 ? size == 0 : size % row == 0, call, ": ", size,
          " entries are not a number of rows of ", row);
  require(row <= std::uint64_t{1} << 32, call, ": the entries of a row of ", row,
          " do not all have 32-bit indices; use shorter rows");
  if (size == 0 || k == 0) return;
  BucketLayout const layout{row, bucket, k, divided_up(row, bucket),
                            bucket_top_k_count(row, bucket, k)};
  std::size_t const buckets = size / row * layout.per_row;
  constexpr std::size_t most_blocks = 1u << 16;
  launch(call, top_k_of_buckets<T>, buckets < most_blocks ? buckets : most_blocks, block_threads,
         stream, x, buckets, layout, out);
}

}  // namespace

template <class T>
void add_bucket_kernels(Kernels<T>& table) {
  table.top_k_per_bucket = top_k_per_bucket<T>;
}

template void add_bucket_kernels(Kernels<float>&);
template void add_bucket_kernels(Kernels<double>&);
template void add_bucket_kernels(Kernels<Half>&);
template void add_bucket_kernels(Kernels<BFloat16>&);

}  // namespace sparsecomm::cuda
