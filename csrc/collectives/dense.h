// The interface of the dense allreduces: every element, with the same bits on all ranks. All but
// dense_inner send the same kind of messages as the sparse ones: these carry T, sums are made in
// accumulate_t<T>, and each element is finished by one owner. Each algorithm is described in its
// own file, dense*.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/dtype.h"
#include "collectives/channel.h"
#include "collectives/services.h"
#include "sparse/reduction.h"

namespace sparsecomm {

struct AlgorithmOptions;

template <class T>
class DenseAllreduce {
 public:
  virtual ~DenseAllreduce() = default;
  // Reduces data over all ranks and divides by `divisor`; the result stays here until write().
  // A frame of more than 2^32 - 1 bytes throws InvalidArgument.
  virtual void run(Channel& channel, std::span<const T> data, Reduction reduction,
                   accumulate_t<T> divisor) = 0;
  // Writes the result of the last run() to `out`, which may be its data; that must not have changed
  // since. Sends and allocates nothing, and does not fail.
  virtual void write(std::span<T> out) = 0;
};

template <class T>
using MakeDense = std::unique_ptr<DenseAllreduce<T>> (*)(AlgorithmOptions const&, Services const&);

// One dense allreduce for every element type.
struct DenseMakers {
  MakeDense<float> f32;
  MakeDense<double> f64;
  MakeDense<Half> f16;
  MakeDense<BFloat16> bf16;
  MakeDense<std::int32_t> i32;
  MakeDense<std::int64_t> i64;
  // The most elements of one message.
  std::uint64_t (*largest_message)(std::uint64_t extent, int ranks);
  bool rounds_once;  // half precision, to T; otherwise at each step

  template <class T>
  std::unique_ptr<DenseAllreduce<T>> make(AlgorithmOptions const& options,
                                          Services const& services) const {
    if constexpr (dtype_of<T>() == DType::f32) return f32(options, services);
    if constexpr (dtype_of<T>() == DType::f64) return f64(options, services);
    if constexpr (dtype_of<T>() == DType::f16) return f16(options, services);
    if constexpr (dtype_of<T>() == DType::bf16) return bf16(options, services);
    if constexpr (dtype_of<T>() == DType::i32) return i32(options, services);
    if constexpr (dtype_of<T>() == DType::i64) return i64(options, services);
  }
};

}  // namespace sparsecomm
