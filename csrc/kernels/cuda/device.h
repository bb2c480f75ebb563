// What all kernels are written with. They compile as ordinary C++ too, where cuda_runtime.h is the
// emulator of tests/cpp/cuda/emulated.
#pragma once

#include <cuda_runtime.h>
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/error.h"
#include "kernels/cuda/library.h"

#ifdef __CUDACC__
#define SPARSECOMM_SHARED(type, name) __shared__ type name
#endif

namespace sparsecomm::cuda {

inline constexpr unsigned warp_lanes = 32;
inline constexpr unsigned block_threads = 256;
inline constexpr unsigned block_warps = block_threads / warp_lanes;
inline constexpr unsigned all_lanes = 0xffffffffu;

inline void require_success(cudaError_t status, char const* call) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // or the next launch would be blamed for it
  throw Error(concat(call, ": CUDA: ", cudaGetErrorString(status)));
}

template <class... Parameters, class... Arguments>
void launch(char const* call, void (*kernel)(Parameters...), std::size_t blocks, unsigned threads,
            Stream stream, Arguments... arguments) {
#ifdef __CUDACC__
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(
      static_cast<Parameters>(arguments)...);
#else
  emulator::run(static_cast<unsigned>(blocks), threads, stream,
                [&] { kernel(static_cast<Parameters>(arguments)...); });
#endif
  require_success(cudaGetLastError(), call);
}

constexpr std::size_t divided_up(std::size_t size, std::size_t part) {
  return (size + part - 1) / part;
}

// Blocks for a loop that strides over the grid.
constexpr std::size_t striding_blocks(std::size_t size) {
  constexpr std::size_t most = 2048;
  std::size_t const blocks = divided_up(size, block_threads * 8);
  return blocks < most ? blocks : most;
}

__device__ inline std::size_t grid_thread() {
  return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ inline std::size_t grid_threads() { return std::size_t{gridDim.x} * blockDim.x; }

// The conversions of base/dtype.h, by the device's instructions.
template <class T>
__device__ accumulate_t<T> widened(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (dtype_of<T>() == DType::f16) {
    return __half2float(__ushort_as_half(x.bits));
  } else if constexpr (dtype_of<T>() == DType::bf16) {
    return __bfloat162float(__ushort_as_bfloat16(x.bits));
  } else {
    return x;
  }
#else
  return static_cast<accumulate_t<T>>(x);
#endif
}

template <class T>
__device__ T narrowed(accumulate_t<T> x) {
#ifdef __CUDA_ARCH__
  if constexpr (dtype_of<T>() == DType::f16) {
    T result;
    result.bits = __half_as_ushort(__float2half_rn(x));
    return result;
  } else if constexpr (dtype_of<T>() == DType::bf16) {
    T result;
    result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return result;
  } else {
    return x;
  }
#else
  return static_cast<T>(x);
#endif
}

template <class U>
__device__ U warp_sum(U value) {
  for (unsigned offset = warp_lanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(all_lanes, value, offset);
  }
  return value;
}

template <class U>
__device__ U warp_max(U value) {
  for (unsigned offset = warp_lanes / 2; offset > 0; offset /= 2) {
    U const other = __shfl_xor_sync(all_lanes, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

// Counters are 64 bits wide; CUDA knows them by another name.
__device__ inline unsigned long long* counter(std::uint64_t* word) {
  return reinterpret_cast<unsigned long long*>(word);
}

}  // namespace sparsecomm::cuda
