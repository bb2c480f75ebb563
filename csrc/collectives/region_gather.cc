#include "collectives/region_gather.h"

#include <algorithm>
#include <cmath>

#include "collectives/split_reduce.h"

namespace sparsecomm {

template <class V>
StreamView<V> RegionGather<V>::run(Channel& channel, StreamView<V> const& own,
                                   std::span<const Region> regions, SparseProblem const& problem,
                                   std::uint64_t most, ValueCodec dense_codec) {
  codec_.begin(problem);
  std::size_t const capacity = codec_.max_bytes(regions, most);
  Region const& region = regions[channel.rank()];
  auto const frame = codec_.encode(channel, region, own, send_.take(capacity), dense_codec);
  return assemble(channel, gather_.run(channel, Phase::gather, frame, capacity), regions, problem,
                  most);
}

template <class V>
StreamView<V> RegionGather<V>::assemble(Channel& channel, std::span<const FrameView> frames,
                                        std::span<const Region> regions,
                                        SparseProblem const& problem, std::uint64_t most) {
  codec_.begin(problem);
  std::uint64_t entries = 0;
  for (FrameView const& frame : frames) entries += frame.header.count;
  if (entries > sparse_limit<V>(options_, problem.extent)) {
    dense_values_.resize(problem.extent);
    for (int rank = 0; rank < channel.size(); ++rank) {
      Region const& region = regions[rank];
      codec_.decode_dense(channel, rank, frames[rank], region, most,
                          std::span(dense_values_).subspan(region.first, region.extent()));
    }
    return {.dense = dense_values_, .is_dense = true};
  }
  indices_.clear();
  values_.clear();
  for (int rank = 0; rank < channel.size(); ++rank) {
    codec_.append_pairs(channel, rank, frames[rank], regions[rank], most, indices_, values_);
  }
  return {.sparse = {indices_, values_}};
}

template class RegionGather<float>;
template class RegionGather<double>;
template class RegionGather<std::int32_t>;
template class RegionGather<std::int64_t>;

Cost region_gather_cost(CostShape const& shape, AlgorithmOptions const& options, double entries) {
  auto const extent = static_cast<double>(shape.extent);
  double const own = shape.predicts() ? extent / shape.ranks
                                      : std::floor(extent / static_cast<double>(shape.ranks));
  double const received = shape.predicts() ? entries * (shape.ranks - 1) / shape.ranks : entries;
  Cost cost = allgather_cost(shape.ranks, header_bytes);
  cost.bytes += stream_bytes(shape, options, received, extent - own);
  cost.entries = entries * (1 + 1.0 / shape.ranks);
  return cost;
}

Cost split_allgather_cost(CostShape const& shape, AlgorithmOptions const& options, double entries) {
  if (shape.ranks == 1) return {.exact = true};
  Cost cost = split_reduce_cost(shape, options) + region_gather_cost(shape, options, entries);
  if (!shape.predicts()) {
    // What a rank receives of others' entries in its own region is not received in the second half.
    double const headers = 2 * (shape.ranks - 1.0) * header_bytes;
    double const all = static_cast<double>(shape.k) * shape.ranks;
    cost.bytes = std::min(cost.bytes, headers + stream_bytes(shape, options, all, HUGE_VAL));
  }
  return cost;
}

}  // namespace sparsecomm
