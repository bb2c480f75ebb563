// The thresholds of kernels/kernels.h, of a gradient in a CUDA device's memory.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "compress/device_queue.h"
#include "kernels/kernels.h"

namespace sparsecomm {

// Results are those of the functions of the same names, but that the sums behind a gaussian
// threshold are rounded otherwise. Each waits for the device.
template <class T>
class DeviceThreshold {
 public:
  using V = accumulate_t<T>;
  using Segments = std::span<const Segment<T>>;

  // The queue lives as long as this.
  explicit DeviceThreshold(DeviceQueue const& queue) : queue_(queue) {}

  Threshold<V> exact(Segments segments, std::uint64_t k);
  Threshold<V> sampled(Segments segments, std::uint64_t k, std::size_t stride, std::size_t phase);
  Threshold<V> gaussian(Segments segments, std::uint64_t k);

 private:
  using Counts = std::array<std::uint32_t, histogram_bins>;

  Threshold<V> find(Segments segments, std::uint64_t size, std::uint64_t k, std::size_t stride,
                    std::size_t phase);

  DeviceQueue const& queue_;
  DeviceBuffer<cuda::SelectionState> state_;
  PinnedBuffer<cuda::SelectionState> host_state_;
  DeviceBuffer<std::byte> workspace_;
  DeviceBuffer<Moments> moments_;
  PinnedBuffer<Moments> host_moments_;
  DeviceBuffer<Counts> counts_;
  PinnedBuffer<Counts> host_counts_;
};

}  // namespace sparsecomm
