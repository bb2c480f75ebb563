#include "collectives/global_cut.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <utility>

#include "kernels/magnitude.h"

namespace sparsecomm {

// `bins` bins of 2^shift bit patterns from `low` up. counts[0] holds what lies below them, counts[1
// + b] bin b, counts[1 + bins] what lies above.
template <class V>
struct GlobalCut<V>::Window {
  std::uint64_t low = 0;
  int shift = 0;
  std::size_t bins = 0;

  std::uint64_t edge(std::size_t bin) const { return low + (std::uint64_t{bin} << shift); }
  // Neither a branch nor a division: there are as many patterns as values.
  std::size_t slot(std::uint64_t pattern) const {
    auto const bin = static_cast<std::int64_t>(pattern - low) >> shift;
    return static_cast<std::size_t>(1 + std::clamp<std::int64_t>(bin, -1, std::int64_t(bins)));
  }
  static Window between(std::uint64_t low, std::uint64_t high, std::size_t bins) {
    std::uint64_t const width = (high - low + bins - 1) / bins;
    return {low, width > 1 ? static_cast<int>(std::bit_width(width - 1)) : 0, bins};
  }
};

template <class V>
std::size_t GlobalCut<V>::bins(std::uint64_t k) {
  return std::clamp<std::size_t>(std::bit_floor(k / 64 + 1), 16, 128);
}

template <class V>
int GlobalCut<V>::exact_rounds(std::uint64_t k) {
  int const bits = std::numeric_limits<V>::digits == 24 ? 31 : 63;
  int const bits_per_round = std::bit_width(bins(k)) - 1;
  return (bits + bits_per_round - 1) / bits_per_round;
}

// Fills counts_ with this rank's counts for the window and totals_ with those of all ranks.
template <class V>
void GlobalCut<V>::count(Channel* channel, Window const& window, std::span<const V> values,
                         std::uint64_t most) {
  counts_.assign(window.bins + 2, 0);
  for (V const value : values) ++counts_[window.slot(magnitude_bits(value))];
  totals_ = counts_;
  if (channel == nullptr) return;
  auto const total = [](std::span<const std::uint32_t> counts) {
    return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  };
  // What arrives may add up to more than 32 bits hold: it must not come out small.
  auto const add = [](std::uint32_t a, std::uint32_t b) { return a + std::min(b, ~a); };
  sum_.run(*channel, Phase::threshold, totals_, add,
           [&](std::span<const std::uint32_t> arrived, int ranks) {
             require<MalformedFrame>(total(arrived) <= most, "a histogram of ", total(arrived),
                                     " values of ", ranks, " ranks, where all have at most ", most);
           });
  require<Error>(total(totals_) <= most, "the ranks' histograms hold ", total(totals_),
                 " values, where there are at most ", most,
                 "; a rank counts values that it does not hold");
}

// Every rank's share, of which none is larger than `most`.
template <class V>
auto GlobalCut<V>::gather(Channel* channel, Share const& own, Share const& most)
    -> std::span<const Share> {
  alone_ = own;
  if (channel == nullptr) return {&alone_, 1};
  return gather_.run(*channel, Phase::threshold, own, [&](int rank, Share const& share) {
    require<MalformedFrame>(share.inside <= most.inside && share.above <= most.above,
                            "counts of rank ", rank, ", ", share.inside, " in a bin of ",
                            most.inside, " and ", share.above, " of ", most.above, " above it");
  });
}

template <class V>
Cut GlobalCut<V>::search(Channel* channel, std::span<const V> values, std::uint64_t k,
                         ThresholdSource source, std::uint64_t most) {
  constexpr std::uint64_t pattern_end = std::uint64_t{1} << (sizeof(V) * 8 - 1);
  int const own = channel != nullptr ? channel->rank() : 0;
  kept_.clear();
  if (source == ThresholdSource::reused) {
    std::uint64_t const low = magnitude_bits(threshold_);
    auto const above = static_cast<std::uint32_t>(
        std::ranges::count_if(values, [&](V value) { return magnitude_bits(value) >= low; }));
    for (Share const& share : gather(channel, {0, above}, {0, static_cast<std::uint32_t>(most)})) {
      kept_.push_back(share.above);
    }
    return {low, low, 0};
  }

  Window window = Window::between(0, pattern_end, bins(k));
  if (source == ThresholdSource::sampled) {
    window =
        Window::between(magnitude_bits(threshold_ / 2), magnitude_bits(threshold_ * 2), bins(k));
  }
  bool estimating = source == ThresholdSource::sampled;
  for (int round = 0; round <= exact_rounds(k) + 1; ++round) {
    count(channel, window, values, most);
    // From the top: the bin in which the k-th largest lies, and how many lie above that bin.
    Share total{0, totals_.back()};
    Share share{0, counts_.back()};
    std::size_t bin = window.bins;  // none so far
    for (std::size_t below = window.bins; total.above < k && below-- > 0;) {
      if (total.above + std::uint64_t{totals_[1 + below]} >= k) {
        bin = below;
        total.inside = totals_[1 + bin];
        share.inside = counts_[1 + bin];
        break;
      }
      total.above += totals_[1 + below];
      share.above += counts_[1 + below];
    }
    bool const all =  // no more than k in all: nothing is cut
        bin == window.bins && total.above < k && total.above + std::uint64_t{totals_.front()} <= k;
    if (all) {
      total.above += totals_.front();
      share.above += counts_.front();
    } else if (bin == window.bins) {
      estimating = false;
      window = Window::between(0, pattern_end, bins(k));
      continue;
    } else if (!estimating && window.shift > 0) {
      window = Window::between(window.edge(bin), window.edge(bin + 1), bins(k));
      continue;
    }

    Cut cut;
    if (!all) {
      threshold_ = from_magnitude_bits<V>(static_cast<magnitude_bits_t<V>>(window.edge(bin)));
      cut = {window.edge(bin), window.edge(bin + 1), 0};
    }
    std::uint64_t open = all ? 0 : k - total.above;  // places left for the bin, lower ranks first
    std::uint64_t inside = 0;
    std::uint64_t above = 0;
    for (Share const& of_rank : gather(channel, share, total)) {
      std::uint64_t const quota = std::min<std::uint64_t>(open, of_rank.inside);
      if (std::cmp_equal(kept_.size(), own)) cut.quota = quota;
      kept_.push_back(quota + of_rank.above);
      open -= quota;
      inside += of_rank.inside;
      above += of_rank.above;
    }
    require<Error>(inside == total.inside && above == total.above, "the ranks count ", inside,
                   " values in the bin of the threshold and ", above,
                   " above it, and their histograms ", total.inside, " and ", total.above,
                   "; a rank counts values that it does not hold");
    return cut;
  }
  throw Error(
      "the ranks' histograms contradict one another; a rank counts values that it does not hold");
}

Cost global_cut_cost(int ranks, std::size_t bins, double rounds) {
  auto const bytes = static_cast<double>((bins + 2) * sizeof(std::uint32_t));
  return packed_allgather_cost(ranks, 2 * sizeof(std::uint32_t)) +
         rounds * census_cost(ranks, bytes);
}

template class GlobalCut<float>;
template class GlobalCut<double>;

}  // namespace sparsecomm
