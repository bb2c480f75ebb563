// The k-th largest magnitude by radix: histograms of 11 bits at a time, highest first. What shares
// the bits found so far is collected on the way once it is little, and later passes read only that.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cuda/histogram.cuh"
#include "kernels/cuda/tables.h"
#include "kernels/magnitude.h"

namespace sparsecomm::cuda {
namespace {

constexpr unsigned pass_bits = std::bit_width(histogram_bins) - 1;
constexpr unsigned bins = histogram_bins;

// Where the search stands.
struct Search {
  std::uint64_t prefix;      // the bits of the threshold above those not settled
  std::uint64_t above;       // entries known to be larger
  std::uint64_t collected;   // entries of `candidates`
  std::uint32_t collecting;  // the next pass over everything collects
  std::uint32_t have_all;    // `candidates` holds all that share the prefix
  std::uint32_t too_few;     // fewer non-zeros than were asked for
  std::uint32_t unused;
};

template <class V>
struct SearchMemory {
  Search* search;
  std::uint32_t* counts;  // [bins]
  magnitude_bits_t<V>* candidates;
  std::size_t capacity;
};

constexpr std::size_t search_header = 64;

std::size_t candidate_capacity(std::size_t size, std::size_t stride) {
  std::size_t const sample = stride == 0 ? 0 : size / stride;
  return std::max(size / 16 + 1024, sample);
}

template <class V>
SearchMemory<V> search_memory(void* workspace, std::size_t capacity) {
  auto* const bytes = static_cast<std::byte*>(workspace);
  static_assert(sizeof(Search) <= search_header);
  auto* const counts = reinterpret_cast<std::uint32_t*>(bytes + search_header);
  return {reinterpret_cast<Search*>(bytes), counts,
          reinterpret_cast<magnitude_bits_t<V>*>(counts + bins), capacity};
}

struct Pass {
  unsigned shift;  // below the bits that it settles
  unsigned width;
};

// Counts those that share the prefix by the next bits; zeros are never selected, nor counted.
template <class Bits>
__device__ bool count(std::uint32_t* histogram, std::uint64_t prefix, Pass pass, Bits bits) {
  std::uint64_t const upper = std::uint64_t{bits} >> pass.shift;
  if (bits == 0 || upper >> pass.width != prefix) return false;
  atomicAdd(histogram + (upper & ((1u << pass.width) - 1)), 1u);
  return true;
}

template <class T>
__global__ void __launch_bounds__(block_threads)
    count_segment(T const* gradient, accumulate_t<T> const* residual, std::size_t size,
                  SearchMemory<accumulate_t<T>> memory, Pass pass) {
  if (memory.search->have_all != 0) return;
  SPARSECOMM_SHARED(Histogram, histogram);
  clear(histogram);
  std::uint64_t const prefix = memory.search->prefix;
  bool const collect = memory.search->collecting != 0;
  unsigned const lane = threadIdx.x % warp_lanes;
  // Whole warps go round together, so that they can collect together.
  std::size_t const rounds = divided_up(size, grid_threads());
  for (std::size_t round = 0; round < rounds; ++round) {
    std::size_t const i = round * grid_threads() + grid_thread();
    magnitude_bits_t<accumulate_t<T>> bits = 0;
    if (i < size) bits = magnitude_at(gradient, residual, i);
    bool const counted = count(histogram.counts, prefix, pass, bits);
    if (!collect) continue;
    unsigned const lanes = __ballot_sync(all_lanes, counted);
    if (lanes == 0) continue;
    unsigned long long first = 0;
    if (lane == 0) {
      first = atomicAdd(counter(&memory.search->collected),
                        static_cast<unsigned long long>(__popc(lanes)));
    }
    first = __shfl_sync(all_lanes, first, 0);
    if (counted) memory.candidates[first + __popc(lanes & ((1u << lane) - 1))] = bits;
  }
  add_to(memory.counts, histogram);
}

template <class V>
__global__ void __launch_bounds__(block_threads)
    count_candidates(SearchMemory<V> memory, Pass pass) {
  if (memory.search->have_all == 0) return;
  SPARSECOMM_SHARED(Histogram, histogram);
  clear(histogram);
  std::uint64_t const prefix = memory.search->prefix;
  for (std::size_t i = grid_thread(); i < memory.search->collected; i += grid_threads()) {
    count(histogram.counts, prefix, pass, memory.candidates[i]);
  }
  add_to(memory.counts, histogram);
}

struct PickShared {
  std::uint64_t warps[block_warps];
};

// Settles the bits of a pass, by one block: each thread adds up bins / block_threads bins, from the
// top, and the one in whose bins the rank falls goes through them.
template <class V>
__global__ void __launch_bounds__(block_threads)
    pick_bin(SearchMemory<V> memory, std::uint64_t rank, Pass pass) {
  constexpr unsigned each = bins / block_threads;
  SPARSECOMM_SHARED(PickShared, shared);
  unsigned const lane = threadIdx.x % warp_lanes;
  unsigned const warp = threadIdx.x / warp_lanes;
  unsigned const top = bins - 1 - threadIdx.x * each;
  std::uint64_t own = 0;
  for (unsigned j = 0; j < each; ++j) own += memory.counts[top - j];
  std::uint64_t before = own;  // of this warp's threads up to this one, first
  for (unsigned offset = 1; offset < warp_lanes; offset *= 2) {
    std::uint64_t const other = __shfl_up_sync(all_lanes, before, offset);
    if (lane >= offset) before += other;
  }
  if (lane == warp_lanes - 1) shared.warps[warp] = before;
  std::uint64_t const above = memory.search->above;
  std::uint64_t const prefix = memory.search->prefix;
  bool const collected = memory.search->collecting != 0;
  __syncthreads();
  before += above - own;
  for (unsigned w = 0; w < warp; ++w) before += shared.warps[w];
  if (before < rank && rank <= before + own) {
    unsigned bin = top;
    while (before + memory.counts[bin] < rank) before += memory.counts[bin--];
    memory.search->above = before;
    memory.search->prefix = prefix << pass.width | bin;
    if (collected) {
      memory.search->have_all = 1;
      memory.search->collecting = 0;
    } else if (memory.search->have_all == 0 && memory.counts[bin] <= memory.capacity) {
      memory.search->collecting = 1;
    }
  } else if (threadIdx.x == block_threads - 1 && before + own < rank) {
    memory.search->too_few = 1;
  }
  __syncthreads();
  for (unsigned bin = threadIdx.x; bin < bins; bin += block_threads) memory.counts[bin] = 0;
}

template <class V>
__device__ void set_threshold(SelectionState* state, Search const& search, std::uint64_t ties) {
  bool const none = search.too_few != 0 || search.prefix == 0;
  bool const not_finite = search.prefix > largest_finite_bits<V>;
  // Whatever is not finite passes every threshold.
  state->magnitude = none ? 0 : not_finite ? std::uint64_t{largest_finite_bits<V>} : search.prefix;
  state->ties = none || not_finite ? 0 : ties;
}

template <class V>
__global__ void set_exact(Search const* search, std::uint64_t k, SelectionState* state) {
  set_threshold<V>(state, *search, k - search->above);
}

// Ties by the proportion of the sample, of which one entry stands for `each`.
template <class V>
__global__ void set_sampled(Search const* search, std::uint64_t k, double each,
                            SelectionState* state) {
  double const ties = static_cast<double>(k) - each * static_cast<double>(search->above);
  set_threshold<V>(state, *search, ties > 0 ? static_cast<std::uint64_t>(ties) : 0);
}

// Entries of the sample from `begin` to `end`, of those that lie in this segment, which holds the
// entries from `first` on.
template <class T>
__global__ void __launch_bounds__(block_threads)
    take_sample(T const* gradient, accumulate_t<T> const* residual, std::size_t first,
                std::size_t size, std::size_t stride, std::size_t phase, std::size_t begin,
                std::size_t end, SearchMemory<accumulate_t<T>> memory) {
  for (std::size_t i = begin + grid_thread(); i < end; i += grid_threads()) {
    std::size_t const run = sampled_run(i / sample_run, stride, phase);
    std::size_t const at = run * sample_run + i % sample_run - first;
    if (at < size) memory.candidates[i] = magnitude_at(gradient, residual, at);
  }
}

__global__ void have_sample(Search* search, std::uint64_t count) {
  search->collected = count;
  search->have_all = 1;
}

template <class T>
std::size_t total_size(char const* call, std::span<const Segment<T>> segments) {
  std::size_t total = 0;
  for (Segment<T> const& segment : segments) {
    require(
        segment.residual.data() == nullptr || segment.gradient.size() == segment.residual.size(),
        call, ": a gradient of ", segment.gradient.size(),
        " entries needs a residual of as many, not of ", segment.residual.size());
    total += segment.gradient.size();
  }
  require(total <= std::numeric_limits<std::uint32_t>::max(), call, ": ", total,
          " entries are more than a device counts, 2^32 - 1; split them");
  return total;
}

template <class V>
void clear_search(char const* call, SearchMemory<V> const& memory, Stream stream) {
  std::size_t const bytes = search_header + bins * sizeof(std::uint32_t);
  require_success(cudaMemsetAsync(memory.search, 0, bytes, stream), call);
}

// All passes; over the candidates alone where `segments` is empty.
template <class T>
void search_rank(char const* call, std::span<const Segment<T>> segments, std::uint64_t rank,
                 SearchMemory<accumulate_t<T>> const& memory, Stream stream) {
  using V = accumulate_t<T>;
  unsigned unsettled = std::bit_width(magnitude_mask<V>);
  for (bool first = true; unsettled > 0; first = false) {
    unsigned const width = std::min(unsettled, pass_bits);
    Pass const pass{unsettled - width, width};
    for (Segment<T> const& segment : segments) {
      if (segment.gradient.empty()) continue;
      launch(call, count_segment<T>, striding_blocks(segment.gradient.size()), block_threads,
             stream, segment.gradient.data(), segment.residual.data(), segment.gradient.size(),
             memory, pass);
    }
    if (!first || segments.empty()) {
      launch(call, count_candidates<V>, striding_blocks(memory.capacity), block_threads, stream,
             memory, pass);
    }
    launch(call, pick_bin<V>, 1, block_threads, stream, memory, rank, pass);
    unsettled -= width;
  }
}

__global__ void set_none(SelectionState* state) {
  state->magnitude = 0;
  state->ties = 0;
}

template <class T>
void exact_threshold(std::span<const Segment<T>> segments, std::uint64_t k, SelectionState* state,
                     void* workspace, Stream stream) {
  using V = accumulate_t<T>;
  constexpr char const* call = "exact_threshold";
  require(k >= 1, "a selection of k = ", k, " entries: k must be at least 1");
  std::size_t const size = total_size(call, segments);
  if (k >= size) {
    launch(call, set_none, 1, 1, stream, state);
    return;
  }
  auto const memory = search_memory<V>(workspace, candidate_capacity(size, 0));
  clear_search(call, memory, stream);
  search_rank<T>(call, segments, k, memory, stream);
  launch(call, set_exact<V>, 1, 1, stream, memory.search, k, state);
}

template <class T>
void sampled_threshold(std::span<const Segment<T>> segments, std::uint64_t k, std::size_t stride,
                       std::size_t phase, SelectionState* state, void* workspace, Stream stream) {
  using V = accumulate_t<T>;
  constexpr char const* call = "sampled_threshold";
  require(k >= 1, "a selection of k = ", k, " entries: k must be at least 1");
  std::size_t const size = total_size(call, segments);
  require(stride >= 1 && stride * sample_run <= size, "a sample of every stride = ", stride,
          "-th run of ", sample_run, " entries of ", size,
          ": take the stride that sampled_stride() settles on, unless it is 0");
  std::size_t const count = size / (stride * sample_run) * sample_run;
  auto const memory = search_memory<V>(workspace, candidate_capacity(size, stride));
  clear_search(call, memory, stream);
  launch(call, have_sample, 1, 1, stream, memory.search, std::uint64_t{count});
  std::size_t first = 0;
  for (Segment<T> const& segment : segments) {
    std::size_t const next = first + segment.gradient.size();
    // The runs of the strides that it has a part of: what lies in neighbours is left out there.
    std::size_t const begin = std::min(count, first / (stride * sample_run) * sample_run);
    std::size_t const end = std::min(count, divided_up(next, stride * sample_run) * sample_run);
    if (begin < end) {
      launch(call, take_sample<T>, striding_blocks(end - begin), block_threads, stream,
             segment.gradient.data(), segment.residual.data(), first, segment.gradient.size(),
             stride, phase, begin, end, memory);
    }
    first = next;
  }
  double const each = static_cast<double>(size) / static_cast<double>(count);
  auto const rank = static_cast<std::uint64_t>(std::llround(static_cast<double>(k) / each));
  std::uint64_t const place = std::clamp<std::uint64_t>(rank, 1, count);
  search_rank<T>(call, {}, place, memory, stream);
  launch(call, set_sampled<V>, 1, 1, stream, memory.search, k, each, state);
}

}  // namespace

std::size_t threshold_workspace(std::size_t size, std::size_t stride) {
  return search_header + bins * sizeof(std::uint32_t) +
         candidate_capacity(size, stride) * sizeof(std::uint64_t);
}

template <class T>
void add_threshold_kernels(Kernels<T>& table) {
  table.exact_threshold = exact_threshold<T>;
  table.sampled_threshold = sampled_threshold<T>;
}

template void add_threshold_kernels(Kernels<float>&);
template void add_threshold_kernels(Kernels<double>&);
template void add_threshold_kernels(Kernels<Half>&);
template void add_threshold_kernels(Kernels<BFloat16>&);

}  // namespace sparsecomm::cuda
