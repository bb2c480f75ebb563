#include "collectives/topk_a.h"

#include <algorithm>

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
    auto const frames = gather_.run(channel, Phase::gather, own.first(length), capacity);
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

}  // namespace

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_topk_a(AlgorithmOptions const& options) {
  return std::make_unique<TopkA<V>>(options);
}
template std::unique_ptr<SparseAllreduce<float>> make_topk_a(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<double>> make_topk_a(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<std::int32_t>> make_topk_a(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<std::int64_t>> make_topk_a(AlgorithmOptions const&);

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

}  // namespace sparsecomm
