// Rabenseifner's allreduce: recursive halving, then recursive doubling.
//
// 1. If P is not a power of two, the even one of each of the first pairs of ranks sends its vector
//    to its neighbour, which works for both, and waits for step 4. A power of two is left.
// 2. Ranks 1, 2, 4, ... apart exchange halves of the range that they still reduce: each keeps one
//    half and adds the peer's sum of it. Each ends with the sum of one range in full, and divides
//    and rounds it.
// 3. The same exchanges backwards, each rank sending the range that it has in full.
// 4. The ranks of step 1 receive the result.
//
// 2 log2 P messages and 2N(P-1)/P elements; a rank that works for two sends and receives one vector
// more. Half precision is rounded at each halving. For small N. Source: Rabenseifner 2004.
#include <bit>

#include "collectives/dense_frames.h"
#include "collectives/entries.h"

namespace sparsecomm {
namespace {

// Of `size` ranks the first 2 (size - cube) form pairs, of which the odd one works for both, so
// that `cube` ranks, a power of two, are left.
struct Fold {
  int size;
  int cube = static_cast<int>(std::bit_floor(static_cast<unsigned>(size)));

  bool paired(int rank) const { return rank < 2 * (size - cube); }
  bool works(int rank) const { return !paired(rank) || rank % 2 == 1; }
  int corner(int rank) const { return paired(rank) ? rank / 2 : rank - (size - cube); }
  int rank_at(int corner) const {
    return corner < size - cube ? 2 * corner + 1 : corner + (size - cube);
  }
};

struct Range {
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  std::uint64_t middle() const { return first + (last - first + 1) / 2; }
  template <class T>
  std::span<T> of(std::span<T> whole) const {
    return whole.subspan(first, last - first);
  }
};

template <class T>
class Rabenseifner final : public DenseAllreduce<T> {
 public:
  using V = accumulate_t<T>;
  using Frames = DenseFrames<T>;

  explicit Rabenseifner(AlgorithmOptions const&) {}

  void run(Channel& channel, std::span<const T> data, Reduction reduction, V divisor) override {
    Fold const fold{channel.size()};
    int const rank = channel.rank();
    Range const whole{0, data.size()};
    auto const outgoing = send_.take(Frames::bytes(data.size()));
    auto const incoming = receive_.take(Frames::bytes(data.size()));
    std::span<T> const result = finished_.take(data.size());
    result_ = result;

    if (!fold.works(rank)) {  // steps 1 and 4
      int const partner = rank + 1;
      Request receive = channel.irecv(partner, Phase::gather, incoming);
      Request send =
          channel.isend(partner, Phase::reduce, Frames::encode_as_is(channel, 0, data, outgoing));
      FrameView const frame = channel.wait_frame(receive, partner, incoming);
      Frames::copy(channel, partner, frame, 0, result);
      channel.wait(send);
      return;
    }

    std::span<V> const sum = sum_.take(data.size());
    Frames::widen(data, sum);
    if (fold.paired(rank)) {  // step 1
      Request receive = channel.irecv(rank - 1, Phase::reduce, incoming);
      FrameView const frame = channel.wait_frame(receive, rank - 1, incoming);
      frames_.reduce(channel, rank - 1, frame, 0, sum, reduction);
    }

    // Step 2. Neighbours first, so that the last and smallest exchanges are the farthest.
    int const corner = fold.corner(rank);
    Range own = whole;
    halves_.clear();
    for (int distance = 1; distance < fold.cube; distance *= 2) {
      int const peer = fold.rank_at(corner ^ distance);
      Range const lower{own.first, own.middle()};
      Range const upper{own.middle(), own.last};
      bool const keep_lower = (corner & distance) == 0;
      Range const kept = keep_lower ? lower : upper;
      Range const given = keep_lower ? upper : lower;
      Request receive = channel.irecv(peer, Phase::reduce, incoming);
      Request send = channel.isend(peer, Phase::reduce,
                                   frames_.encode(channel, given.first, given.of(sum), outgoing));
      FrameView const frame = channel.wait_frame(receive, peer, incoming);
      frames_.reduce(channel, peer, frame, kept.first, kept.of(sum), reduction);
      channel.wait(send);
      halves_.push_back({peer, given});
      own = kept;
    }

    Frames::finish(own.of(sum), divisor, own.of(result));
    // Step 3.
    for (auto half = halves_.rbegin(); half != halves_.rend(); ++half) {
      Request receive = channel.irecv(half->peer, Phase::gather, incoming);
      Request send =
          channel.isend(half->peer, Phase::gather,
                        Frames::encode_as_is(channel, own.first, own.of(result), outgoing));
      FrameView const frame = channel.wait_frame(receive, half->peer, incoming);
      Frames::copy(channel, half->peer, frame, half->given.first, half->given.of(result));
      channel.wait(send);
      own = {std::min(own.first, half->given.first), std::max(own.last, half->given.last)};
    }
    if (fold.paired(rank)) {  // step 4
      Request send = channel.isend(rank - 1, Phase::gather,
                                   Frames::encode_as_is(channel, 0, result, outgoing));
      channel.wait(send);
    }
  }

  void write(std::span<T> out) override { std::ranges::copy(result_, out.begin()); }

 private:
  struct Half {
    int peer;
    Range given;  // what the peer reduces
  };

  ByteBuffer send_, receive_;
  Buffer<V> sum_;
  Buffer<T> finished_;
  std::span<T> result_;
  std::vector<Half> halves_;
  Frames frames_;
};

constexpr DenseMakers dense_rabenseifner_makers =
    MakeDenseOf<Rabenseifner>::makers([](std::uint64_t extent, int ranks) {
      Fold const fold{ranks};
      return fold.cube == fold.size ? (extent + 1) / 2 : extent;
    });

// A rank that works for two receives a whole vector more.
Cost dense_rabenseifner_cost(CostShape const& shape, AlgorithmOptions const&) {
  Fold const fold{shape.ranks};
  double const halvings = std::bit_width(static_cast<unsigned>(fold.cube)) - 1;
  double const folded = fold.cube == fold.size ? 0 : 1;
  auto const extent = static_cast<double>(shape.extent);
  // Each halving may round up by one element.
  double const elements = extent * (fold.cube - 1) / fold.cube + halvings;
  bool const even = shape.extent % static_cast<std::uint64_t>(fold.cube) == 0;
  return {.rounds = 2 * (halvings + folded),
          .messages = 2 * halvings + folded,
          .bytes = 2 * (halvings * header_bytes +
                        (elements - (even ? halvings : 0)) * shape.value_bytes) +
                   folded * (header_bytes + extent * shape.value_bytes),
          .dense_entries = (2 + folded) * extent,
          .exact = folded == 0 && even};
}

}  // namespace

AlgorithmEntry const dense_rabenseifner = {
    .name = "dense_rabenseifner",
    .description = "every element, recursive halving then doubling",
    .words = "2N(P-1)/P",
    .source = "Rabenseifner 2004",
    .cost = dense_rabenseifner_cost,
    .dense = &dense_rabenseifner_makers,
    .fusible = true,
};

}  // namespace sparsecomm
