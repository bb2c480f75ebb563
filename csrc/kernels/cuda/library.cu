#include <cuda.h>

#include <map>
#include <mutex>

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
void free_pinned(void* memory) noexcept {
  if (cudaFreeHost(memory) != cudaSuccess) static_cast<void>(cudaGetLastError());
}

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
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  static_cast<void>(cudaGetLastError());
  return 0;
}

// The driver, which is found at run time, since this loads on machines without one.
template <class Function>
Function driver(char const* name) {
  constexpr unsigned version = 12000;  // of CUDA, whose interface Function is
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  require_success(
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found), name);
  require<Error>(found == cudaDriverEntryPointSuccess, "the CUDA driver has no ", name,
                 "; install a newer one");
  return reinterpret_cast<Function>(function);
}

void require_success(CUresult status, char const* call) {
  require<Error>(status == CUDA_SUCCESS, call, ": CUDA driver: error ", static_cast<int>(status));
}

Context context(int device) {
  static auto const get = driver<CUresult (*)(CUdevice*, int)>("cuDeviceGet");
  static auto const retain = driver<CUresult (*)(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain");
  static std::mutex mutex;
  static std::map<int, Context> contexts;
  std::lock_guard const lock(mutex);
  Context& context = contexts[device];
  if (context == nullptr) {
    CUdevice handle{};
    require_success(get(&handle, device), "cuDeviceGet");
    require_success(retain(&context, handle), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

void enter(Context context) {
  static auto const push = driver<CUresult (*)(CUcontext)>("cuCtxPushCurrent");
  require_success(push(context), "cuCtxPushCurrent");
}

void leave() noexcept {
  // Found before: enter() comes first. At the program's end the driver may be gone.
  static auto const pop = driver<CUresult (*)(CUcontext*)>("cuCtxPopCurrent");
  Context former = nullptr;
  static_cast<void>(pop(&former));
}

template <class T>
Kernels<T> kernels() {
  Kernels<T> table;
  add_selection_kernels(table);
  add_bucket_kernels(table);
  add_block_kernels(table);
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
    block_gather,
    block_scatter,
    kernels<float>(),
    kernels<double>(),
    kernels<Half>(),
    kernels<BFloat16>(),
    value_kernels<float>(),
    value_kernels<double>(),
    union_kernels(),
    {allocate_pinned, free_pinned, copy, zero, synchronize, device_count, context, enter, leave},
};

}  // namespace sparsecomm::cuda
