#include "collectives/global_cut.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "kernels/magnitude.h"

namespace sparsecomm {

// `bins` bins of `width` bit patterns from `low` up. counts[0] holds what lies above them, counts[1
// + b] bin b, counts[1 + bins] what lies below.
template <class V>
struct GlobalCut<V>::Window {
  std::uint64_t low = 0;
  std::uint64_t width = 1;
  std::size_t bins = 0;

  std::uint64_t edge(std::size_t bin) const { return low + bin * width; }
  std::size_t slot(std::uint64_t pattern) const {
    if (pattern < low) return bins + 1;
    std::uint64_t const bin = (pattern - low) / width;
    return bin < bins ? 1 + bin : 0;
  }
  static Window between(std::uint64_t low, std::uint64_t high, std::size_t bins) {
    std::uint64_t const span = high - low;
    return {low, std::max<std::uint64_t>(1, (span + bins - 1) / bins), bins};
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

template <class V>
void GlobalCut<V>::count(Window const& window, std::span<const V> values) {
  counts_.assign(window.bins + 2, 0);
  for (V const value : values) ++counts_[window.slot(magnitude_bits(value))];
}

// Fills everyone_ with all ranks' counts for the window, [rank][slot].
template <class V>
void GlobalCut<V>::exchange(Channel& channel, Window const& window, std::span<const V> values) {
  count(window, values);
  std::size_t const slots = counts_.size();
  auto const payload = std::as_bytes(std::span(counts_));
  frame_.resize(header_bytes + payload.size());
  encode_bytes(channel.operation(), payload, frame_);
  auto const frames = gather_.run(channel, Phase::threshold, frame_, frame_.size());
  everyone_.resize(slots * channel.size());
  for (int rank = 0; rank < channel.size(); ++rank) {
    channel.decode_from(rank, [&] {
      require<MalformedFrame>(frames[rank].values.size() == payload.size(), "a histogram of ",
                              frames[rank].values.size(), " bytes is not one of ", payload.size());
    });
    std::memcpy(&everyone_[rank * slots], frames[rank].values.data(), payload.size());
  }
}

template <class V>
Cut GlobalCut<V>::search(Channel* channel, std::span<const V> values, std::uint64_t k,
                         ThresholdSource source) {
  constexpr std::uint64_t pattern_end = std::uint64_t{1} << (sizeof(V) * 8 - 1);
  int const size = channel != nullptr ? channel->size() : 1;
  int const own = channel != nullptr ? channel->rank() : 0;
  kept_.assign(size, 0);

  Window window = Window::between(0, pattern_end, bins(k));
  if (source == ThresholdSource::reused) {
    window = {magnitude_bits(threshold_), pattern_end, 0};
  } else if (source == ThresholdSource::sampled) {
    window = Window::between(magnitude_bits(threshold_ / 2), magnitude_bits(threshold_ * 2) + 1,
                             bins(k));
  }
  bool estimating = source == ThresholdSource::sampled;
  for (int round = 0; round <= exact_rounds(k) + 1; ++round) {
    if (channel != nullptr) {
      exchange(*channel, window, values);
    } else {
      count(window, values);
      everyone_ = counts_;
    }
    std::size_t const slots = window.bins + 2;
    auto const count = [&](int rank, std::size_t slot) -> std::uint64_t {
      return everyone_[rank * slots + slot];
    };
    auto const total = [&](std::size_t slot) {
      std::uint64_t sum = 0;
      for (int rank = 0; rank < size; ++rank) sum += count(rank, slot);
      return sum;
    };
    if (source == ThresholdSource::reused) {
      for (int rank = 0; rank < size; ++rank) kept_[rank] = count(rank, 0);
      return {window.low, window.low, 0};
    }

    // From the top: the bin in which the k-th largest lies, and how many lie above that bin.
    std::uint64_t above = total(0);
    std::size_t bin = window.bins;  // none so far
    for (std::size_t below = window.bins; above < k && below-- > 0;) {
      std::uint64_t const in_bin = total(1 + below);
      if (above + in_bin >= k) {
        bin = below;
        break;
      }
      above += in_bin;
    }
    if (bin == window.bins) {
      if (above < k &&
          above + total(window.bins + 1) <= k) {  // no more than k in all: nothing is cut
        for (int rank = 0; rank < size; ++rank) {
          for (std::size_t slot = 0; slot < slots; ++slot) kept_[rank] += count(rank, slot);
        }
        return {};
      }
      estimating = false;
      window = Window::between(0, pattern_end, bins(k));
      continue;
    }
    if (!estimating && window.width > 1) {
      window = Window::between(window.edge(bin), window.edge(bin + 1), bins(k));
      continue;
    }

    threshold_ = from_magnitude_bits<V>(static_cast<magnitude_bits_t<V>>(window.edge(bin)));
    Cut cut{window.edge(bin), window.edge(bin + 1), 0};
    std::uint64_t open = k - above;  // places left for the bin, the lower ranks first
    for (int rank = 0; rank < size; ++rank) {
      std::uint64_t const quota = std::min(open, count(rank, 1 + bin));
      open -= quota;
      kept_[rank] = quota + count(rank, 0);
      for (std::size_t higher = bin + 1; higher < window.bins; ++higher) {
        kept_[rank] += count(rank, 1 + higher);
      }
      if (rank == own) cut.quota = quota;
    }
    return cut;
  }
  throw Error(
      "the ranks' histograms contradict one another; a rank counts values that it does not hold");
}

template class GlobalCut<float>;
template class GlobalCut<double>;

}  // namespace sparsecomm
