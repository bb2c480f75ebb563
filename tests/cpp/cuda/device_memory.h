// The CUDA kernels and memory for them: the emulator's, or, where SPARSECOMM_CUDA_LIBRARY names the
// shared object that nvcc made, a device's.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda_library.h"

namespace sparsecomm {
namespace cuda {
extern "C" Library const sparsecomm_cuda_library;
}

namespace test {

#ifdef SPARSECOMM_CUDA_LIBRARY
inline cuda::Library const& library() {
  static cuda::Library const& opened = open_cuda_library(SPARSECOMM_CUDA_LIBRARY);
  return opened;
}
inline void shuffle(std::uint64_t, unsigned) {}  // a device does so by itself
#else
inline cuda::Library const& library() { return cuda::sparsecomm_cuda_library; }
inline void shuffle(std::uint64_t seed, unsigned resident) { emulator::configure(seed, resident); }
#endif

// As torch's allocator does: what it throws is none of our errors.
inline std::shared_ptr<void> allocate(std::size_t bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes) != cudaSuccess) {
    cudaGetLastError();
    throw std::bad_alloc();
  }
  return {memory, [](void* allocated) { cudaFree(allocated); }};
}

// Elements in the device's memory, or in the processor's.
template <class E>
class Array {
 public:
  explicit Array(std::vector<E> const& values, bool on_device = true)
      : size_(values.size()),
        memory_(on_device ? allocate(size_ * sizeof(E) + 1)
                          : std::shared_ptr<void>(std::malloc(size_ * sizeof(E) + 1), std::free)) {
    set(values);
  }
  explicit Array(std::size_t size, bool on_device = true)
      : Array(std::vector<E>(size), on_device) {}

  E* data() const { return static_cast<E*>(memory_.get()); }
  std::size_t size() const { return size_; }
  std::span<E> span() const { return {data(), size_}; }
  void set(std::vector<E> const& values) { copy(memory_.get(), values.data()); }
  std::vector<E> get() const {
    std::vector<E> values(size_);
    copy(values.data(), memory_.get());
    return values;
  }

 private:
  void copy(void* to, void const* from) const {
    library().runtime.copy(to, from, size_ * sizeof(E), nullptr);
    library().runtime.synchronize(nullptr);
  }

  std::size_t size_;
  std::shared_ptr<void> memory_;
};

// One value that a kernel writes.
template <class E>
class One {
 public:
  explicit One(E const& value = {}) : memory_(std::vector<E>{value}) {}
  E* data() const { return memory_.data(); }
  E get() const { return memory_.get().front(); }

 private:
  Array<E> memory_;
};

// Filled with what no kernel may take for zeros.
inline Array<std::uint64_t> workspace(std::size_t bytes) {
  return Array(std::vector<std::uint64_t>(bytes / 8 + 2, 0xa5a5a5a5a5a5a5a5u));
}

}  // namespace test
}  // namespace sparsecomm
