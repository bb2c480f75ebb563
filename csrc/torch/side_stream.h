// The stream on which a device's gradients are exchanged, beside the one that makes them. By
// torch's device-neutral interface alone, so that it compiles against a torch without CUDA.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>

#include "compress/device_gradient.h"

namespace sparsecomm {

c10::Stream current_stream(c10::Device device);
// For kernels on the stream; memory comes from torch's allocator.
DeviceQueue queue_on(c10::Stream stream, cuda::Library const& library);

class SideStream {
 public:
  // One of torch's pool. Throws InvalidArgument where the library has no device.
  SideStream(c10::Device device, cuda::Library const& library);

  c10::Device device() const { return stream_.device(); }
  c10::Stream stream() const { return stream_; }
  DeviceQueue queue() const { return queue_on(stream_, library_); }

  // What is enqueued here from now on waits for what this thread's current stream has now; the
  // other way round. Neither blocks the caller.
  void wait_for_current() const;
  void let_current_wait() const;

  // What the thread's current stream has now.
  std::unique_ptr<c10::Event> mark_current() const;
  // What the thread's current stream has from now on waits for what was marked.
  void let_current_wait(c10::Event const& mark) const { mark.block(current_stream(device())); }
  // Blocks until the device has done what was marked. Waiting on the host, not in the stream, lets
  // what other buckets need go on there.
  void wait(c10::Event const& mark) const;
  // Whether it has.
  bool is_over(c10::Event const& mark) const;
  // Work here uses the tensor's memory: its owner may let go of it, nobody else gets it too early.
  void use(at::Tensor const& tensor) const { tensor.record_stream(stream_); }

  // While it lives, this is the thread's current stream.
  c10::StreamGuard make_current() const { return c10::StreamGuard(stream_); }

 private:
  cuda::Library const& library_;
  c10::Stream stream_;
};

}  // namespace sparsecomm
