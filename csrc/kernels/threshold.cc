#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "kernels/bracket.h"
#include "kernels/kernels.h"
#include "kernels/magnitude.h"
#include "kernels/sources.h"

namespace sparsecomm {
namespace {

// Neighbours resemble one another, so on real gradients the relative deviation of a sampled
// threshold's count is about 1.2 / sqrt(rank): within 10% in 99% of cases.
constexpr std::uint64_t minimum_rank = 1250;
// Below this the exact search costs little more.
constexpr std::size_t minimum_stride = 4;

template <class T>
std::size_t total_size(std::span<const Segment<T>> segments) {
  std::size_t total = 0;
  for (Segment<T> const& segment : segments) {
    if (!segment.residual.empty()) {
      require_same_size(segment.gradient.size(), segment.residual.size());
    }
    total += segment.gradient.size();
  }
  return total;
}

constexpr std::size_t sample_part = 4096;
constexpr std::size_t collect_part = std::size_t{1} << 18;

// Fills `out` with the magnitudes of the `count` runs of `run` entries at position(0), position(1),
// ..., which increase by `run` at least.
template <class T, class Position>
void sample_magnitudes(std::span<const Segment<T>> segments, std::size_t count, std::size_t run,
                       Position&& position, std::vector<accumulate_t<T>>& out,
                       Executor const& executor, KernelTable<T> const& kernel) {
  using V = accumulate_t<T>;
  out.resize(count * run);
  std::size_t const runs_of_part = sample_part / run;
  for_each_part(executor, part_count(count, runs_of_part), [&](std::size_t part, std::size_t) {
    auto segment = segments.begin();
    std::size_t first = 0;  // of the segment
    auto const find_segment = [&](std::size_t at) {
      while (at - first >= segment->gradient.size()) first += (segment++)->gradient.size();
    };
    auto const gather = [&](std::span<const std::size_t> starts, std::size_t size,
                            std::span<V> to) {
      kernel.gather_magnitudes(segment->gradient, segment->residual, starts, size, to);
    };
    std::array<std::size_t, sample_part> starts;
    std::size_t const end = std::min(count, (part + 1) * runs_of_part);
    for (std::size_t i = part * runs_of_part; i < end;) {
      auto to = out.begin() + static_cast<std::ptrdiff_t>(i * run);
      std::size_t at = position(i);
      find_segment(at);
      std::size_t inside = 0;
      while (at - first + run <= segment->gradient.size()) {
        starts[inside++] = at - first;
        if (++i == end) break;
        at = position(i);
      }
      if (inside > 0) {
        gather(std::span(starts).first(inside), run, {to, inside * run});
        continue;
      }
      // A run that goes on in other segments.
      for (std::size_t left = run; left > 0;) {
        find_segment(at);
        std::size_t const start = at - first;
        std::size_t const size = std::min(left, segment->gradient.size() - start);
        gather(std::span(&start, 1), size, {to, size});
        to += static_cast<std::ptrdiff_t>(size);
        at += size;
        left -= size;
      }
      ++i;
    }
  });
}

// The bit pattern of rank `rank` >= 1, largest first, and what ranks before it moved to the front.
template <class V>
magnitude_bits_t<V> at_rank(std::span<V> magnitudes, std::size_t rank) {
  std::nth_element(magnitudes.begin(), magnitudes.begin() + (rank - 1), magnitudes.end(),
                   [](V a, V b) { return magnitude_bits(a) > magnitude_bits(b); });
  return magnitude_bits(magnitudes[rank - 1]);
}

template <class V>
Threshold<V> make_threshold(magnitude_bits_t<V> bits, std::uint64_t ties) {
  if (bits == 0) return {};
  // Whatever is not finite passes every threshold.
  if (bits > largest_finite_bits<V>) return {std::numeric_limits<V>::max(), 0};
  return {from_magnitude_bits<V>(bits), ties};
}

template <class V>
std::uint64_t count_equal(std::span<const V> magnitudes, magnitude_bits_t<V> bits) {
  return std::count_if(magnitudes.begin(), magnitudes.end(),
                       [bits](V value) { return magnitude_bits(value) == bits; });
}

// The bit pattern of rank `rank`, and how many are larger.
template <class V>
struct Rank {
  magnitude_bits_t<V> bits;
  std::uint64_t above;
};

template <class V>
Rank<V> rank_by_partition(std::span<V> magnitudes, std::size_t rank) {
  magnitude_bits_t<V> const bits = at_rank(magnitudes, rank);
  return {bits, rank - count_equal<V>(magnitudes.first(rank), bits)};
}

// A magnitude's bin is its highest bits.
template <class V>
constexpr unsigned bin_shift =
    std::bit_width(magnitude_mask<V>) - std::bit_width(histogram_bins - 1);

// The bin that holds rank `rank`, and how many are in larger ones.
struct RankBin {
  std::size_t bin = histogram_bins - 1;
  std::uint64_t above = 0;
};

template <class V>
RankBin bin_of_rank(std::span<const V> magnitudes, std::size_t rank) {
  std::array<std::uint32_t, histogram_bins> counts{};
  for (V const value : magnitudes) ++counts[magnitude_bits(value) >> bin_shift<V>];
  RankBin found;
  while (found.above + counts[found.bin] < rank) found.above += counts[found.bin--];
  return found;
}

// By bins first: partitioning alone mispredicts a branch for every other value.
template <class V>
Rank<V> rank_by_histogram(std::span<V> magnitudes, std::size_t rank) {
  auto const [bin, above] = bin_of_rank<V>(magnitudes, rank);
  std::size_t found = 0;
  for (std::size_t i = 0; i < magnitudes.size(); ++i) {
    V const value = magnitudes[i];
    magnitudes[found] = value;
    found += magnitude_bits(value) >> bin_shift<V> == bin;
  }
  Rank<V> const within = rank_by_partition(magnitudes.first(found), rank - above);
  return {within.bits, above + within.above};
}

// A few of the values say which are surely smaller; one pass drops those.
template <class V>
Rank<V> find_rank(std::span<V> magnitudes, std::size_t rank, std::vector<V>& largest,
                  KernelTable<V> const& kernel) {
  constexpr std::size_t few = 2048;
  std::array<V, few> sample;
  std::size_t const stride = magnitudes.size() / few;
  for (std::size_t i = 0; i < few; ++i) sample[i] = magnitudes[i * stride];
  double const expected =
      static_cast<double>(few) * static_cast<double>(rank) / static_cast<double>(magnitudes.size());
  auto const last = static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 2);
  if (std::size_t const bin = last < few / 4 ? bin_of_rank<V>(sample, last).bin : 0; bin > 0) {
    largest.clear();
    kernel.collect_magnitudes(magnitudes, {}, std::uint64_t{bin} << bin_shift<V>,
                              std::uint64_t{magnitude_mask<V>} + 1, largest);
    if (largest.size() >= rank) return rank_by_histogram<V>(largest, rank);
  }
  return rank_by_histogram(magnitudes, rank);
}

template <class V>
Threshold<V> threshold_at_rank(std::span<V> magnitudes, std::size_t rank) {
  Rank<V> const found = rank_by_partition(magnitudes, rank);
  return make_threshold<V>(found.bits, rank - found.above);
}

template <class T>
class ExactSearch {
  using V = accumulate_t<T>;
  using Bits = magnitude_bits_t<V>;

 public:
  ExactSearch(std::span<const Segment<T>> segments, std::size_t size, std::uint64_t k,
              ThresholdScratch<V>& scratch, Executor const& executor, KernelTable<T> const& kernel)
      : segments_(segments),
        size_(size),
        k_(k),
        scratch_(scratch.magnitudes),
        of_workers_(scratch.of_workers),
        executor_(executor),
        kernel_(kernel) {}

  Threshold<V> run() {
    if (Bracket const bracket = sampled_bracket(segments_, size_, k_, scratch_, executor_, kernel_);
        bracket.narrow) {
      std::uint64_t const above = collect(bracket.low, bracket.high);
      std::uint64_t const found = scratch_.size();
      if (above < k_ && k_ <= above + found) {
        return threshold_at_rank<V>(scratch_, k_ - above);
      }
      if (above < k_ && bracket.low <= 1) return {};  // fewer than k non-zeros
    }
    return by_radix();
  }

 private:
  // In no particular order: a rank does not depend on it.
  std::uint64_t collect(std::uint64_t low, std::uint64_t high) {
    scratch_.clear();
    std::uint64_t above = 0;
    for (Segment<T> const& segment : segments_) {
      auto const collect_part_of = [&](std::size_t begin, std::size_t size, std::vector<V>& out) {
        return kernel_.collect_magnitudes(
            segment.gradient.subspan(begin, size),
            segment.residual.empty() ? segment.residual : segment.residual.subspan(begin, size),
            low, high, out);
      };
      std::size_t const size = segment.gradient.size();
      if (executor_.threads() == 1 || size <= collect_part) {
        above += collect_part_of(0, size, scratch_);
        continue;
      }
      if (of_workers_.size() < executor_.threads()) of_workers_.resize(executor_.threads());
      for (std::vector<V>& magnitudes : of_workers_) magnitudes.clear();
      std::atomic<std::uint64_t> above_parts = 0;
      for_each_part(
          executor_, part_count(size, collect_part), [&](std::size_t part, std::size_t worker) {
            std::size_t const begin = part * collect_part;
            above_parts +=
                collect_part_of(begin, std::min(collect_part, size - begin), of_workers_[worker]);
          });
      above += above_parts;
      for (std::vector<V> const& magnitudes : of_workers_) {
        scratch_.insert(scratch_.end(), magnitudes.begin(), magnitudes.end());
      }
    }
    return above;
  }

  // Narrows the range by the highest bits that are not settled, until few enough are left to
  // collect.
  Threshold<V> by_radix() {
    constexpr unsigned bits_per_pass = std::bit_width(histogram_bins) - 1;
    std::array<std::uint64_t, histogram_bins> counts;
    std::uint64_t low = 0;
    std::uint64_t above = 0;
    unsigned unsettled = std::bit_width(magnitude_mask<V>);
    while (unsettled > 0) {
      unsigned const shift = unsettled - std::min(unsettled, bits_per_pass);
      std::span<std::uint64_t> const bins =
          std::span(counts).first(std::size_t{1} << (unsettled - shift));
      std::fill(bins.begin(), bins.end(), 0);
      for (Segment<T> const& segment : segments_) {
        kernel_.magnitude_histogram(segment.gradient, segment.residual, shift, low >> shift, bins);
      }
      std::size_t bin = bins.size() - 1;
      while (bin > 0 && above + bins[bin] < k_) above += bins[bin--];
      low += std::uint64_t{bin} << shift;
      unsettled = shift;
      if (unsettled > 0 && bins[bin] <= size_ / 16) {
        collect(low, low + (std::uint64_t{1} << shift));
        // Sums of NaNs may differ from pass to pass.
        if (scratch_.empty()) break;
        return threshold_at_rank<V>(scratch_,
                                    std::clamp<std::uint64_t>(k_ - above, 1, scratch_.size()));
      }
    }
    return make_threshold<V>(static_cast<Bits>(low), k_ - above);
  }

  std::span<const Segment<T>> segments_;
  std::size_t size_;
  std::uint64_t k_;
  std::vector<V>& scratch_;
  std::vector<std::vector<V>>& of_workers_;
  Executor const& executor_;
  KernelTable<T> const& kernel_;
};

}  // namespace

template <class T>
Bracket sampled_bracket(std::span<const Segment<T>> segments, std::size_t size, std::uint64_t k,
                        std::vector<accumulate_t<T>>& scratch, Executor const& executor,
                        KernelTable<T> const& kernel) {
  using V = accumulate_t<T>;
  constexpr std::uint64_t end = std::uint64_t{magnitude_mask<V>} + 1;
  if (size < 4096) return {1, end, true, size};
  std::size_t const stride = std::max<std::size_t>(16, size / 32768);
  std::size_t const count = size / stride;
  sample_magnitudes(
      segments, count, 1, [stride](std::size_t i) { return sampled_run(i, stride, 0); }, scratch,
      executor, kernel);
  double const fraction = static_cast<double>(k) / static_cast<double>(size);
  double const rank = fraction * static_cast<double>(count);
  double const margin = 4 * std::sqrt(rank * (1 - fraction)) + 2;
  std::span<V> rest = scratch;
  std::size_t before = 0;
  Bracket bracket{1, end, true, size};
  if (rank - margin >= 1) {
    before = static_cast<std::size_t>(rank - margin);
    bracket.high = std::uint64_t{at_rank(rest, before)} + 1;
    rest = rest.subspan(before);
  }
  if (double const last = std::ceil(rank + margin); last < static_cast<double>(count)) {
    bracket.low =
        std::max<std::uint64_t>(1, at_rank(rest, static_cast<std::size_t>(last) - before));
    double const most = (last + 4 * std::sqrt(last) + 4) * static_cast<double>(stride);
    bracket.most = std::min<std::uint64_t>(size, std::llround(most));
  }
  std::size_t const inside = std::count_if(scratch.begin(), scratch.end(), [&](V value) {
    return magnitude_bits(value) >= bracket.low && magnitude_bits(value) < bracket.high;
  });
  bracket.narrow = static_cast<double>(inside) <= 4 * margin + static_cast<double>(count) / 16;
  return bracket;
}

template <class T>
Threshold<accumulate_t<T>> exact_threshold(std::span<const Segment<T>> segments, std::uint64_t k,
                                           ThresholdScratch<accumulate_t<T>>& scratch,
                                           Executor const& executor, KernelTable<T> const& kernel) {
  require(k >= 1, "a selection of k = ", k, " entries: k must be at least 1");
  std::size_t const size = total_size(segments);
  if (k >= size) return {};
  return ExactSearch<T>(segments, size, k, scratch, executor, kernel).run();
}

std::size_t sampled_stride(std::size_t size, std::uint64_t k, std::size_t stride) {
  if (std::size_t const widest = k / minimum_rank; widest < stride) {
    if (widest < minimum_stride) return 0;
    stride = widest;
  }
  return size / (stride * sample_run) * sample_run < minimum_sample ? 0 : stride;
}

template <class T>
Threshold<accumulate_t<T>> sampled_threshold(std::span<const Segment<T>> segments, std::uint64_t k,
                                             std::size_t stride, std::size_t phase,
                                             ThresholdScratch<accumulate_t<T>>& scratch,
                                             Executor const& executor,
                                             KernelTable<T> const& kernel) {
  using V = accumulate_t<T>;
  require(k >= 1, "a selection of k = ", k, " entries: k must be at least 1");
  require(stride >= 1, "a sample of every stride = ", stride,
          "-th entry: stride must be at least 1");
  std::size_t const size = total_size(segments);
  if (k >= size) return {};
  stride = sampled_stride(size, k, stride);
  if (stride == 0) return exact_threshold(segments, k, scratch, executor, kernel);
  std::size_t const runs = size / (stride * sample_run);
  std::size_t const count = runs * sample_run;

  std::vector<V>& sample = scratch.magnitudes;
  sample_magnitudes(
      segments, runs, sample_run,
      [=](std::size_t i) { return sampled_run(i, stride, phase) * sample_run; }, sample, executor,
      kernel);
  double const each = static_cast<double>(size) / static_cast<double>(count);
  auto const rank = static_cast<std::size_t>(std::llround(static_cast<double>(k) / each));
  std::size_t const place = std::clamp<std::size_t>(rank, 1, count);
  if (scratch.of_workers.empty()) scratch.of_workers.resize(1);
  Rank<V> const found =
      find_rank<V>(sample, place, scratch.of_workers.front(), packed_kernels(kernel));
  double const ties = static_cast<double>(k) - each * static_cast<double>(found.above);
  return make_threshold<V>(found.bits, static_cast<std::uint64_t>(std::max(0.0, ties)));
}

#define SPARSECOMM_INSTANTIATE(T)                                                                 \
  template Bracket sampled_bracket(std::span<const Segment<T>>, std::size_t, std::uint64_t,       \
                                   std::vector<accumulate_t<T>>&, Executor const&,                \
                                   KernelTable<T> const&);                                        \
  template Threshold<accumulate_t<T>> exact_threshold(std::span<const Segment<T>>, std::uint64_t, \
                                                      ThresholdScratch<accumulate_t<T>>&,         \
                                                      Executor const&, KernelTable<T> const&);    \
  template Threshold<accumulate_t<T>> sampled_threshold(                                          \
      std::span<const Segment<T>>, std::uint64_t, std::size_t, std::size_t,                       \
      ThresholdScratch<accumulate_t<T>>&, Executor const&, KernelTable<T> const&)
SPARSECOMM_INSTANTIATE(float);
SPARSECOMM_INSTANTIATE(double);
SPARSECOMM_INSTANTIATE(Half);
SPARSECOMM_INSTANTIATE(BFloat16);
#undef SPARSECOMM_INSTANTIATE

}  // namespace sparsecomm
