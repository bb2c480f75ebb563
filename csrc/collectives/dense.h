// Dense allreduce: reduce-scatter by pairwise exchange with rotated destinations, then a Bruck
// allgather. P-1 + log P messages, 2N(P-1)/P words. Each element is summed by one owner in
// accumulate_t and rounded once, so half precision loses nothing on the way and all ranks get the
// same bits. Source: Chan et al. 2007.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

template <class T>
class DenseAllreduce {
 public:
  // Replaces data by the sum over all ranks, divided by `divisor`. On an exception data is as it
  // was.
  void run(Channel& channel, std::span<T> data, accumulate_t<T> divisor);

 private:
  ByteBuffer send_, receive_, own_;
  std::vector<accumulate_t<T>> sum_;
  std::vector<T> incoming_;
  FrameAllgather gather_;
};

Cost dense_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
