#include "collectives/dsar_split_allgather.h"

#include <cmath>
#include <limits>

#include "collectives/region_gather.h"
#include "collectives/split_reduce.h"

namespace sparsecomm {
namespace {

template <class V>
class DsarSplitAllgather final : public SparseAllreduce<V> {
 public:
  explicit DsarSplitAllgather(AlgorithmOptions const& options)
      : split_(options), gather_(options) {}

  AllreduceResult<V> run(Channel& channel, SparseView<V> contribution,
                         SparseProblem const& problem) override {
    auto const regions = even_regions(problem.extent, channel.size(), regions_);
    std::span<const V> const own = split_.run(channel, contribution, regions, problem).dense();
    // Dense, however few entries came together.
    std::uint64_t const any = std::numeric_limits<std::uint64_t>::max();
    return {
        .reduced = gather_.run(channel, {.dense = own, .is_dense = true}, regions, problem, any),
        .rejected = {}};
  }

 private:
  SplitReduce<V> split_;
  RegionGather<V> gather_;
  std::vector<Region> regions_;
};

}  // namespace

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_dsar_split_allgather(AlgorithmOptions const& options) {
  return std::make_unique<DsarSplitAllgather<V>>(options);
}
template std::unique_ptr<SparseAllreduce<float>> make_dsar_split_allgather(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<double>> make_dsar_split_allgather(
    AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<std::int32_t>> make_dsar_split_allgather(
    AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<std::int64_t>> make_dsar_split_allgather(
    AlgorithmOptions const&);

Cost dsar_split_allgather_cost(CostShape const& shape, AlgorithmOptions const& options) {
  if (shape.ranks == 1) return {.exact = true};
  auto const extent = static_cast<double>(shape.extent);
  double const others = extent - std::floor(extent / shape.ranks);
  Cost gather = allgather_cost(shape.ranks, header_bytes);
  gather.bytes += others * shape.value_bytes;
  gather.dense_entries = extent;
  return split_reduce_cost(shape, options) + gather;
}

}  // namespace sparsecomm
