#include "collectives/topk_dsa.h"

#include <functional>

#include "collectives/figures.h"
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
    std::uint64_t const total = announce(channel, own.sparse().nnz(), problem.extent);
    if (total == 0) return {};
    bool const dense = total > sparse_limit<V>(options_, problem.extent);
    StreamView<V> const part = dense ? StreamView<V>{.dense = own.dense(), .is_dense = true}
                                     : StreamView<V>{.sparse = own.sparse()};
    return {.reduced = gather_.run(channel, part, regions, problem, total), .rejected = {}};
  }

 private:
  // The entries of all regions together.
  std::uint64_t announce(Channel& channel, std::uint64_t own, std::uint64_t extent) {
    std::uint64_t total = own;
    sizes_.run(channel, Phase::threshold, std::span(&total, 1), std::plus{},
               [&](std::span<const std::uint64_t> count, int ranks) {
                 require<MalformedFrame>(count.front() <= extent, "a count of ", count.front(),
                                         " entries of ", ranks, " ranks exceeds the extent of ",
                                         extent);
               });
    require<Error>(total <= extent, "the ranks count ", total, " entries of an extent of ", extent,
                   "; a rank counts entries that it does not hold");
    return total;
  }

  AlgorithmOptions options_;
  SplitReduce<V> split_;
  CensusAllreduce<std::uint64_t> sizes_;
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
         census_cost(shape.ranks, sizeof(std::uint64_t));
}

}  // namespace sparsecomm
