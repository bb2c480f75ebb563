#include "collectives/sparse_allgather.h"

#include "collectives/pair_frames.h"

namespace sparsecomm {

template <class V>
std::span<const SparseView<V>> SparseAllgather<V>::run(Channel& channel, SparseView<V> own,
                                                       std::uint64_t extent, std::uint64_t limit) {
  views_.assign(channel.size(), own);
  if (channel.size() == 1) return views_;
  auto const range = static_cast<std::uint32_t>(extent);
  std::size_t const capacity = max_sparse_frame_bytes<V>(limit, range);
  auto const frame = send_.take(capacity);
  std::size_t const length =
      encode_sparse<V>(channel.stamp(), 0, range, own.indices, own.values, frame_, frame);
  auto const frames = gather_.run(channel, Phase::gather, frame.first(length), capacity);

  indices_.clear();
  values_.clear();
  ends_.clear();
  for (int rank = 0; rank < channel.size(); ++rank) {
    if (rank != channel.rank()) {
      decode_pairs(channel, rank, frames[rank], 0, range, limit, indices_, values_);
    }
    ends_.push_back(indices_.size());
  }
  SparseView<V> const all{indices_, values_};
  for (int rank = 0; rank < channel.size(); ++rank) {
    if (rank != channel.rank())
      views_[rank] = all.slice(rank == 0 ? 0 : ends_[rank - 1], ends_[rank]);
  }
  return views_;
}

template class SparseAllgather<float>;
template class SparseAllgather<double>;
template class SparseAllgather<std::int32_t>;
template class SparseAllgather<std::int64_t>;

Cost sparse_allgather_cost(CostShape const& shape) {
  if (shape.ranks == 1) return {};
  auto const k = static_cast<double>(shape.k);
  Cost cost = allgather_cost(shape.ranks, header_bytes + k * shape.pair_bytes());
  cost.entries = k * shape.ranks;  // encoded once, decoded P - 1 times
  return cost;
}

}  // namespace sparsecomm
