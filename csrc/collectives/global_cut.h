// The k largest of values that are spread over the ranks, found without moving the values: each
// rank sends a histogram of its magnitudes, and all ranks draw the same conclusion from the same
// histograms.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collectives/channel.h"
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
  // rank.
  Cut run(Channel& channel, std::span<const V> values, std::uint64_t k, ThresholdSource source) {
    return search(&channel, values, k, source);
  }
  // The same where every rank holds all values: nothing is sent.
  Cut run_everywhere(std::span<const V> values, std::uint64_t k, ThresholdSource source) {
    return search(nullptr, values, k, source);
  }

  std::span<const std::uint64_t> kept() const { return kept_; }

  // The magnitude of the last cut; 0 before the first.
  double threshold() const { return static_cast<double>(threshold_); }
  void load_threshold(double threshold) { threshold_ = static_cast<V>(threshold); }

 private:
  struct Window;
  Cut search(Channel* channel, std::span<const V> values, std::uint64_t k, ThresholdSource source);
  void count(Window const& window, std::span<const V> values);
  void exchange(Channel& channel, Window const& window, std::span<const V> values);

  V threshold_ = 0;
  std::vector<std::uint64_t> kept_;
  std::vector<std::uint32_t> counts_, everyone_;
  std::vector<std::byte> frame_;
  FrameAllgather gather_;
};

}  // namespace sparsecomm
