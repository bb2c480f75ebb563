#include "collectives/ssar_split_allgather.h"

#include "collectives/region_gather.h"
#include "collectives/split_reduce.h"

namespace sparsecomm {
namespace {

template <class V>
class SsarSplitAllgather final : public SparseAllreduce<V> {
 public:
  explicit SsarSplitAllgather(AlgorithmOptions const& options)
      : split_(options), gather_(options) {}

  AllreduceResult<V> run(Channel& channel, SparseView<V> contribution,
                         SparseProblem const& problem) override {
    auto const regions = even_regions(problem.extent, channel.size(), regions_);
    StreamView<V> const own = split_.run(channel, contribution, regions, problem).view();
    std::uint64_t const most = problem.limit * channel.size();
    return {.reduced = gather_.run(channel, own, regions, problem, most), .rejected = {}};
  }

 private:
  SplitReduce<V> split_;
  RegionGather<V> gather_;
  std::vector<Region> regions_;
};

}  // namespace

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_ssar_split_allgather(AlgorithmOptions const& options) {
  return std::make_unique<SsarSplitAllgather<V>>(options);
}
template std::unique_ptr<SparseAllreduce<float>> make_ssar_split_allgather(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<double>> make_ssar_split_allgather(
    AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<std::int32_t>> make_ssar_split_allgather(
    AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<std::int64_t>> make_ssar_split_allgather(
    AlgorithmOptions const&);

Cost ssar_split_allgather_cost(CostShape const& shape, AlgorithmOptions const& options) {
  return split_allgather_cost(shape, options, joined_entries(shape, options, shape.ranks, 1));
}

}  // namespace sparsecomm
