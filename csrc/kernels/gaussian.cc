#include "kernels/gaussian.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "kernels/magnitude.h"

namespace sparsecomm {

double upper_normal_quantile(double probability) {
  require(probability > 0 && probability <= 0.5, "probability = ", probability,
          " is not in (0, 1/2]");
  // Newton's method on the logarithm of the tail, which is concave: from the second step on it
  // approaches from above.
  double z = 0;
  for (int round = 0; round < 64; ++round) {
    double const tail = std::erfc(z / std::numbers::sqrt2) / 2;
    double const density = std::exp(-z * z / 2) / std::sqrt(2 * std::numbers::pi);
    double const step = std::log(tail / probability) * tail / density;
    z += step;
    if (std::abs(step) <= 1e-14 * (1 + z)) break;
  }
  return z;
}

template <class V>
GaussianBins gaussian_bins(Moments const& moments, std::size_t size, std::uint64_t k) {
  auto const count = static_cast<double>(size);
  double const mean = moments.sum / count;
  double const deviation = std::sqrt(std::max(0.0, moments.squares / count - mean * mean));
  double const quantile = upper_normal_quantile(static_cast<double>(k) / count / 2);
  double const estimate = std::abs(mean) + quantile * deviation;
  // Sums that overflow leave no estimate: then from the top down.
  magnitude_bits_t<V> const start =
      std::isfinite(estimate) ? magnitude_bits(static_cast<V>(estimate)) : largest_finite_bits<V>;

  // 64 bins an octave: 24 octaves below the estimate, and 8 above it, beyond which by Chebyshev's
  // inequality hardly any entry lies.
  constexpr unsigned shift = std::numeric_limits<V>::digits - 1 - 6;
  constexpr std::uint64_t above = 8 * 64;
  std::uint64_t const top = (std::uint64_t{start} >> shift) + above;
  std::uint64_t const base = top < histogram_bins ? 0 : top + 1 - histogram_bins;
  return {shift, base, (std::uint64_t{start} >> shift) - base};
}

template <class V>
Threshold<V> gaussian_cut(GaussianBins const& bins, std::span<const std::uint64_t> counts,
                          std::uint64_t k) {
  std::uint64_t bin = bins.start;
  std::uint64_t passing = 0;
  for (std::size_t i = bin; i < counts.size(); ++i) passing += counts[i];
  while (4 * passing <= 3 * k && bin > 0) passing += counts[--bin];
  if (4 * passing <= 3 * k) return {};
  std::uint64_t const lowest = (bins.base + bin) << bins.shift;
  if (lowest == 0) return {};
  return {from_magnitude_bits<V>(static_cast<magnitude_bits_t<V>>(lowest - 1)), 0};
}

template <class T>
Threshold<accumulate_t<T>> gaussian_threshold(std::span<const Segment<T>> segments,
                                              std::uint64_t k) {
  using V = accumulate_t<T>;
  require(k >= 1, "a selection of k = ", k, " entries: k must be at least 1");
  Moments moments;
  std::size_t size = 0;
  for (Segment<T> const& segment : segments) {
    moments += kernels<T>().moments(segment.gradient, segment.residual);
    size += segment.gradient.size();
  }
  if (k >= size) return {};
  GaussianBins const bins = gaussian_bins<V>(moments, size, k);
  std::array<std::uint64_t, histogram_bins> counts{};
  for (Segment<T> const& segment : segments) {
    kernels<T>().magnitude_histogram(segment.gradient, segment.residual, bins.shift, bins.base,
                                     counts);
  }
  return gaussian_cut<V>(bins, counts, k);
}

template GaussianBins gaussian_bins<float>(Moments const&, std::size_t, std::uint64_t);
template GaussianBins gaussian_bins<double>(Moments const&, std::size_t, std::uint64_t);
template Threshold<float> gaussian_cut(GaussianBins const&, std::span<const std::uint64_t>,
                                       std::uint64_t);
template Threshold<double> gaussian_cut(GaussianBins const&, std::span<const std::uint64_t>,
                                        std::uint64_t);
template Threshold<float> gaussian_threshold(std::span<const Segment<float>>, std::uint64_t);
template Threshold<double> gaussian_threshold(std::span<const Segment<double>>, std::uint64_t);
template Threshold<float> gaussian_threshold(std::span<const Segment<Half>>, std::uint64_t);
template Threshold<float> gaussian_threshold(std::span<const Segment<BFloat16>>, std::uint64_t);

}  // namespace sparsecomm
