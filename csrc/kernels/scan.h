// What the scalar and the SIMD kernels share in reading magnitudes: the entry at a time rules.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "kernels/kernels.h"
#include "kernels/magnitude.h"
#include "kernels/sources.h"

namespace sparsecomm {

inline void require_bins(std::size_t bins) {
  require(bins <= histogram_bins, "a histogram has at most ", histogram_bins, " bins, not ", bins);
}

template <class T>
bool all_finite_range(std::span<const T> x) {
  for (T const value : x) {
    if (magnitude_bits(widen(value)) > largest_finite_bits<accumulate_t<T>>) return false;
  }
  return true;
}

template <class Source>
void count_range(Source const& source, std::size_t begin, std::size_t end, unsigned shift,
                 std::uint64_t base, std::span<std::uint64_t> counts) {
  for (std::size_t i = begin; i < end; ++i) {
    std::uint64_t const bin = std::uint64_t{magnitude_bits(source.value(i))} >> shift;
    if (bin >= base && bin - base < counts.size()) ++counts[bin - base];
  }
}

template <class Source, class V>
std::uint64_t collect_range(Source const& source, std::size_t begin, std::size_t end,
                            std::uint64_t low, std::uint64_t high, std::vector<V>& out) {
  std::uint64_t above = 0;
  for (std::size_t i = begin; i < end; ++i) {
    magnitude_bits_t<V> const bits = magnitude_bits(source.value(i));
    if (bits >= high) {
      ++above;
    } else if (bits >= low) {
      out.push_back(from_magnitude_bits<V>(bits));
    }
  }
  return above;
}

class MomentLanes {
 public:
  std::array<double, moment_lanes> sum{}, squares{};

  template <class Source>
  void add_range(Source const& source, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      auto const value = static_cast<double>(source.value(i));
      sum[i % moment_lanes] += value;
      squares[i % moment_lanes] += value * value;
    }
  }
  Moments total() const { return {folded(sum), folded(squares)}; }

 private:
  static double folded(std::array<double, moment_lanes> lanes) {
    for (std::size_t half = moment_lanes / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
};

}  // namespace sparsecomm
