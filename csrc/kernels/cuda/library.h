// The kernels on CUDA devices: what their shared object gives to the core, which knows no CUDA.
//
// All pointers are to device memory unless it says "host"; sizes are in elements. Every call
// enqueues on the stream and returns: none waits, none allocates. A launch that CUDA refuses throws
// Error, naming the call. Results are those of the scalar oracle (kernels/kernels.h), bit for bit
// but for the payload of a NaN. Workspaces hold nothing between calls, may be shared by calls on
// one stream, and must be aligned to 16 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "kernels/kernels.h"
#include "kernels/magnitude.h"
#include "wire/codecs.h"

struct CUctx_st;
struct CUstream_st;

namespace sparsecomm::cuda {

using Context = CUctx_st*;    // a CUcontext
using Stream = CUstream_st*;  // a cudaStream_t; null is the default stream

// A selection over one or several segments: what it is to take, and what it has met. It lies in
// device memory, so that a threshold found on the device takes effect without the host.
struct SelectionState {
  std::uint64_t magnitude;  // bit pattern; see Threshold
  std::uint64_t ties;
  std::uint64_t limit;
  std::uint64_t larger_met;  // entries that passed other than as ties, taken or not
  std::uint64_t ties_met;    // entries with the threshold's own magnitude, where ties > 0
  std::uint64_t ties_taken;
  std::uint64_t largest;  // bit pattern of the largest finite magnitude
  std::uint32_t not_finite;
  std::uint32_t unused;

  std::uint64_t count() const {
    std::uint64_t const passed = larger_met + (ties_met < ties ? ties_met : ties);
    return passed < limit ? passed : limit;
  }
  template <class V>
  SelectionStats<V> stats() const {
    return {static_cast<std::size_t>(count()),
            from_magnitude_bits<V>(static_cast<magnitude_bits_t<V>>(largest)), not_finite == 0,
            larger_met + (ties_met < ties ? ties_met : ties) <= limit};
  }
};

// The state that a selection by `threshold` begins with.
template <class V>
SelectionState begin_selection(Threshold<V> const& threshold, std::uint64_t limit) {
  SelectionState state{};
  state.limit = limit;
  if (threshold.magnitude > 0) {
    auto const bits = magnitude_bits(threshold.magnitude);
    state.magnitude = bits < largest_finite_bits<V> ? bits : largest_finite_bits<V>;
    state.ties = bits <= largest_finite_bits<V> ? threshold.ties : 0;
  } else {
    // As in the scalar kernels: a threshold of NaN lets only what is not finite pass.
    state.magnitude = threshold.magnitude <= 0 ? 0 : largest_finite_bits<V>;
  }
  return state;
}

// One segment's part of a fused error feedback: u = momentum_factor * momentum + scale * gradient
// (without momentum: u = scale * gradient), a = residual + u, with `nesterov` residual + (scale *
// gradient + momentum_factor * u); what passes is packed and its residual becomes +0, every other
// residual becomes a; the momentum becomes u, and +0 where an entry was packed if `mask_momentum`;
// the gradient becomes +0. Source: Ok-Topk Algorithm 2; Lin et al., "Deep Gradient Compression",
// ICLR 2018, for momentum correction and factor masking.
template <class T>
struct ErrorFeedbackArguments {
  using V = accumulate_t<T>;
  T* gradient = nullptr;
  V* residual = nullptr;
  V* momentum = nullptr;  // null: without
  std::size_t size = 0;
  std::uint32_t first_index = 0;
  V scale = 1;
  V momentum_factor = 0;
  bool mask_momentum = true;
  bool nesterov = false;  // where there is a momentum
  bool send_all = false;  // every entry passes, zeros too
};

// Where a selection goes: room for SelectionState::limit entries.
template <class V>
struct Packed {
  std::uint32_t* indices;
  V* values;
};

template <class T>
struct Kernels {
  using V = accumulate_t<T>;

  // Sets *not_finite to 1 where an entry is NaN or Inf, and leaves it otherwise. Reads N.
  void (*all_finite)(T const* x, std::size_t size, std::uint32_t* not_finite, Stream stream);

  // Appends to what state->count() counts. Workspace: selection_workspace(size). Reads 2N, writes
  // 2N (3N with momentum).
  void (*fused_error_feedback)(ErrorFeedbackArguments<T> const& arguments, SelectionState* state,
                               Packed<V> out, void* workspace, Stream stream);
  // The same selection of x itself, which stays as it is.
  void (*select)(T const* x, std::size_t size, std::uint32_t first_index, SelectionState* state,
                 Packed<V> out, void* workspace, Stream stream);

  // Packs the k entries of largest magnitude of every `bucket` (1 to max_bucket) entries of each
  // row of x, as top_k_per_bucket of kernels/top_k.h does: `out` has room for size / row *
  // bucket_top_k_count(row, bucket, k). Reads N.
  void (*top_k_per_bucket)(T const* x, std::size_t size, std::size_t row, std::size_t bucket,
                           std::size_t k, Packed<V> out, Stream stream);
  // squares[b] = the sum of the squares of block b of `block` entries, the last of which may be
  // shorter: of moments(), with the bits of the scalar kernel. Reads N.
  void (*block_squares)(T const* x, std::size_t size, std::size_t block, double* squares,
                        Stream stream);

  // Sets magnitude and ties of the state to those of exact_threshold, of |gradient + residual|. A
  // residual without memory counts as zeros. The spans' memory is the device's, the list the
  // host's. Workspace: threshold_workspace(). Reads 2N at most 3 times (6 for double), as a rule
  // twice.
  void (*exact_threshold)(std::span<const Segment<T>> segments, std::uint64_t k,
                          SelectionState* state, void* workspace, Stream stream);
  // The same for sampled_threshold, with a stride that sampled_stride() has settled on (not 0).
  void (*sampled_threshold)(std::span<const Segment<T>> segments, std::uint64_t k,
                            std::size_t stride, std::size_t phase, SelectionState* state,
                            void* workspace, Stream stream);

  // In this and the next, null counts as a residual of zeros.
  //
  // Adds to *total the sums of gradient + residual and of its squares. In an order of its own, the
  // same in every run: equal to the scalar kernel's but for rounding. Workspace:
  // threshold_workspace(size, 0). Reads 2N.
  void (*moments)(T const* gradient, V const* residual, std::size_t size, Moments* total,
                  void* workspace, Stream stream);
  // Adds to counts[histogram_bins] as the scalar kernel does. Reads 2N.
  void (*magnitude_histogram)(T const* gradient, V const* residual, std::size_t size,
                              unsigned shift, std::uint64_t base, std::uint32_t* counts,
                              Stream stream);

  // destination[indices[i] - first_index] = T(values[i] / divisor). An index outside of the
  // destination is left out and sets *outside to 1.
  void (*scatter)(T* destination, std::size_t size, std::uint32_t const* indices, V const* values,
                  std::size_t count, V divisor, std::uint32_t first_index, std::uint32_t* outside,
                  Stream stream);
  // destination[i] = T(values[i] / divisor).
  void (*divide)(T* destination, V const* values, std::size_t size, V divisor, Stream stream);
  void (*fill)(T* destination, std::size_t size, T value, Stream stream);
  // Sends all: gradient becomes the finite T nearest to residual + gradient, the residual what is
  // left, `copy` the new gradient.
  void (*flush)(T* gradient, V* residual, T* copy, std::size_t size, Stream stream);
  // residual[i] += values[i].
  void (*add)(V* residual, T const* values, std::size_t size, Stream stream);
};

// The kernels on residuals and packed values; V is float or double.
template <class V>
struct ValueKernels {
  // dense[indices[i] - first_index] += values[i]; `before`, if any, takes what stood there. The
  // indices differ from each other; one outside of `dense` is left out and sets *outside to 1.
  void (*add_sparse)(V* dense, std::size_t size, std::uint32_t const* indices, V const* values,
                     std::size_t count, std::uint32_t first_index, V* before,
                     std::uint32_t* outside, Stream stream);

  // QSGD as wire/qsgd.h has it, in `bits` bits and buckets of 512 or 1,024 values: `out` becomes
  // what encoding the values rounded with `key` gives; `rounded`, if any, those values. Sets
  // *not_finite to 1 where a value is NaN or Inf: `out` is then of no use.
  void (*qsgd_quantize)(V const* values, std::size_t size, int bits, std::size_t bucket,
                        RoundingKey const& key, std::byte* out, V* rounded,
                        std::uint32_t* not_finite, Stream stream);
  // Sets *invalid to 1 where the codes are none that qsgd_quantize makes.
  void (*qsgd_check)(std::byte const* codes, std::size_t size, int bits, std::size_t bucket,
                     std::uint32_t* invalid, Stream stream);
  // dense[i] += the value of code i. The codes come from qsgd_quantize: not validated.
  void (*qsgd_dequantize_add)(std::byte const* codes, std::size_t size, int bits,
                              std::size_t bucket, V* dense, Stream stream);
};

// The sum of sparse vectors of `size` entries: clear(), mark() each vector, number(), list(), and
// add_*() each, one after another, which fixes the order of additions. In between, the workspace
// stays as it is. O(size / 32 + entries).
struct UnionKernels {
  std::size_t (*workspace)(std::size_t size);  // bytes
  void (*clear)(std::size_t size, void* workspace, Stream stream);
  // Sets *invalid to 1 where the indices are not strictly increasing, or not below `size`.
  void (*mark)(std::uint32_t const* indices, std::size_t count, std::size_t size, void* workspace,
               std::uint32_t* invalid, Stream stream);
  void (*number)(std::size_t size, void* workspace, std::uint64_t* count, Stream stream);
  // The sum's indices, as many as number() counted, in order.
  void (*list)(std::size_t size, void* workspace, std::uint32_t* indices, Stream stream);

  // sums[place of indices[i]] += values[i]; sums that begin as -0.0 become the first value itself.
  template <class V>
  using Add = void (*)(std::uint32_t const* indices, V const* values, std::size_t count,
                       std::size_t size, void* workspace, V* sums, Stream stream);
  Add<float> add_f32;
  Add<double> add_f64;
  Add<std::int32_t> add_i32;
  Add<std::int64_t> add_i64;

  template <class V>
  Add<V> add() const {
    if constexpr (std::is_same_v<V, float>) {
      return add_f32;
    } else if constexpr (std::is_same_v<V, double>) {
      return add_f64;
    } else if constexpr (std::is_same_v<V, std::int32_t>) {
      return add_i32;
    } else {
      return add_i64;
    }
  }
};

// Pinned host memory, copies and waiting. Streams and events are their owner's.
struct Runtime {
  // Of the current device.
  void* (*allocate_pinned)(std::size_t bytes);
  void (*free_pinned)(void* memory) noexcept;
  void (*copy)(void* to, void const* from, std::size_t bytes, Stream stream);  // either's memory
  void (*zero)(void* memory, std::size_t bytes, Stream stream);
  void (*synchronize)(Stream stream);  // waits; throws what went wrong on the device
  int (*device_count)();
  // The device's context, which is made where there is none, and stays. Any thread may call it.
  Context (*context)(int device);
  // Until leave(), this thread works on the context's device; then on what it did before. Unlike
  // cudaSetDevice, neither opens any other device.
  void (*enter)(Context context);
  void (*leave)() noexcept;
};

struct Library {
  std::size_t (*selection_workspace)(std::size_t size);
  // `size`: entries of all segments; `stride`: that of sampled_threshold, 0 without.
  std::size_t (*threshold_workspace)(std::size_t size, std::size_t stride);
  std::size_t (*block_workspace)(std::size_t blocks);
  // Sets *state, from a copy made when called.
  void (*begin)(SelectionState const& initial, SelectionState* state, Stream stream);

  // Which blocks of `block_bytes` (the last may be shorter) hold a bit that is set, so that NaN and
  // -0.0 count: bit b % 32 of bitmap[b / 32], the numbers in order, and, unless `out` is null, the
  // blocks themselves one after another. *count: how many. Workspace: block_workspace(blocks). The
  // results may lie in pinned memory of the host, where one kernel then finds and delivers them.
  void (*block_scan)(std::byte const* bytes, std::size_t size, std::size_t block_bytes,
                     std::uint32_t* bitmap, std::uint32_t* numbers, std::byte* out,
                     std::uint64_t* count, void* workspace, Stream stream);

  // Copies the blocks of those numbers one after another, with zeros behind one that is shorter,
  // and back: null stands for blocks of zeros. The numbers differ from each other. One that no
  // block has is left out and sets *outside to 1. Of either call `out` and `blocks` may lie in
  // pinned memory.
  void (*block_gather)(std::byte const* bytes, std::size_t size, std::size_t block_bytes,
                       std::uint32_t const* numbers, std::size_t count, std::byte* out,
                       std::uint32_t* outside, Stream stream);
  void (*block_scatter)(std::byte* bytes, std::size_t size, std::size_t block_bytes,
                        std::uint32_t const* numbers, std::size_t count, std::byte const* blocks,
                        std::uint32_t* outside, Stream stream);

  Kernels<float> f32;
  Kernels<double> f64;
  Kernels<Half> f16;
  Kernels<BFloat16> bf16;
  ValueKernels<float> values_f32;
  ValueKernels<double> values_f64;
  UnionKernels unions;
  Runtime runtime;

  template <class T>
  Kernels<T> const& kernels() const {
    if constexpr (dtype_of<T>() == DType::f32) {
      return f32;
    } else if constexpr (dtype_of<T>() == DType::f64) {
      return f64;
    } else if constexpr (dtype_of<T>() == DType::f16) {
      return f16;
    } else {
      return bf16;
    }
  }
  template <class V>
  ValueKernels<V> const& values() const {
    if constexpr (dtype_of<V>() == DType::f32) {
      return values_f32;
    } else {
      return values_f64;
    }
  }
};

// The name under which the shared object exports it, extern "C".
inline constexpr char const* library_symbol = "sparsecomm_cuda_library";

}  // namespace sparsecomm::cuda
