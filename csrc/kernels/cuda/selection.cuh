// Selection in index order, one pass over memory. The rule is that of kernels/selection.h with
// ranks in place of a running count: of the entries that pass, a tie counts while fewer ties than
// wanted stand before it, and an entry is taken while its rank is below the limit.
#pragma once

#include <type_traits>

#include "kernels/cuda/look_back.cuh"
#include "kernels/magnitude.h"

namespace sparsecomm::cuda {

// A warp takes `tile_items` runs of 32 neighbours: loads are coalesced whatever their alignment,
// and a run's order is that of its lanes.
inline constexpr unsigned tile_items = 16;
inline constexpr unsigned tile_entries = block_threads * tile_items;

// Sources: load() reads entry i, store() writes back what it is when it stays, take() when it is
// packed.
template <class T>
struct ReadSource {
  using V = accumulate_t<T>;
  struct Entry {
    V value{};
  };

  T const* x;

  __device__ Entry load(std::size_t i) const { return {widened(x[i])}; }
  __device__ void store(std::size_t, Entry const&) const {}
  __device__ void take(std::size_t) const {}
};

template <class T>
struct FeedbackSource {
  using V = accumulate_t<T>;
  struct Entry {
    V value{};
  };

  ErrorFeedbackArguments<T> to;

  __device__ Entry load(std::size_t i) const {
    return {to.residual[i] + to.scale * widened(to.gradient[i])};
  }
  __device__ void store(std::size_t i, Entry const& entry) const {
    to.residual[i] = entry.value;
    to.gradient[i] = T{};
  }
  __device__ void take(std::size_t i) const { to.residual[i] = 0; }
};

template <class T>
struct MomentumSource {
  using V = accumulate_t<T>;
  struct Entry {
    V value{}, momentum{};
  };

  ErrorFeedbackArguments<T> to;

  __device__ Entry load(std::size_t i) const {
    V const g = to.scale * widened(to.gradient[i]);
    V const u = to.momentum_factor * to.momentum[i] + g;
    V const step = to.nesterov ? g + to.momentum_factor * u : u;
    return {to.residual[i] + step, u};
  }
  __device__ void store(std::size_t i, Entry const& entry) const {
    to.residual[i] = entry.value;
    to.momentum[i] = entry.momentum;
    to.gradient[i] = T{};
  }
  __device__ void take(std::size_t i) const {
    to.residual[i] = 0;
    if (to.mask_momentum) to.momentum[i] = 0;
  }
};

template <class V>
struct SelectionShared {
  unsigned tile;
  unsigned counts[block_warps];  // larger entries, and ties from bit 16 on
  magnitude_bits_t<V> largest[block_warps];
  bool not_finite[block_warps];
  Counts before;
};

template <class Source>
__global__ void __launch_bounds__(block_threads)
    select_tiles(Source source, std::size_t size, std::uint32_t first_index, bool all,
                 SelectionState* state, Packed<typename Source::V> out, TileWords words) {
  using V = typename Source::V;
  using Bits = magnitude_bits_t<V>;
  SPARSECOMM_SHARED(SelectionShared<V>, shared);
  unsigned const lane = threadIdx.x % warp_lanes;
  unsigned const warp = threadIdx.x / warp_lanes;

  if (threadIdx.x == 0) shared.tile = atomicAdd(words.next, 1u);
  __syncthreads();
  unsigned const tile = shared.tile;
  std::size_t const begin =
      std::size_t{tile} * tile_entries + warp * (warp_lanes * tile_items) + lane;
  auto const magnitude = static_cast<Bits>(state->magnitude);
  std::uint64_t const ties = state->ties;

  typename Source::Entry entries[tile_items];
#pragma unroll
  for (unsigned j = 0; j < tile_items; ++j) {
    std::size_t const i = begin + j * warp_lanes;
    if (i < size) entries[j] = source.load(i);
  }
  unsigned larger = 0;  // bit j: of item j
  unsigned tied = 0;
  Bits largest = 0;
  bool not_finite = false;
#pragma unroll
  for (unsigned j = 0; j < tile_items; ++j) {
    std::size_t const i = begin + j * warp_lanes;
    if (i >= size) continue;
    source.store(i, entries[j]);
    Bits const bits = magnitude_bits(entries[j].value);
    if (bits > largest_finite_bits<V>) {
      not_finite = true;
    } else if (bits > largest) {
      largest = bits;
    }
    if (all || bits > magnitude) {
      larger |= 1u << j;
    } else if (ties > 0 && bits == magnitude) {
      tied |= 1u << j;
    }
  }

  unsigned const counts =
      warp_sum(static_cast<unsigned>(__popc(larger)) | static_cast<unsigned>(__popc(tied)) << 16);
  largest = warp_max(largest);
  not_finite = __ballot_sync(all_lanes, not_finite) != 0;
  if (lane == 0) {
    shared.counts[warp] = counts;
    shared.largest[warp] = largest;
    shared.not_finite[warp] = not_finite;
  }
  __syncthreads();

  if (warp == 0) {
    Counts own{};
    for (unsigned w = 0; w < block_warps; ++w) {
      own.larger += shared.counts[w] & 0xffffu;
      own.ties += shared.counts[w] >> 16;
      largest = shared.largest[w] > largest ? shared.largest[w] : largest;
      not_finite = not_finite || shared.not_finite[w];
    }
    Counts carry{};
    if (tile == 0) carry = {state->larger_met, state->ties_met};
    Counts const before = look_back(words, tile, own, carry);
    if (lane == 0) {
      shared.before = before;
      // Only the first tile reads what the last one writes, which waits for the first.
      if (tile == gridDim.x - 1) {
        state->larger_met = before.larger + own.larger;
        state->ties_met = before.ties + own.ties;
      }
      if (largest > 0)
        atomicMax(counter(&state->largest), static_cast<unsigned long long>(largest));
      if (not_finite) state->not_finite = 1;
    }
  }
  __syncthreads();
  if (counts == 0) return;  // of this warp

  Counts before = shared.before;
  for (unsigned w = 0; w < warp; ++w) {
    before.larger += shared.counts[w] & 0xffffu;
    before.ties += shared.counts[w] >> 16;
  }
  std::uint64_t const limit = state->limit;
  unsigned const lanes_before = (1u << lane) - 1;
  unsigned ties_taken = 0;
#pragma unroll
  for (unsigned j = 0; j < tile_items; ++j) {
    unsigned const larger_lanes = __ballot_sync(all_lanes, (larger >> j & 1u) != 0);
    unsigned const tied_lanes = __ballot_sync(all_lanes, (tied >> j & 1u) != 0);
    if ((larger_lanes | tied_lanes) == 0) continue;
    std::uint64_t const ties_before = before.ties + __popc(tied_lanes & lanes_before);
    std::uint64_t const rank = before.larger + __popc(larger_lanes & lanes_before) +
                               (ties_before < ties ? ties_before : ties);
    bool const tie = (tied >> j & 1u) != 0;
    bool const passes = (larger >> j & 1u) != 0 || (tie && ties_before < ties);
    if (passes && rank < limit) {
      std::size_t const i = begin + j * warp_lanes;
      out.indices[rank] = first_index + static_cast<std::uint32_t>(i);
      out.values[rank] = entries[j].value;
      source.take(i);
      ties_taken += tie ? 1 : 0;
    }
    before.larger += __popc(larger_lanes);
    before.ties += __popc(tied_lanes);
  }
  ties_taken = warp_sum(ties_taken);
  if (lane == 0 && ties_taken > 0) {
    atomicAdd(counter(&state->ties_taken), static_cast<unsigned long long>(ties_taken));
  }
}

template <class Source>
void run_selection(char const* call, Source const& source, std::size_t size,
                   std::uint32_t first_index, bool all, SelectionState* state,
                   Packed<typename Source::V> out, void* workspace, Stream stream) {
  require(size <= (std::uint64_t{1} << 32) - first_index, call, ": entries ", first_index, " to ",
          first_index + std::uint64_t{size}, " do not all have 32-bit indices");
  if (size == 0) return;
  std::size_t const tiles = divided_up(size, tile_entries);
  TileWords const words = prepare_look_back(call, workspace, tiles, stream);
  launch(call, select_tiles<Source>, tiles, block_threads, stream, source, size, first_index, all,
         state, out, words);
}

}  // namespace sparsecomm::cuda
