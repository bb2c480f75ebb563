// A gradient in a CUDA device's memory: selected and applied there, while what was packed passes
// through pinned memory.
#pragma once

#include <cstdint>
#include <memory>

#include "compress/device_queue.h"
#include "compress/local_gradient.h"

namespace sparsecomm {

// The gradient and the residual that are bound lie in the device's memory, and what made them has
// been enqueued on the stream, or the stream waits for it. The same results as those of
// make_host_gradient, bit for bit, but that the sums behind a gaussian threshold are rounded
// otherwise. Throws InvalidArgument for a rule that devices do not have.
template <class T>
std::unique_ptr<LocalGradient<T>> make_device_gradient(ThresholdSchedule schedule,
                                                       SelectionRule const& rule,
                                                       std::uint64_t extent, DeviceQueue queue);

}  // namespace sparsecomm
