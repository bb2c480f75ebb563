// gTop-k: a reduction up a binomial tree that keeps k entries at each rank, and a broadcast down
// it.
//
// 1. Each rank cuts its selection to the k largest.
// 2. Rank r receives from r + 1, r + 2, r + 4, ..., up to its own lowest set bit, adds each to what
//    it holds and cuts the sum to the k largest. It then sends that to r without its lowest set
//    bit.
// 3. The root's entries are the result. Each rank sends the frame that it got to its children, the
//    farthest first, since its subtree is the deepest, and one after the other: sends that share
//    the link all end late, so that log2 P levels of them take O(log^2 P) times as long as one.
//
// What a rank cuts it returns as rejected, so that nothing is lost, which it would be if only the
// selections that missed the result were kept. Any P; 2 ceil(log2 P) rounds of 2k words. The result
// has k entries, but not those of TopK(sum): a sum that is small in every subtree is cut before its
// parts meet. Sources: Shi et al. 2019, Ok-Topk Table 1.
#include <utility>

#include "collectives/entries.h"
#include "collectives/pair_frames.h"
#include "collectives/pairs.h"
#include "collectives/patterns.h"

namespace sparsecomm {
namespace {

template <class V>
class GTopK final : public SparseAllreduce<V> {
 public:
  explicit GTopK(AlgorithmOptions const& options) : options_(options) {}

  AllreduceResult<V> run(Channel& channel, SparseView<V> selection,
                         SparseProblem const& problem) override {
    int const rank = channel.rank();
    int const size = channel.size();
    auto const extent = static_cast<std::uint32_t>(problem.extent);
    std::size_t const max_frame =
        max_sparse_frame_bytes<V>(std::min(problem.k, problem.limit), extent);
    auto const incoming = receive_.take(max_frame);
    rejected_.reset(0, extent, extent);
    result_.clear();
    cut(selection, problem.k, result_);

    int distance = 1;
    for (; distance < size && (rank & distance) == 0; distance *= 2) {
      int const child = rank + distance;
      if (child >= size) continue;
      Request receive = channel.irecv(child, Phase::reduce, incoming);
      take(channel, child, channel.wait_frame(receive, child, incoming), problem);
      sum_.reset(0, extent, extent);
      sum_.add(result_.view());
      sum_.add(incoming_.view());
      result_.clear();
      cut(sum_.sparse(), problem.k, result_);
    }

    std::span<const std::byte> frame;
    if (rank == 0) {
      frame = encode(channel, extent, max_frame);
      // As the others see it: a dense frame drops zeros.
      if (size > 1) take(channel, rank, parse_frame(frame, channel.stamp()), problem);
    } else {
      int const parent = rank - distance;
      Request send = channel.isend(parent, Phase::reduce, encode(channel, extent, max_frame));
      Request receive = channel.irecv(parent, Phase::gather, incoming);
      FrameView const arrived = channel.wait_frame(receive, parent, incoming);
      take(channel, parent, arrived, problem);
      channel.wait(send);
      frame = incoming.first(arrived.size());
    }
    if (size > 1) std::swap(result_, incoming_);
    for (distance /= 2; distance > 0; distance /= 2) {
      if (rank + distance >= size) continue;
      Request send = channel.isend(rank + distance, Phase::gather, frame);
      channel.wait(send);
    }
    return {.reduced = {.sparse = result_.view()}, .rejected = rejected_.sparse()};
  }

 private:
  void cut(SparseView<V> view, std::uint64_t k, Pairs<V>& kept) {
    rest_.clear();
    top_k_.cut(view, k, kept, &rest_);
    rejected_.add(rest_.view());
  }
  std::span<const std::byte> encode(Channel const& channel, std::uint32_t extent,
                                    std::size_t max_frame) {
    auto const out = send_.take(max_frame);
    return out.first(encode_sparse<V>(channel.stamp(), 0, extent, result_.indices, result_.values,
                                      options_.frame, out));
  }
  void take(Channel& channel, int peer, FrameView const& frame, SparseProblem const& problem) {
    incoming_.clear();
    decode_pairs(channel, peer, frame, 0, static_cast<std::uint32_t>(problem.extent), problem.k,
                 incoming_.indices, incoming_.values);
  }

  AlgorithmOptions options_;
  SparseStream<V> sum_, rejected_;
  Pairs<V> result_, incoming_, rest_;
  TopK<V> top_k_;
  ByteBuffer send_, receive_;
};

// The root receives a selection in each round up; the result then crosses as many links down.
Cost gtopk_cost(CostShape const& shape, AlgorithmOptions const&) {
  double const rounds = bruck_rounds(shape.ranks);
  auto const k = static_cast<double>(shape.k);
  double const frame = header_bytes + k * shape.pair_bytes();
  return {.rounds = 2 * rounds,
          .messages = rounds,
          .bytes = rounds * frame,
          .awaited_bytes = rounds * frame,
          .entries = k * (2 + 4 * rounds)};
}

}  // namespace

AlgorithmEntry const gtopk = {
    .name = "gtopk",
    .description = "summed up a tree, cut to the k largest at each rank, and sent down",
    .words = "2k log2 P",
    .source = "Shi et al. 2019, Ok-Topk Table 1",
    .sparse = true,
    .top_k_result = true,
    .cost = gtopk_cost,
    .make = MakeSparseOf<GTopK>::floating,
};

}  // namespace sparsecomm
