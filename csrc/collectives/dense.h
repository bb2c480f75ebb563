// Dense allreduces: every element, with the same bits on all ranks. All but dense_inner go over the
// same messages as the sparse ones: these carry T, sums are made in accumulate_t<T>, and each
// element is finished by one owner.
//
// dense             Reduce-scatter by pairwise exchange with rotated destinations, then a Bruck
//                   allgather. P-1 + ceil(log2 P) messages. Rounds once. Chan et al. 2007.
// dense_ring        Reduce-scatter and allgather around a ring: 2(P-1) messages, one at a time.
//                   A sum is rounded at each hop. Patarasuk and Yuan 2009.
// dense_rabenseifner Recursive halving, then doubling: 2 log2 P messages; where P is no power of
//                   two, the ranks beyond it hand their vector to a neighbour first and get the
//                   result last, N words more. A sum is rounded at each of the halvings.
//                   Rabenseifner 2004.
// dense_overlap     dense in chunks: the reduce-scatter of a chunk is under way while the former
//                   one is gathered.
// dense_inner       The allreduce of the transport's engine, where it has one. Gloo's is a ring, of
//                   segments of at most 1 MiB, which sums in T; like torch's, it need not give NaN
//                   for the min or max of a NaN and a number.
//
// Each but the folded ranks of dense_rabenseifner receives 2N(P-1)/P elements.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/dtype.h"
#include "collectives/channel.h"
#include "sparse/reduction.h"

namespace sparsecomm {

struct AlgorithmOptions;
struct Cost;
struct CostShape;

template <class T>
class DenseAllreduce {
 public:
  virtual ~DenseAllreduce() = default;
  // Replaces data by the reduction over all ranks, divided by `divisor`. On an exception data is as
  // it was. Calls channel.commit(). A frame of more than 2^32 - 1 bytes throws InvalidArgument.
  virtual void run(Channel& channel, std::span<T> data, Reduction reduction,
                   accumulate_t<T> divisor) = 0;
};

template <class T>
using MakeDense = std::unique_ptr<DenseAllreduce<T>> (*)(AlgorithmOptions const&);

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
  std::unique_ptr<DenseAllreduce<T>> make(AlgorithmOptions const& options) const {
    if constexpr (dtype_of<T>() == DType::f32) return f32(options);
    if constexpr (dtype_of<T>() == DType::f64) return f64(options);
    if constexpr (dtype_of<T>() == DType::f16) return f16(options);
    if constexpr (dtype_of<T>() == DType::bf16) return bf16(options);
    if constexpr (dtype_of<T>() == DType::i32) return i32(options);
    if constexpr (dtype_of<T>() == DType::i64) return i64(options);
  }
};

extern DenseMakers const dense_pairwise;
extern DenseMakers const dense_ring;
extern DenseMakers const dense_rabenseifner;
extern DenseMakers const dense_overlap;
extern DenseMakers const dense_inner;

Cost dense_pairwise_cost(CostShape const& shape, AlgorithmOptions const& options);
Cost dense_ring_cost(CostShape const& shape, AlgorithmOptions const& options);
Cost dense_rabenseifner_cost(CostShape const& shape, AlgorithmOptions const& options);
Cost dense_overlap_cost(CostShape const& shape, AlgorithmOptions const& options);
// Gloo's; predicted, since what an engine sends is not counted.
Cost dense_inner_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
