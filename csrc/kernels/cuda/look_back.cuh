// How many entries the tiles before this one have selected, in one pass. A tile publishes its own
// counts at once and adds up those of its predecessors while these work on. Source: Merrill,
// Garland, "Single-pass parallel prefix scan with decoupled look-back", NVIDIA 2016.
#pragma once

#include "kernels/cuda/device.h"

namespace sparsecomm::cuda {

struct Counts {
  std::uint64_t larger, ties;
};

// A count of up to 62 bits and what it counts, in one word, so that both arrive together.
inline constexpr std::uint64_t status_own = 1;     // of the tile alone
inline constexpr std::uint64_t status_prefix = 2;  // of all tiles up to it
inline constexpr std::uint64_t status_flags = 3;

struct TileWords {
  std::uint32_t* next;    // the tile that the next block takes
  std::uint64_t* larger;  // [tile]
  std::uint64_t* ties;    // [tile]
};

inline std::size_t look_back_bytes(std::size_t tiles) {
  return 16 + 2 * tiles * sizeof(std::uint64_t);
}

// All words zero, as look_back needs them.
inline TileWords prepare_look_back(char const* call, void* workspace, std::size_t tiles,
                                   Stream stream) {
  require_success(cudaMemsetAsync(workspace, 0, look_back_bytes(tiles), stream), call);
  auto* const words = reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(workspace) + 16);
  return {static_cast<std::uint32_t*>(workspace), words, words + tiles};
}

__device__ inline void publish(TileWords words, unsigned tile, Counts counts, std::uint64_t flag) {
  *static_cast<std::uint64_t volatile*>(words.larger + tile) = counts.larger << 2 | flag;
  *static_cast<std::uint64_t volatile*>(words.ties + tile) = counts.ties << 2 | flag;
}

// By one whole warp of the block that has taken `tile`; a block takes tiles in order, so that every
// predecessor runs or has run. `carry`: what stood before the first tile.
__device__ inline Counts look_back(TileWords words, unsigned tile, Counts own, Counts carry) {
  unsigned const lane = threadIdx.x % warp_lanes;
  Counts before = carry;
  if (tile > 0) {
    before = {};
    if (lane == 0) publish(words, tile, own, status_own);
    auto last = static_cast<std::int64_t>(tile) - 1;
    for (bool found = false; !found; last -= warp_lanes) {
      std::int64_t const at = last - lane;
      std::uint64_t larger = 0;
      std::uint64_t ties = 0;
      unsigned wanted = 0;
      unsigned nearest = 0;
      for (bool ready = false; !ready;) {
        if (at >= 0) {
          larger = *static_cast<std::uint64_t const volatile*>(words.larger + at);
          ties = *static_cast<std::uint64_t const volatile*>(words.ties + at);
        }
        // The two words of a tile are of one kind but for a moment.
        bool const whole = (larger & status_flags) == (ties & status_flags);
        unsigned const known =
            __ballot_sync(all_lanes, at < 0 || (whole && (larger & status_flags) != 0));
        unsigned const prefixes =
            __ballot_sync(all_lanes, at >= 0 && whole && (larger & status_flags) == status_prefix);
        found = prefixes != 0;
        nearest =
            found ? static_cast<unsigned>(__ffs(static_cast<int>(prefixes))) - 1 : warp_lanes - 1;
        wanted = all_lanes >> (warp_lanes - 1 - nearest);
        ready = (known & wanted) == wanted;
        if (!ready) __nanosleep(20);
      }
      bool const counts = at >= 0 && lane <= nearest;
      before.larger += warp_sum(counts ? larger >> 2 : 0);
      before.ties += warp_sum(counts ? ties >> 2 : 0);
    }
  }
  if (lane == 0) {
    publish(words, tile, {before.larger + own.larger, before.ties + own.ties}, status_prefix);
  }
  return before;
}

}  // namespace sparsecomm::cuda
