// A gradient in a CUDA device's memory: selected and applied there, while what was packed passes
// through pinned memory.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "compress/local_gradient.h"
#include "kernels/cuda/library.h"

namespace sparsecomm {

// Where the kernels run, and where their memory comes from.
struct DeviceQueue {
  cuda::Library const* library = nullptr;
  int device = 0;
  cuda::Stream stream = nullptr;  // stays as long as what uses the queue
  // Memory of the device, fit for use on the stream at once, aligned to 16 bytes.
  std::function<std::shared_ptr<void>(std::size_t bytes)> allocate;
};

// The gradient and the residual that are bound lie in the device's memory, and what made them has
// been enqueued on the stream, or the stream waits for it. The same results as those of
// make_host_gradient, bit for bit, but that the sums behind a gaussian threshold are rounded
// otherwise.
template <class T>
std::unique_ptr<LocalGradient<T>> make_device_gradient(ThresholdSchedule schedule,
                                                       std::uint64_t extent, DeviceQueue queue);

}  // namespace sparsecomm
