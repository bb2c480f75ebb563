#include "collectives/split_reduce.h"

#include <algorithm>
#include <cmath>

namespace sparsecomm {

template <class V>
SparseStream<V>& SplitReduce<V>::run(Channel& channel, SparseView<V> contribution,
                                     std::span<const Region> regions,
                                     SparseProblem const& problem) {
  int const rank = channel.rank();
  int const size = channel.size();
  codec_.begin(problem);
  Region const own = regions[rank];
  auto const part = [&](int owner) {
    return contribution.range(regions[owner].first, regions[owner].last);
  };
  codec_.reset(sum_, own);
  sum_.add(part(rank));
  if (size == 1) return sum_;

  std::uint64_t const most = codec_.most(1);
  std::size_t const max_receive = codec_.max_bytes(own, most);
  int const posted = RotatedExchange::two_windows(window_, size);
  std::size_t send_bytes = 0;
  for (int owner = 0; owner < size; ++owner) {
    send_bytes += codec_.max_bytes(regions[owner], part(owner).nnz());
  }
  exchange_.run(
      channel,
      {.outgoing = send_.take(send_bytes),
       .incoming = receive_.take(posted * max_receive),
       .max_frame = max_receive,
       .sends = posted},
      [&](int owner, std::span<std::byte> room) {
        return codec_.encode(channel, regions[owner], {.sparse = part(owner)}, room);
      },
      [&](int source, FrameView const& frame) {
        sum_.add_stream(codec_.decode(channel, source, frame, own, most));
      });
  return sum_;
}

template class SplitReduce<float>;
template class SplitReduce<double>;
template class SplitReduce<std::int32_t>;
template class SplitReduce<std::int64_t>;

Cost split_reduce_cost(CostShape const& shape, AlgorithmOptions const& options) {
  double const peers = shape.ranks - 1;
  auto const k = static_cast<double>(shape.k);
  double const region = std::ceil(static_cast<double>(shape.extent) / shape.ranks);
  double const part = shape.predicts() ? k / shape.ranks : std::min(k, region);
  // Encoded once, decoded, and merged into the sum of a region, which grows.
  double merging = 0;
  for (int ranks = 1; ranks <= shape.ranks; ++ranks) merging += shape.merged(ranks) / shape.ranks;
  return {.rounds = shape.ranks > 1 ? 1.0 : 0.0,
          .messages = peers,
          .bytes = peers * (header_bytes + stream_bytes(shape, options, part, region)),
          .entries = 2 * k + merging};
}

}  // namespace sparsecomm
