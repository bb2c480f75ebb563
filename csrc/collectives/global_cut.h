// The k largest of values that are spread over the ranks, found without moving the values:
// histograms of their magnitudes are summed over the ranks, all draw the same conclusion from the
// sums, and then each says how many of its values that concerns.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collectives/figures.h"
#include "compress/schedule.h"

namespace sparsecomm {

// What one rank keeps of its values: those whose magnitude's bit pattern is at least `high`, and
// the first `quota` of those in [low, high).
struct Cut {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  std::uint64_t quota = 0;
};

template <class V>
class GlobalCut {
 public:
  // Bins of one histogram: more for a larger k, so that control data stays a small part of what is
  // sent.
  static std::size_t bins(std::uint64_t k);
  // Histograms that an exact threshold takes at most.
  static int exact_rounds(std::uint64_t k);

  // Returns this rank's cut, such that over all ranks exactly min(k, all values) are kept
  // (`reused`: those at or above the former threshold). exact: the kept ones are the k largest,
  // ties to the lower rank, then the lower position. sampled: to the resolution of a bin
  // (1/64 of an octave with 128 bins), within an octave of the former threshold; where the k-th has
  // left that window the exact search takes over. Afterwards kept() holds the count kept by each
  // rank. All ranks together have at most `most` values, fewer than 2^32; who claims more is
  // PeerInvalid. ceil(log2 P) messages for each histogram, and as many for the counts.
  Cut run(Channel& channel, std::span<const V> values, std::uint64_t k, ThresholdSource source,
          std::uint64_t most) {
    return search(&channel, values, k, source, most);
  }
  // The same where every rank holds all values: nothing is sent.
  Cut run_everywhere(std::span<const V> values, std::uint64_t k, ThresholdSource source) {
    return search(nullptr, values, k, source, values.size());
  }

  std::span<const std::uint64_t> kept() const { return kept_; }

  // The magnitude of the last cut; 0 before the first.
  double threshold() const { return static_cast<double>(threshold_); }
  void load_threshold(double threshold) { threshold_ = static_cast<V>(threshold); }

 private:
  struct Window;
  // What a rank has in the bin that is cut, and above it.
  struct Share {
    std::uint32_t inside = 0;
    std::uint32_t above = 0;
  };
  Cut search(Channel* channel, std::span<const V> values, std::uint64_t k, ThresholdSource source,
             std::uint64_t most);
  void count(Channel* channel, Window const& window, std::span<const V> values, std::uint64_t most);
  std::span<const Share> gather(Channel* channel, Share const& own, Share const& most);

  V threshold_ = 0;
  std::vector<std::uint64_t> kept_;
  std::vector<std::uint32_t> counts_, totals_;
  CensusAllreduce<std::uint32_t> sum_;
  PackedAllgather<Share> gather_;
  Share alone_;
};

// Of one search that sums `rounds` histograms, on the average.
Cost global_cut_cost(int ranks, std::size_t bins, double rounds);

}  // namespace sparsecomm
