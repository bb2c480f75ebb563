// The first half of every algorithm that gives each rank a region: a sparse reduce-scatter by P-1
// direct messages. Source: SparCML section 5.3.2; Ok-Topk section 3.1.1 for its order.
#pragma once

#include <span>

#include "collectives/rotated_exchange.h"
#include "collectives/stream_codec.h"

namespace sparsecomm {

template <class V>
class SplitReduce {
 public:
  explicit SplitReduce(AlgorithmOptions const& options)
      : codec_(options), window_(options.window) {}

  // The reduction of all ranks' entries in regions[rank], the own first and then the others' in
  // rotated order. `regions` are the same on every rank, one for each. Valid until the next run().
  SparseStream<V>& run(Channel& channel, SparseView<V> contribution,
                       std::span<const Region> regions, SparseProblem const& problem);

 private:
  StreamCodec<V> codec_;
  int window_;
  ByteBuffer send_, receive_;
  RotatedExchange exchange_;
  SparseStream<V> sum_;
};

// With even regions. A bound has all entries in one region, a prediction as many in each.
Cost split_reduce_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
