// Who talks to whom, and who holds what: pure functions, no I/O.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace sparsecomm {

// The rank at a distance from this one, from 0 to size - 1: rank + distance (mod size), or if size
// is a power of two rank ^ distance. In patterns whose distances double, partners then exchange
// with each other, and those that share a host, if they are as many on each and numbered host by
// host, do so in rounds of their own: what a rank holds crosses hosts in log2(hosts) of the rounds.
constexpr int rank_at(int distance, int rank, int size) {
  if (std::has_single_bit(static_cast<unsigned>(size))) return rank ^ distance;
  return (rank + distance) % size;
}
// The rank from which this one is at that distance.
constexpr int rank_before(int distance, int rank, int size) {
  if (std::has_single_bit(static_cast<unsigned>(size))) return rank ^ distance;
  return (rank - distance + size) % size;
}

// Rounds of a Bruck (dissemination) allgather: ceil(log2 size).
constexpr int bruck_rounds(int size) { return std::bit_width(static_cast<unsigned>(size - 1)); }

// One round of a Bruck allgather. A rank holds the blocks of rank_at(0), rank_at(1), ...: it sends
// the first `count` to `destination` and receives as many from `source`, which become
// [first, first + count). If size is a power of two this is recursive doubling.
struct BruckRound {
  int source;
  int destination;
  int first;
  int count;
};
template <class F>
constexpr void for_each_bruck_round(int rank, int size, F&& round) {
  for (int first = 1; first < size; first *= 2) {
    round(BruckRound{.source = rank_at(first, rank, size),
                     .destination = rank_before(first, rank, size),
                     .first = first,
                     .count = std::min(first, size - first)});
  }
}

// Rotated destinations (Ok-Topk Figure 2b): in step s = 1 .. size-1 a rank sends to rank + s and
// receives from rank - s, so that no rank is everyone's target at once.
constexpr int rotated_destination(int rank, int step, int size) { return (rank + step) % size; }
constexpr int rotated_source(int rank, int step, int size) { return (rank - step + size) % size; }

// Part `part` of `extent` split into `parts` ranges whose sizes differ by at most one: it starts
// here and ends where part + 1 starts.
constexpr std::uint64_t even_split(std::uint64_t extent, std::uint64_t parts, std::uint64_t part) {
  return extent / parts * part + std::min(part, extent % parts);
}

// The positions [first, last).
struct Region {
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  constexpr std::uint64_t extent() const { return last - first; }
};

constexpr Region even_region(std::uint64_t extent, int parts, int part) {
  return {even_split(extent, parts, part), even_split(extent, parts, part + 1)};
}
// All of them, for whom even_region() would be asked often. Keeps the vector's storage.
inline std::span<const Region> even_regions(std::uint64_t extent, int parts,
                                            std::vector<Region>& regions) {
  regions.resize(parts);
  for (int part = 0; part < parts; ++part) regions[part] = even_region(extent, parts, part);
  return regions;
}

// Recursive doubling among the first core_ranks(size) ranks, the largest power of two; rank
// core_ranks(size) + i folds its contribution into rank i's before and gets the result from it
// afterwards (Thakur et al. 2005).
constexpr int core_ranks(int size) {
  return static_cast<int>(std::bit_floor(static_cast<unsigned>(size)));
}
// How many ranks' contributions the core ranks [first, first + count) hold after folding.
constexpr int folded_ranks(int first, int count, int size) {
  return count + std::clamp(size - core_ranks(size) - first, 0, count);
}

// One message of the balancing step: `count` entries, `offset` into the sender's own entries.
struct Transfer {
  int source;
  int destination;
  std::uint64_t offset;
  std::uint64_t count;
};

// Moves entries between ranks so that rank j ends with an even share of the sequence formed by all
// ranks' entries in rank order, which keeps the sequence sorted (Ok-Topk section 3.1.2). Ordered by
// source, then destination; a transfer of a rank to itself is what it keeps. At most 2 size - 1
// transfers.
std::vector<Transfer> plan_balance(std::span<const std::uint64_t> counts);

// True when the largest share exceeds `factor` times the average.
bool needs_balance(std::span<const std::uint64_t> counts, double factor);

}  // namespace sparsecomm
