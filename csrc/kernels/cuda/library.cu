#include "kernels/cuda/device.h"
#include "kernels/cuda/tables.h"

namespace sparsecomm::cuda {
namespace {

void* allocate_pinned(std::size_t bytes) {
  void* memory = nullptr;
  require_success(cudaMallocHost(&memory, bytes), "allocate_pinned");
  return memory;
}

// At the program's end the driver may be gone already, and the memory with it.
void free_pinned(void* memory) noexcept { static_cast<void>(cudaFreeHost(memory)); }

void copy(void* to, void const* from, std::size_t bytes, Stream stream) {
  if (bytes == 0) return;
  require_success(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copy");
}

void zero(void* memory, std::size_t bytes, Stream stream) {
  if (bytes == 0) return;
  require_success(cudaMemsetAsync(memory, 0, bytes, stream), "zero");
}

void synchronize(Stream stream) { require_success(cudaStreamSynchronize(stream), "synchronize"); }

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

int exchange_device(int device) {
  int former = 0;
  require_success(cudaGetDevice(&former), "exchange_device");
  if (former != device) require_success(cudaSetDevice(device), "exchange_device");
  return former;
}

void restore_device(int device) noexcept { static_cast<void>(cudaSetDevice(device)); }

template <class T>
Kernels<T> kernels() {
  Kernels<T> table;
  add_selection_kernels(table);
  add_threshold_kernels(table);
  add_gaussian_kernels(table);
  add_dense_kernels(table);
  return table;
}

template <class V>
ValueKernels<V> value_kernels() {
  ValueKernels<V> table;
  add_sparse_kernels(table);
  add_qsgd_kernels(table);
  return table;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Library const sparsecomm_cuda_library;
Library const sparsecomm_cuda_library{
    selection_workspace,
    threshold_workspace,
    block_workspace,
    begin,
    block_scan,
    kernels<float>(),
    kernels<double>(),
    kernels<Half>(),
    kernels<BFloat16>(),
    value_kernels<float>(),
    value_kernels<double>(),
    {allocate_pinned, free_pinned, copy, zero, synchronize, device_count, exchange_device,
     restore_device},
};

}  // namespace sparsecomm::cuda
