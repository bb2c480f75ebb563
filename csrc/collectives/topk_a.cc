// Allgather of all selections, each rank summing all of them.
//
// 1. Each rank encodes its selection as one frame; with a lossy value codec it rounds the values
//    first and rejects what rounding took.
// 2. A Bruck allgather passes every frame to every rank.
// 3. Each rank decodes all frames, its own too, and sums them in rank order, so that all get the
//    same bits. The sum turns dense beyond delta.
//
// ceil(log2 P) messages, 2k(P-1) words: quick for small k P, and linear in P. gaussian_k is the
// same exchange of selections made by another threshold. Sources: Ok-Topk Table 1 (TopkA), SparCML
// section 8.1.
#include <algorithm>

#include "collectives/entries.h"
#include "collectives/frame_allgather.h"
#include "collectives/pair_frames.h"
#include "collectives/rounding.h"

namespace sparsecomm {
namespace {

template <class V>
class TopkA final : public SparseAllreduce<V> {
 public:
  explicit TopkA(AlgorithmOptions const& options)
      : options_(options), rounding_(options.frame.value_codec) {}

  AllreduceResult<V> run(Channel& channel, SparseView<V> selection,
                         SparseProblem const& problem) override {
    auto const extent = static_cast<std::uint32_t>(problem.extent);
    std::size_t const capacity = max_sparse_frame_bytes<V>(problem.limit, extent);
    auto const own = send_.take(capacity);
    rejected_.clear();
    // Step 1.
    SparseView<V> sent = selection;
    if (rounding_.lossy()) {
      rounded_.assign(selection.values.begin(), selection.values.end());
      rounding_.begin(channel.rank(), problem.step);
      rounding_.round(rounded_);
      sent.values = rounded_;
      push_errors<V>(selection, rounded_, rejected_);
    }
    std::size_t const length = encode_sparse<V>(channel.stamp(), 0, extent, sent.indices,
                                                sent.values, frame_options(options_, problem), own);
    // Step 2.
    auto const frames = gather_.run(channel, Phase::gather, own.first(length), capacity);
    // Step 3.
    sum_.reset(0, extent, sparse_limit<V>(options_, extent), problem.reduction);
    for (int rank = 0; rank < channel.size(); ++rank) {
      indices_.clear();
      values_.clear();
      decode_pairs(channel, rank, frames[rank], 0, extent, problem.limit, indices_, values_);
      sum_.add({indices_, values_});
    }
    return {.reduced = sum_.view(), .rejected = rejected_.view()};
  }

 private:
  AlgorithmOptions options_;
  Rounding<V> rounding_;
  std::vector<V> rounded_;
  Pairs<V> rejected_;
  ByteBuffer send_;
  FrameAllgather gather_;
  std::vector<std::uint32_t> indices_;
  std::vector<V> values_;
  SparseStream<V> sum_;
};

// Counted where all contributions have k entries.
Cost topk_a_cost(CostShape const& shape, AlgorithmOptions const&) {
  auto const k = static_cast<double>(shape.k);
  double const payload =
      std::min(k * shape.pair_bytes(), static_cast<double>(shape.extent) * shape.value_bytes);
  Cost cost = allgather_cost(shape.ranks, header_bytes + payload);
  cost.exact = true;
  // Encoded once, decoded P times, and merged into a sum that grows.
  cost.entries = k * (1 + shape.ranks);
  for (int rank = 1; rank <= shape.ranks; ++rank) cost.entries += shape.merged(rank);
  return cost;
}

}  // namespace

AlgorithmEntry const topk_a = {
    .name = "topk_a",
    .description = "allgather of all selections, summed locally",
    .words = "2k(P-1)",
    .source = "Ok-Topk Table 1",
    .sparse = true,
    .cost = topk_a_cost,
    .make = MakeSparseOf<TopkA>::all,
    .rounds = true,
    .fusible = true,
};

AlgorithmEntry const gaussian_k = {
    .name = "gaussian_k",
    .description = "topk_a of selections by a threshold of the normal distribution",
    .words = "2k(P-1)",
    .source = "Shi et al. 2019, Ok-Topk Table 1",
    .sparse = true,
    .cost = topk_a_cost,
    .make = MakeSparseOf<TopkA>::floating,
    .selection = ThresholdSource::gaussian,
    .rounds = true,
};

}  // namespace sparsecomm
