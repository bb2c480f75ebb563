// Reduce-scatter and allgather around a ring.
//
// 1. The vector is split into P even parts. In round s = 0 .. P-2 a rank sends its partial sum of
//    part rank - s to the rank after it, receives that of part rank - s - 1 and adds its own. It
//    ends with part rank + 1 in full, and divides and rounds it.
// 2. In round s = 0 .. P-2 a rank passes on the finished part rank + 1 - s and receives the part
//    before that.
//
// With P = 3, part 0: 0 -> 1 -> 2 sums, 2 -> 0 -> 1 spreads. 2(P-1) messages that wait for one
// another, as a round sends what the round before it received; 2N(P-1)/P elements, all between
// neighbours. A round is not pipelined: a rank encodes, waits and adds in turn. Half precision is
// rounded at each hop. Source: Patarasuk and Yuan 2009.
#include <cmath>

#include "collectives/dense_frames.h"
#include "collectives/entries.h"
#include "collectives/patterns.h"

namespace sparsecomm {
namespace {

template <class T>
class Ring final : public DenseAllreduce<T> {
 public:
  using V = accumulate_t<T>;
  using Frames = DenseFrames<T>;

  explicit Ring(AlgorithmOptions const&) {}

  void run(Channel& channel, std::span<const T> data, Reduction reduction, V divisor) override {
    int const size = channel.size();
    int const rank = channel.rank();
    auto const first = [&](int part) { return even_split(data.size(), size, part); };
    auto const part_of = [&](int number, auto whole) {
      int const part = (number % size + size) % size;
      return whole.subspan(first(part), first(part + 1) - first(part));
    };
    auto const first_of = [&](int number) { return first((number % size + size) % size); };
    int const right = (rank + 1) % size;
    int const left = (rank - 1 + size) % size;
    std::size_t const max_frame = Frames::bytes(part_of(0, data).size());
    auto const incoming = receive_.take(max_frame);
    auto const outgoing = send_.take(max_frame);

    std::span<V> const sum = sum_.take(data.size());
    Frames::widen(data, sum);
    // Step 1.
    for (int step = 0; step < size - 1; ++step) {
      Request receive = channel.irecv(left, Phase::reduce, incoming);
      Request send = channel.isend(
          right, Phase::reduce,
          frames_.encode(channel, first_of(rank - step), part_of(rank - step, sum), outgoing));
      FrameView const frame = channel.wait_frame(receive, left, incoming);
      int const part = rank - step - 1;
      frames_.reduce(channel, left, frame, first_of(part), part_of(part, sum), reduction);
      channel.wait(send);
    }

    result_ = finished_.take(data.size());
    Frames::finish(part_of(rank + 1, sum), divisor, part_of(rank + 1, result_));
    // Step 2.
    for (int step = 0; step < size - 1; ++step) {
      Request receive = channel.irecv(left, Phase::gather, incoming);
      int const sent = rank + 1 - step;
      Request send = channel.isend(
          right, Phase::gather,
          Frames::encode_as_is(channel, first_of(sent), part_of(sent, result_), outgoing));
      FrameView const frame = channel.wait_frame(receive, left, incoming);
      Frames::copy(channel, left, frame, first_of(rank - step), part_of(rank - step, result_));
      channel.wait(send);
    }
  }

  void write(std::span<T> out) override { std::ranges::copy(result_, out.begin()); }

 private:
  ByteBuffer send_, receive_;
  Buffer<V> sum_;
  Buffer<T> finished_;
  std::span<T> result_;
  Frames frames_;
};

constexpr DenseMakers dense_ring_makers = MakeDenseOf<Ring>::makers(
    [](std::uint64_t extent, int ranks) { return (extent + ranks - 1) / ranks; });

Cost dense_ring_cost(CostShape const& shape, AlgorithmOptions const&) {
  double const steps = 2.0 * (shape.ranks - 1);
  double const region = std::ceil(static_cast<double>(shape.extent) / shape.ranks);
  return {.rounds = steps,
          .messages = steps,
          .bytes = steps * (header_bytes + region * shape.value_bytes),
          .dense_entries = 2.0 * static_cast<double>(shape.extent),
          .exact = shape.extent % static_cast<std::uint64_t>(shape.ranks) == 0};
}

}  // namespace

AlgorithmEntry const dense_ring = {
    .name = "dense_ring",
    .description = "every element, reduce-scatter and allgather around a ring",
    .words = "2N(P-1)/P",
    .source = "Patarasuk and Yuan 2009",
    .cost = dense_ring_cost,
    .dense = &dense_ring_makers,
};

}  // namespace sparsecomm
