// The stream on which a device's gradients are exchanged, beside the one that makes them. By
// torch's device-neutral interface alone, so that it compiles against a torch without CUDA.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include "compress/device_gradient.h"

namespace sparsecomm {

class SideStream {
 public:
  // One of torch's pool. Throws InvalidArgument where the library has no device.
  SideStream(c10::Device device, cuda::Library const& library);

  c10::Device device() const { return stream_.device(); }
  // For kernels on this stream; memory comes from torch's allocator.
  DeviceQueue queue() const;

  // What is enqueued here from now on waits for what this thread's current stream has now; the
  // other way round. Neither blocks the caller.
  void wait_for_current() const;
  void let_current_wait() const;

  // While it lives, this is the thread's current stream.
  c10::StreamGuard make_current() const { return c10::StreamGuard(stream_); }

 private:
  cuda::Library const& library_;
  c10::Stream stream_;
};

}  // namespace sparsecomm
