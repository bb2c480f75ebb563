// Reduce-scatter of sparse vectors: rank r gets the reduction of region r.
//
// Every rank sends its part of region j straight to rank j, destinations rotated (Ok-Topk Figure
// 2b), and reduces what comes for its own region a window of receives at a time. P-1 messages;
// 2k(P-1)/P words where every contribution has an even share in each region, 2k(P-1) at most.
// Source: the split phase of SparCML section 5.3.2; Ok-Topk section 3.1.1.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

// V is float, double, std::int32_t or std::int64_t.
template <class V>
class SparseReduceScatter {
 public:
  explicit SparseReduceScatter(AlgorithmOptions const& options = {}) : options_(options) {}

  // The reduction of region rank(), with indices of the whole range. Region r starts at
  // boundaries[r - 1]: size() - 1 ascending positions, the same on every rank; where none are given
  // the regions are even. The region is reduced in the order of the ranks from the own one
  // downwards. Valid until the next run(). Throws PeerInvalid where a rank's frame is malformed.
  SparseStream<V>& run(Channel& channel, SparseView<V> contribution, SparseProblem const& problem,
                       std::span<const std::uint32_t> boundaries = {});

 private:
  AlgorithmOptions options_;
  std::vector<std::uint64_t> starts_;  // region r is [starts_[r], starts_[r + 1])
  SparseStream<V> sum_;
  ByteBuffer send_, receive_;
  std::vector<std::uint32_t> indices_;
  std::vector<V> values_;
  std::vector<Request> sends_, receives_;
};

// With even shares: what is counted with the codec raw32 where they are exactly even and no part is
// smaller as a dense frame.
Cost sparse_reduce_scatter_cost(CostShape const& shape);

}  // namespace sparsecomm
