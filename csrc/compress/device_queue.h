// Where work on a CUDA device is enqueued, and memory for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "kernels/cuda/library.h"

namespace sparsecomm {

// Where the kernels run, and where their memory comes from.
struct DeviceQueue {
  cuda::Library const* library = nullptr;
  cuda::Context context = nullptr;  // Runtime::context()
  cuda::Stream stream = nullptr;    // stays as long as what uses the queue
  // Memory of the device, fit for use on the stream at once, aligned to 16 bytes.
  std::function<std::shared_ptr<void>(std::size_t bytes)> allocate;
};

// While it lives, this thread works on the queue's device.
class OnDevice {
 public:
  explicit OnDevice(DeviceQueue const& queue) : runtime_(queue.library->runtime) {
    runtime_.enter(queue.context);
  }
  ~OnDevice() { runtime_.leave(); }
  OnDevice(OnDevice const&) = delete;
  OnDevice& operator=(OnDevice const&) = delete;

 private:
  cuda::Runtime const& runtime_;
};

// What scratch of `capacity` becomes when it must hold `size`: selections vary from step to step,
// and growing costs a wait for the device.
constexpr std::size_t grown(std::size_t capacity, std::size_t size) {
  return std::max(size, capacity + capacity / 2);
}

// Scratch on the device, as Buffer is in the processor's memory.
template <class E>
class DeviceBuffer {
 public:
  E* take(DeviceQueue const& queue, std::size_t size) {
    if (size > capacity_) {
      std::size_t const capacity = grown(capacity_, size);
      queue.library->runtime.synchronize(queue.stream);  // which may still use the former one
      capacity_ = 0;
      memory_.reset();
      memory_ = queue.allocate(capacity * sizeof(E));
      capacity_ = capacity;
    }
    return static_cast<E*>(memory_.get());
  }

 private:
  std::shared_ptr<void> memory_;
  std::size_t capacity_ = 0;
};

// Host memory that copies to and from the device do not wait for.
template <class E>
class PinnedBuffer {
 public:
  std::span<E> take(DeviceQueue const& queue, std::size_t size) {
    if (size > capacity_) {
      cuda::Runtime const& runtime = queue.library->runtime;
      std::size_t const capacity = grown(capacity_, size);
      runtime.synchronize(queue.stream);
      capacity_ = 0;
      memory_.reset();
      memory_ = {runtime.allocate_pinned(capacity * sizeof(E)), runtime.free_pinned};
      capacity_ = capacity;
    }
    return {static_cast<E*>(memory_.get()), size};
  }

 private:
  std::unique_ptr<void, void (*)(void*) noexcept> memory_{nullptr, nullptr};
  std::size_t capacity_ = 0;
};

// Waits for the device.
template <class E>
E fetch(DeviceQueue const& queue, E const* from, PinnedBuffer<E>& through) {
  E* const to = through.take(queue, 1).data();
  queue.library->runtime.copy(to, from, sizeof(E), queue.stream);
  queue.library->runtime.synchronize(queue.stream);
  return *to;
}

}  // namespace sparsecomm
