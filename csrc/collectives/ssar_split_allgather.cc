// Sparse reduce-scatter, then an allgather of sparse or dense regions.
//
// 1. The positions are split into P even regions. Each rank sends to each other rank the entries of
//    that rank's region and sums what arrives for its own (split_reduce.h).
// 2. A Bruck allgather of the sums, each in the smaller form, sparse or dense, completes the result
//    on every rank (region_gather.h).
//
// P-1 + ceil(log2 P) messages; 4k(P-1)/P words if the ranks share their positions, up to 2kP if
// they share none. For larger data than ssar_recursive_double, as no entry is sent more than twice.
// Source: SparCML section 5.3.2.
#include "collectives/entries.h"
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
    // Step 1.
    StreamView<V> const own = split_.run(channel, contribution, regions, problem).view();
    // Step 2.
    std::uint64_t const most = problem.limit * channel.size();
    return {.reduced = gather_.run(channel, own, regions, problem, most), .rejected = {}};
  }

 private:
  SplitReduce<V> split_;
  RegionGather<V> gather_;
  std::vector<Region> regions_;
};

Cost ssar_split_allgather_cost(CostShape const& shape, AlgorithmOptions const& options) {
  return split_allgather_cost(shape, options, joined_entries(shape, options, shape.ranks, 1));
}

}  // namespace

AlgorithmEntry const ssar_split_allgather = {
    .name = "ssar_split_allgather",
    .description = "sparse reduce-scatter by regions, then allgather of each in the smaller form",
    .words = "4k(P-1)/P to 2kP",
    .source = "SparCML section 5.3.2",
    .sparse = true,
    .cost = ssar_split_allgather_cost,
    .make = MakeSparseOf<SsarSplitAllgather>::all,
};

}  // namespace sparsecomm
