#include "compress/device_threshold.h"

#include <algorithm>

#include "kernels/gaussian.h"

namespace sparsecomm {
namespace {

template <class T>
std::uint64_t total_size(std::span<const Segment<T>> segments) {
  std::uint64_t total = 0;
  for (Segment<T> const& segment : segments) total += segment.gradient.size();
  return total;
}

}  // namespace

template <class T>
Threshold<accumulate_t<T>> DeviceThreshold<T>::exact(Segments segments, std::uint64_t k) {
  return find(segments, total_size(segments), k, 0, 0);
}

template <class T>
Threshold<accumulate_t<T>> DeviceThreshold<T>::sampled(Segments segments, std::uint64_t k,
                                                       std::size_t stride, std::size_t phase) {
  std::uint64_t const size = total_size(segments);
  return find(segments, size, k, k < size ? sampled_stride(size, k, stride) : 0, phase);
}

// Without a stride, the exact one.
template <class T>
Threshold<accumulate_t<T>> DeviceThreshold<T>::find(Segments segments, std::uint64_t size,
                                                    std::uint64_t k, std::size_t stride,
                                                    std::size_t phase) {
  if (k >= size) return {};
  OnDevice const on(queue_);
  cuda::Library const& library = *queue_.library;
  cuda::SelectionState* const state = state_.take(queue_, 1);
  library.begin({}, state, queue_.stream);
  void* const workspace = workspace_.take(queue_, library.threshold_workspace(size, stride));
  auto const& kernels = library.kernels<T>();
  if (stride == 0) {
    kernels.exact_threshold(segments, k, state, workspace, queue_.stream);
  } else {
    kernels.sampled_threshold(segments, k, stride, phase, state, workspace, queue_.stream);
  }
  cuda::SelectionState const found = fetch(queue_, state, host_state_);
  return {from_magnitude_bits<V>(static_cast<magnitude_bits_t<V>>(found.magnitude)), found.ties};
}

template <class T>
Threshold<accumulate_t<T>> DeviceThreshold<T>::gaussian(Segments segments, std::uint64_t k) {
  std::uint64_t const size = total_size(segments);
  if (k >= size) return {};
  OnDevice const on(queue_);
  cuda::Library const& library = *queue_.library;
  auto const& kernels = library.kernels<T>();
  void* const workspace = workspace_.take(queue_, library.threshold_workspace(size, 0));
  Moments* const moments = moments_.take(queue_, 1);
  Counts* const counts = counts_.take(queue_, 1);
  library.runtime.zero(moments, sizeof(Moments), queue_.stream);
  library.runtime.zero(counts, sizeof(Counts), queue_.stream);
  for (Segment<T> const& segment : segments) {
    kernels.moments(segment.gradient.data(), segment.residual.data(), segment.gradient.size(),
                    moments, workspace, queue_.stream);
  }
  GaussianBins const bins = gaussian_bins<V>(fetch(queue_, moments, host_moments_), size, k);
  for (Segment<T> const& segment : segments) {
    kernels.magnitude_histogram(segment.gradient.data(), segment.residual.data(),
                                segment.gradient.size(), bins.shift, bins.base, counts->data(),
                                queue_.stream);
  }
  std::array<std::uint64_t, histogram_bins> wide;
  std::ranges::copy(fetch(queue_, counts, host_counts_), wide.begin());
  return gaussian_cut<V>(bins, wide, k);
}

template class DeviceThreshold<float>;
template class DeviceThreshold<double>;
template class DeviceThreshold<Half>;
template class DeviceThreshold<BFloat16>;

}  // namespace sparsecomm
