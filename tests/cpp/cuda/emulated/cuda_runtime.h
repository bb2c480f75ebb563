// CUDA on the processor, as far as csrc/kernels/cuda needs it: each thread of a block is a fibre,
// several blocks are under way at a time, and who goes on is drawn at random wherever threads wait
// for each other. The kernels' own sources compile against this. It finds errors of logic, and
// waits that never end; it knows nothing of weak memory order.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(threads)
#define SPARSECOMM_SHARED(type, name) \
  type& name = *static_cast<type*>(emulator::shared_memory(sizeof(type)))

struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyDefault };
enum { cudaEnableDefault };
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess,
  cudaDriverEntryPointSymbolNotFound
};

namespace emulator {

struct Index {
  unsigned x;
};
struct Thread {
  Index thread, block, threads, blocks;
};

// Runs the kernel to its end. Throws std::logic_error where threads wait for others that have
// ended.
void run(unsigned blocks, unsigned threads, cudaStream_t, std::function<void()> const& kernel);

Thread const& current();
void* shared_memory(std::size_t bytes);
void synchronize_block();
// What every lane of this warp gives; valid until the lane's next exchange.
std::uint64_t const* exchange(std::uint64_t value);
void yield();

// "Device" memory: reached by kernels, copies and cudaMemsetAsync of the thread's device, while the
// processor that touches it faults, unless another thread's kernel runs at that moment.
void* allocate(std::size_t bytes);
void release(void* memory);
class Access {
 public:
  Access();
  ~Access();
  Access(Access const&) = delete;
  Access& operator=(Access const&) = delete;

 private:
  int device_;
};

// The devices, and those that have a context: that somebody has used.
inline constexpr int devices = 2;
std::set<int> opened();
void close_all();
// This thread's device. A context that was pushed goes before what cudaSetDevice chose.
int device();
void set_device(int device);

// Of what allocates memory, of either kind, on any thread, the call after so many fails.
void fail_allocation(unsigned after);
void fail_none();
bool may_allocate();
// Keeps it until cudaGetLastError, as CUDA does.
cudaError_t result(cudaError_t status);
cudaError_t take_last_error();

// Draws differ from seed to seed; `resident` blocks are under way at a time.
void configure(std::uint64_t seed, unsigned resident);

template <class U>
std::uint64_t packed(U value) {
  static_assert(sizeof(U) <= 8);
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  return word;
}
template <class U>
U unpacked(std::uint64_t word) {
  U value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}
inline unsigned lane() { return current().thread.x % 32; }

}  // namespace emulator

#define threadIdx (emulator::current().thread)
#define blockIdx (emulator::current().block)
#define blockDim (emulator::current().threads)
#define gridDim (emulator::current().blocks)

inline void __syncthreads() { emulator::synchronize_block(); }
inline void __nanosleep(unsigned) { emulator::yield(); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline unsigned __ballot_sync(unsigned, bool predicate) {
  std::uint64_t const* const lanes = emulator::exchange(predicate);
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) ballot |= static_cast<unsigned>(lanes[lane]) << lane;
  return ballot;
}
template <class U>
U __shfl_sync(unsigned, U value, unsigned lane) {
  return emulator::unpacked<U>(emulator::exchange(emulator::packed(value))[lane]);
}
template <class U>
U __shfl_xor_sync(unsigned, U value, unsigned mask) {
  unsigned const lane = emulator::lane() ^ mask;
  return emulator::unpacked<U>(emulator::exchange(emulator::packed(value))[lane]);
}
template <class U>
U __shfl_up_sync(unsigned, U value, unsigned offset) {
  unsigned const own = emulator::lane();
  unsigned const lane = own < offset ? own : own - offset;
  return emulator::unpacked<U>(emulator::exchange(emulator::packed(value))[lane]);
}

template <class U>
U atomicAdd(U* word, U value) {
  U const before = *word;
  *word = before + value;
  return before;
}
template <class U>
U atomicMax(U* word, U value) {
  U const before = *word;
  *word = before < value ? value : before;
  return before;
}
template <class U>
U atomicOr(U* word, U value) {
  U const before = *word;
  *word = before | value;
  return before;
}

inline cudaError_t cudaGetLastError() { return emulator::take_last_error(); }
inline char const* cudaGetErrorString(cudaError_t) { return "out of memory"; }
inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  emulator::Access const access;
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  emulator::Access const access;
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = emulator::may_allocate() ? emulator::allocate(bytes) : nullptr;
  return emulator::result(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
inline cudaError_t cudaFree(void* memory) {
  emulator::release(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** memory, std::size_t bytes) {
  emulator::Access const access;
  *memory = emulator::may_allocate() ? std::malloc(bytes == 0 ? 1 : bytes) : nullptr;
  return emulator::result(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
inline cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  emulator::Access const access;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = emulator::device();
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  emulator::set_device(device);
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = emulator::devices;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);
