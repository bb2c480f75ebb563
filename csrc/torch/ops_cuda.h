// What the operators need for tensors on a CUDA device.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <string>

#include "compress/device_threshold.h"
#include "ops.h"

namespace sparsecomm::ops {

// Where the CUDA kernels are, once, when the package is imported. `emulated`: the file holds the
// tests' emulator, and the kernels take the tensors in the processor's memory.
void use_cuda_library(std::string file, bool emulated);

bool on_device(at::Tensor const& tensor);

// A call of an operator on the tensor's device, on its current stream.
class DeviceCall {
 public:
  // Throws NotImplementedError, saying what to do, where there are no kernels.
  explicit DeviceCall(at::Tensor const& like);

  DeviceQueue const& queue() const { return queue_; }
  cuda::Library const& library() const { return *queue_.library; }
  cuda::Stream stream() const { return queue_.stream; }

  // Uninitialised.
  at::Tensor empty(std::int64_t size, at::ScalarType dtype) const {
    return at::empty({size}, options_.dtype(dtype));
  }
  at::Tensor workspace(std::size_t bytes) const {
    return empty(static_cast<std::int64_t>(bytes), at::kByte);
  }
  // One E, all bits zero.
  template <class E>
  at::Tensor zeroed() const {
    return at::zeros({static_cast<std::int64_t>(sizeof(E))}, options_.dtype(at::kByte));
  }
  // Waits for the device.
  template <class E>
  E read(at::Tensor const& from) const {
    E value;
    library().runtime.copy(&value, from.data_ptr(), sizeof(E), stream());
    library().runtime.synchronize(stream());
    return value;
  }

 private:
  c10::DeviceGuard guard_;
  at::TensorOptions options_;
  DeviceQueue queue_;
  OnDevice on_;
};

// A selection on the device, and room for what it packs.
template <class V>
class DeviceSelection {
 public:
  DeviceSelection(DeviceCall const& call, std::size_t size, std::size_t limit)
      : call_(call),
        limit_(limit),
        indices_(call.empty(static_cast<std::int64_t>(limit), at::kInt)),
        values_(call.empty(static_cast<std::int64_t>(limit), scalar_type<V>)),
        state_(call.zeroed<cuda::SelectionState>()),
        workspace_(call.workspace(call.library().selection_workspace(size))) {}

  void begin(Threshold<V> const& threshold) {
    call_.library().begin(cuda::begin_selection(threshold, limit_), state(), call_.stream());
  }
  cuda::SelectionState* state() { return static_cast<cuda::SelectionState*>(state_.data_ptr()); }
  cuda::Packed<V> packed() {
    return {entries<std::uint32_t>(indices_).data(), entries<V>(values_).data()};
  }
  void* workspace() { return workspace_.data_ptr(); }
  std::uint64_t count() const { return call_.read<cuda::SelectionState>(state_).count(); }
  // Tensors of their own of what was packed.
  Pair found() const {
    auto const count = static_cast<std::int64_t>(this->count());
    return {indices_.narrow(0, 0, count).clone(), values_.narrow(0, 0, count).clone()};
  }

 private:
  DeviceCall const& call_;
  std::size_t limit_;
  at::Tensor indices_, values_, state_, workspace_;
};

// The k largest of a row, to the place `to`; top_k_per_bucket is quicker for up to max_bucket
// entries.
template <class T>
void top_k_of_row(DeviceCall const& call, std::span<const T> x, std::uint64_t k,
                  cuda::Packed<accumulate_t<T>> to, DeviceThreshold<T>& threshold) {
  using V = accumulate_t<T>;
  auto const select = [&](Threshold<V> const& cut) {
    DeviceSelection<V> selection(call, x.size(), 0);
    call.library().begin(cuda::begin_selection(cut, k), selection.state(), call.stream());
    call.library().template kernels<T>().select(x.data(), x.size(), 0, selection.state(), to,
                                                selection.workspace(), call.stream());
    return selection.count();
  };
  Segment<T> const all{{const_cast<T*>(x.data()), x.size()}, {}};  // which thresholds only read
  std::uint64_t const found = k < x.size() ? select(threshold.exact({&all, 1}, k)) : 0;
  if (found == k) return;
  // All that are not zero, and zeros: those that equal the smallest magnitude there is.
  cuda::SelectionState state{};
  state.limit = k;
  state.ties = k == x.size() ? k : k - found;
  DeviceSelection<V> selection(call, x.size(), 0);
  call.library().begin(state, selection.state(), call.stream());
  call.library().template kernels<T>().select(x.data(), x.size(), 0, selection.state(), to,
                                              selection.workspace(), call.stream());
}

}  // namespace sparsecomm::ops
