#include "side_stream.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/error.h"

namespace sparsecomm {
namespace {

c10::Stream pool_stream(c10::Device device, cuda::Library const& library) {
  require(library.runtime.device_count() > 0,
          "sparsecomm's CUDA kernels find no device for a gradient on ", device.str(),
          ": the driver is older than the CUDA they were built with; install a newer driver, or "
          "build sparsecomm with an older nvcc");
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

void enqueue_wait(c10::Stream const& later, c10::Stream const& earlier) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

}  // namespace

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

DeviceQueue queue_on(c10::Stream stream, cuda::Library const& library) {
  auto const allocate = [stream](std::size_t bytes) -> std::shared_ptr<void> {
    // Of this stream's pool: what the allocator gives may still be in use on another one.
    c10::StreamGuard const guard(stream);
    auto const memory = std::make_shared<at::Tensor>(
        at::empty({static_cast<std::int64_t>(bytes)},
                  at::TensorOptions().dtype(at::kByte).device(stream.device())));
    return {memory, memory->data_ptr()};
  };
  // Tests have CUDA's kernels run on the processor, whose streams have no handle.
  bool const is_cuda = stream.device_type() == c10::DeviceType::CUDA;
  return {&library, library.runtime.context(is_cuda ? stream.device_index() : 0),
          is_cuda ? static_cast<cuda::Stream>(stream.native_handle()) : nullptr, allocate};
}

SideStream::SideStream(c10::Device device, cuda::Library const& library)
    : library_(library), stream_(pool_stream(device, library)) {}

void SideStream::wait_for_current() const { enqueue_wait(stream_, current_stream(device())); }

void SideStream::let_current_wait() const { enqueue_wait(current_stream(device()), stream_); }

std::unique_ptr<c10::Event> SideStream::mark_current() const {
  auto mark = std::make_unique<c10::Event>(device().type());
  mark->record(current_stream(device()));
  return mark;
}

void SideStream::wait(c10::Event const& mark) const {
  // A thread that waits without a device of its own would open the first one.
  c10::DeviceGuard const guard(device());
  mark.synchronize();
}

bool SideStream::is_over(c10::Event const& mark) const {
  c10::DeviceGuard const guard(device());
  return mark.query();
}

}  // namespace sparsecomm
