// Recursive doubling of sparse streams.
//
// 1. If P is not a power of two, the ranks beyond the largest one below P send their entries to
//    the rank that many places before them, which adds them to its own, and wait for step 3.
// 2. In round t = 0, 1, ... ranks 2^t apart exchange all they have reduced so far. Both add in rank
//    order, and so hold the same bits.
// 3. The ranks of step 1 receive the result.
//
// log2 P messages if P is a power of two, else log2 P + 2 rounds; 2k log2 P words if the ranks
// share their positions, 2k(P-1) if they share none, and never much more than N log2 P, since
// streams denser than delta are sent dense. Few messages: for small k. Source: SparCML
// section 5.3.1.
#include <algorithm>
#include <utility>

#include "collectives/entries.h"
#include "collectives/stream_codec.h"

namespace sparsecomm {
namespace {

template <class V>
class SsarRecursiveDouble final : public SparseAllreduce<V> {
 public:
  explicit SsarRecursiveDouble(AlgorithmOptions const& options) : codec_(options) {}

  AllreduceResult<V> run(Channel& channel, SparseView<V> contribution,
                         SparseProblem const& problem) override {
    int const rank = channel.rank();
    int const core = core_ranks(channel.size());
    whole_ = {0, problem.extent};
    codec_.begin(problem);
    // The largest first, so that what cannot be sent is refused on every rank before any message.
    auto const incoming = receive_.take(capacity(channel.size()));
    codec_.reset(sum_, whole_);
    sum_.add(contribution);
    if (rank >= core) {  // steps 1 and 3
      Request send = post(channel, rank - core, Phase::reduce);
      channel.wait(send);
      codec_.reset(sum_, whole_);
      receive(channel, rank - core, Phase::gather, channel.size(), incoming, sum_);
      return {.reduced = sum_.view(), .rejected = {}};
    }
    bool const folds = rank + core < channel.size();
    if (folds) receive(channel, rank + core, Phase::reduce, 1, incoming, sum_);  // step 1
    // Step 2.
    for (int distance = 1; distance < core; distance *= 2) {
      int const partner = rank ^ distance;
      int const theirs = folded_ranks(partner & ~(distance - 1), distance, channel.size());
      Request send = post(channel, partner, Phase::reduce);
      // Both combine in the same order, that of ranks, and so get the same bits.
      if (rank < partner) {
        receive(channel, partner, Phase::reduce, theirs, incoming, sum_);
      } else {
        codec_.reset(merged_, whole_);
        receive(channel, partner, Phase::reduce, theirs, incoming, merged_);
        merged_.add_stream(sum_.view());
        std::swap(sum_, merged_);
      }
      channel.wait(send);
    }
    if (folds) {  // step 3
      Request send = post(channel, rank + core, Phase::gather);
      channel.wait(send);
    }
    return {.reduced = sum_.view(), .rejected = {}};
  }

 private:
  std::size_t capacity(int ranks) const { return codec_.max_bytes(whole_, codec_.most(ranks)); }
  Request post(Channel& channel, int peer, Phase phase) {
    auto const out = send_.take(codec_.max_bytes(whole_, sum_.nnz()));
    return channel.isend(peer, phase, codec_.encode(channel, whole_, sum_.view(), out));
  }
  void receive(Channel& channel, int peer, Phase phase, int ranks, std::span<std::byte> buffer,
               SparseStream<V>& sum) {
    auto const incoming = buffer.first(capacity(ranks));
    Request request = channel.irecv(peer, phase, incoming);
    FrameView const frame = channel.wait_frame(request, peer, incoming);
    sum.add_stream(codec_.decode(channel, peer, frame, whole_, codec_.most(ranks)));
  }

  StreamCodec<V> codec_;
  Region whole_;
  ByteBuffer send_, receive_;
  SparseStream<V> sum_, merged_;
};

// Of rank 0, which folds where any does, or of the rank that it folds, which gets the whole result
// at once.
Cost ssar_recursive_double_cost(CostShape const& shape, AlgorithmOptions const& options) {
  if (shape.ranks == 1) return {.exact = true};
  int const core = core_ranks(shape.ranks);
  bool const folds = core < shape.ranks;
  auto const extent = static_cast<double>(shape.extent);
  Cost cost;
  // Of so many ranks, in two halves.
  auto const entries_of = [&](int ranks) {
    return joined_entries(shape, options, ranks, ranks - ranks / 2);
  };
  auto const receive = [&](int theirs, int together) {
    ++cost.rounds;
    cost.bytes += header_bytes + stream_bytes(shape, options, entries_of(theirs), extent);
    cost.entries += 2 * shape.merged(theirs) + shape.merged(together);
  };
  int held = 1;
  if (folds) receive(1, ++held);
  for (int distance = 1; distance < core; distance *= 2) {
    int const theirs = folded_ranks(distance, distance, shape.ranks);
    receive(theirs, held += theirs);
    ++cost.messages;
  }
  if (folds) {
    ++cost.rounds;
    ++cost.messages;
    double const whole = stream_bytes(shape, options, entries_of(shape.ranks), extent);
    cost.bytes = std::max(cost.bytes, header_bytes + whole);
    cost.entries += 2 * shape.merged(shape.ranks);
  }
  return cost;
}

}  // namespace

AlgorithmEntry const ssar_recursive_double = {
    .name = "ssar_recursive_double",
    .description = "exchange of all reduced so far with ranks 1, 2, 4, ... away",
    .words = "2k log P to 2k(P-1)",
    .source = "SparCML section 5.3.1",
    .sparse = true,
    .cost = ssar_recursive_double_cost,
    .make = MakeSparseOf<SsarRecursiveDouble>::all,
    .fusible = true,
};

}  // namespace sparsecomm
