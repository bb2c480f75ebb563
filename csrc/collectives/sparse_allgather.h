// Allgather of sparse vectors: every rank gets every rank's entries, explicit zeros included.
//
// A Bruck allgather of one frame per rank: ceil(log2 P) messages, 2k(P-1) words. Source: the
// concatenation of disjoint streams in SparCML section 5.2; Bruck et al. 1997.
#pragma once

#include "collectives/algorithm.h"
#include "collectives/frame_allgather.h"

namespace sparsecomm {

// V is float, double, std::int32_t or std::int64_t.
template <class V>
class SparseAllgather {
 public:
  explicit SparseAllgather(FrameOptions const& frame = {}) : frame_(frame) {
    frame_.allow_dense = false;  // an entry that is zero is an entry
  }

  // `own` has indices below `extent` (< 2^32) and at most `limit` entries; both numbers are the
  // same on every rank. Element r of the result is rank r's vector. Valid until the next run(), the
  // own element as long as `own`. Throws PeerInvalid where a rank's frame is malformed or has more
  // than `limit` entries.
  std::span<const SparseView<V>> run(Channel& channel, SparseView<V> own, std::uint64_t extent,
                                     std::uint64_t limit);

 private:
  FrameOptions frame_;
  ByteBuffer send_;
  FrameAllgather gather_;
  std::vector<std::uint32_t> indices_;  // of all other ranks, one behind the other
  std::vector<V> values_;
  std::vector<std::size_t> ends_;
  std::vector<SparseView<V>> views_;
};

// shape.k: the entries of the longest vector. What is counted with the codec raw32, where all are
// as long; otherwise a bound.
Cost sparse_allgather_cost(CostShape const& shape);

}  // namespace sparsecomm
