#include "collectives/dense.h"

#include <algorithm>

#include "collectives/patterns.h"

namespace sparsecomm {

template <class T>
void DenseAllreduce<T>::run(Channel& channel, std::span<T> data, accumulate_t<T> divisor) {
  using V = accumulate_t<T>;
  int const rank = channel.rank();
  int const size = channel.size();
  auto const first = [&](int part) { return even_split(data.size(), size, part); };
  auto const region = [&](int part) {
    return data.subspan(first(part), first(part + 1) - first(part));
  };
  std::size_t const max_frame =
      header_bytes + region(0).size_bytes();  // the first part is the largest
  std::vector<Request> sends;
  auto const outgoing = send_.take(max_frame * (size - 1));
  auto const incoming = receive_.take(max_frame);

  auto const own = region(rank);
  sum_.resize(own.size());
  std::ranges::transform(own, sum_.begin(), [](T x) { return static_cast<V>(x); });
  incoming_.resize(own.size());
  for (int step = 1; step < size; ++step) {
    int const source = rotated_source(rank, step, size);
    int const destination = rotated_destination(rank, step, size);
    Request receive = channel.irecv(source, Phase::reduce, incoming);
    auto const frame = outgoing.subspan((step - 1) * max_frame, max_frame);
    std::size_t const length =
        encode_dense<T>(channel.operation(), static_cast<std::uint32_t>(first(destination)),
                        region(destination), frame);
    sends.push_back(channel.isend(destination, Phase::reduce, frame.first(length)));
    FrameView const view = channel.wait_frame(receive, source, incoming);
    channel.decode_from(source, [&] {
      decode_dense<T>(view, static_cast<std::uint32_t>(first(rank)), std::span(incoming_));
    });
    for (std::size_t i = 0; i < sum_.size(); ++i) sum_[i] += static_cast<V>(incoming_[i]);
  }
  channel.wait_all(sends);

  std::ranges::transform(sum_, incoming_.begin(), [&](V x) { return static_cast<T>(x / divisor); });
  auto const share = own_.take(max_frame);
  std::size_t const length =
      encode_dense<T>(channel.operation(), static_cast<std::uint32_t>(first(rank)),
                      std::span<const T>(incoming_), share);
  auto const frames = gather_.run(channel, Phase::gather, share.first(length), max_frame);
  for (int part = 0; part < size; ++part) {
    // parse_frame has vouched for the payload; a region of another place or size is caught before
    // any write.
    channel.decode_from(part, [&] {
      FrameHeader const& header = frames[part].header;
      require<MalformedFrame>(
          header.kind == FrameKind::dense && header.dtype == dtype_of<T>() &&
              header.first_index == first(part) && header.count == region(part).size(),
          "kind ", int(header.kind), ", dtype ", name(header.dtype), ", first_index ",
          header.first_index, ", count ", header.count, " are not region ", part, " of ",
          data.size(), " elements of ", name(dtype_of<T>()));
    });
  }
  for (int part = 0; part < size; ++part) {
    decode_dense<T>(frames[part], static_cast<std::uint32_t>(first(part)), region(part));
  }
}

template class DenseAllreduce<float>;
template class DenseAllreduce<double>;
template class DenseAllreduce<Half>;
template class DenseAllreduce<BFloat16>;

Cost dense_cost(CostShape const& shape, AlgorithmOptions const&) {
  double const region = std::ceil(static_cast<double>(shape.extent) / shape.ranks);
  double const frame = header_bytes + region * shape.value_bytes;
  Cost cost = allgather_cost(shape.ranks, frame);
  cost.rounds += shape.ranks - 1;
  cost.messages += shape.ranks - 1;
  cost.entries = 2.0 * static_cast<double>(shape.extent);
  cost.bytes += (shape.ranks - 1) * frame;
  return cost;
}

}  // namespace sparsecomm
