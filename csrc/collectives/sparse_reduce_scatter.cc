#include "collectives/sparse_reduce_scatter.h"

#include <algorithm>
#include <cmath>

#include "collectives/patterns.h"

namespace sparsecomm {

template <class V>
SparseStream<V>& SparseReduceScatter<V>::run(Channel& channel, SparseView<V> contribution,
                                             SparseProblem const& problem,
                                             std::span<const std::uint32_t> boundaries) {
  int const rank = channel.rank();
  int const size = channel.size();
  require(boundaries.empty() || boundaries.size() + 1 == static_cast<std::size_t>(size),
          "reduce-scatter: ", boundaries.size(), " boundaries do not make ", size, " regions");
  starts_.assign(1, 0);
  for (int part = 1; part < size; ++part) {
    starts_.push_back(boundaries.empty() ? even_split(problem.extent, size, part)
                                         : boundaries[part - 1]);
  }
  starts_.push_back(problem.extent);
  require(std::ranges::is_sorted(starts_),
          "reduce-scatter: the boundaries are not an ascending split of ", problem.extent);

  auto const first = static_cast<std::uint32_t>(starts_[rank]);
  auto const length = static_cast<std::uint32_t>(starts_[rank + 1] - starts_[rank]);
  auto const part_of = [&](int part) {
    return contribution.range(starts_[part], starts_[part + 1]);
  };
  sum_.reset(first, length, default_delta<V>(length), problem.reduction);
  sum_.add(part_of(rank));
  if (size == 1) return sum_;

  std::size_t const max_receive =
      max_sparse_frame_bytes<V>(std::min<std::uint64_t>(problem.limit, length), length);
  int const window = std::min(options_.window, size - 1);
  auto const incoming = receive_.take(2 * window * max_receive);
  auto const receive_buffer = [&](int step) {
    return incoming.subspan((step - 1) % (2 * window) * max_receive, max_receive);
  };
  std::size_t send_bytes = 0;
  for (int part = 0; part < size; ++part) {
    send_bytes += max_sparse_frame_bytes<V>(part_of(part).nnz(), starts_[part + 1] - starts_[part]);
  }
  auto outgoing = send_.take(send_bytes);
  FrameOptions const frame = frame_options(options_, problem);
  sends_.clear();
  receives_.assign(size, {});
  auto const post = [&](int begin, int end) {
    for (int step = begin; step < std::min(end, size); ++step) {
      receives_[step] =
          channel.irecv(rotated_source(rank, step, size), Phase::reduce, receive_buffer(step));
    }
    for (int step = begin; step < std::min(end, size); ++step) {
      int const destination = rotated_destination(rank, step, size);
      SparseView<V> const part = part_of(destination);
      std::uint64_t const start = starts_[destination];
      std::size_t const bytes =
          encode_sparse<V>(channel.operation(), static_cast<std::uint32_t>(start),
                           static_cast<std::uint32_t>(starts_[destination + 1] - start),
                           part.indices, part.values, frame, outgoing);
      sends_.push_back(channel.isend(destination, Phase::reduce, outgoing.first(bytes)));
      outgoing = outgoing.subspan(bytes);
    }
  };

  post(1, 1 + window);
  for (int begin = 1; begin < size; begin += window) {
    post(begin + window, begin + 2 * window);
    for (int step = begin; step < std::min(begin + window, size); ++step) {
      int const source = rotated_source(rank, step, size);
      FrameView const view = channel.wait_frame(receives_[step], source, receive_buffer(step));
      indices_.clear();
      values_.clear();
      channel.decode_from(source,
                          [&] { decode_sparse<V>(view, first, length, indices_, values_); });
      sum_.add({indices_, values_});
    }
  }
  channel.wait_all(sends_);
  return sum_;
}

template class SparseReduceScatter<float>;
template class SparseReduceScatter<double>;
template class SparseReduceScatter<std::int32_t>;
template class SparseReduceScatter<std::int64_t>;

Cost sparse_reduce_scatter_cost(CostShape const& shape) {
  if (shape.ranks == 1) return {.entries = static_cast<double>(shape.k)};
  double const peers = shape.ranks - 1;
  double const share = std::ceil(static_cast<double>(shape.k) / shape.ranks);
  Cost cost{.rounds = 1,
            .messages = peers,
            .bytes = peers * (header_bytes + share * (shape.index_bytes + shape.value_bytes)),
            .entries = 2 * peers * share};
  for (int rank = 1; rank <= shape.ranks; ++rank) cost.entries += shape.merged(rank) / shape.ranks;
  return cost;
}

}  // namespace sparsecomm
