#include "collectives/topk_dsa.h"

#include <array>
#include <cstring>

#include "collectives/region_gather.h"
#include "collectives/split_reduce.h"

namespace sparsecomm {
namespace {

template <class V>
class TopkDsa final : public SparseAllreduce<V> {
 public:
  explicit TopkDsa(AlgorithmOptions const& options)
      : options_(options), split_(options), gather_(options) {}

  AllreduceResult<V> run(Channel& channel, SparseView<V> contribution,
                         SparseProblem const& problem) override {
    auto const regions = even_regions(problem.extent, channel.size(), regions_);
    SparseStream<V>& own = split_.run(channel, contribution, regions, problem);
    std::uint64_t const total = announce(channel, own.sparse().nnz(), regions);
    if (total == 0) return {};
    bool const dense = total > sparse_limit<V>(options_, problem.extent);
    StreamView<V> const part = dense ? StreamView<V>{.dense = own.dense(), .is_dense = true}
                                     : StreamView<V>{.sparse = own.sparse()};
    return {.reduced = gather_.run(channel, part, regions, problem, total), .rejected = {}};
  }

 private:
  // The entries of all regions together.
  std::uint64_t announce(Channel& channel, std::uint64_t own, std::span<const Region> regions) {
    std::array<std::byte, header_bytes + sizeof own> frame;
    encode_bytes(channel.operation(), std::as_bytes(std::span(&own, 1)), frame);
    auto const frames = sizes_.run(channel, Phase::threshold, frame, frame.size());
    std::uint64_t total = 0;
    for (int rank = 0; rank < channel.size(); ++rank) {
      std::uint64_t entries = 0;
      channel.decode_from(rank, [&] {
        auto const payload = frames[rank].values;
        require<MalformedFrame>(payload.size() == sizeof entries, "a count of ", payload.size(),
                                " bytes is not one of ", sizeof entries);
        std::memcpy(&entries, payload.data(), sizeof entries);
        require<MalformedFrame>(entries <= regions[rank].extent(), "a count of ", entries,
                                " exceeds its region of ", regions[rank].extent());
      });
      total += entries;
    }
    return total;
  }

  AlgorithmOptions options_;
  SplitReduce<V> split_;
  FrameAllgather sizes_;
  RegionGather<V> gather_;
  std::vector<Region> regions_;
};

}  // namespace

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_topk_dsa(AlgorithmOptions const& options) {
  return std::make_unique<TopkDsa<V>>(options);
}
template std::unique_ptr<SparseAllreduce<float>> make_topk_dsa(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<double>> make_topk_dsa(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<std::int32_t>> make_topk_dsa(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<std::int64_t>> make_topk_dsa(AlgorithmOptions const&);

Cost topk_dsa_cost(CostShape const& shape, AlgorithmOptions const& options) {
  if (shape.ranks == 1) return {.exact = true};
  return split_allgather_cost(shape, options, shape.merged(shape.ranks)) +
         allgather_cost(shape.ranks, header_bytes + sizeof(std::uint64_t));
}

}  // namespace sparsecomm
