// Sparse reduce-scatter, then an allgather that is sparse or dense by the exact size of the result.
//
// 1. The positions are split into P even regions. Each rank sends to each other rank the entries of
//    that rank's region and sums what arrives for its own (split_reduce.h).
// 2. An allreduce of one number, the entries of each rank's sum, gives the size of the result.
// 3. If that exceeds delta, all ranks turn their region dense, else none does; a Bruck allgather of
//    the regions completes the result (region_gather.h).
//
// P-1 + 2 ceil(log2 P) messages, 4k(P-1)/P to (2k + N)(P-1)/P words. It differs from
// ssar_split_allgather in step 2: there each region turns dense by a bound of its own. Sources:
// Ok-Topk Table 1 (TopkDSA), SparCML section 5.3.3.
#include <functional>

#include "collectives/entries.h"
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
    // Step 1.
    SparseStream<V>& own = split_.run(channel, contribution, regions, problem);
    // Step 2.
    std::uint64_t const total = announce(channel, own.sparse().nnz(), problem.extent);
    if (total == 0) return {};
    // Step 3.
    bool const dense = total > sparse_limit<V>(options_, problem.extent);
    StreamView<V> const part = dense ? StreamView<V>{.dense = own.dense(), .is_dense = true}
                                     : StreamView<V>{.sparse = own.sparse()};
    return {.reduced = gather_.run(channel, part, regions, problem, total), .rejected = {}};
  }

 private:
  // Returns the entries of all regions together.
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

Cost topk_dsa_cost(CostShape const& shape, AlgorithmOptions const& options) {
  if (shape.ranks == 1) return {.exact = true};
  return split_allgather_cost(shape, options, shape.merged(shape.ranks)) +
         census_cost(shape.ranks, sizeof(std::uint64_t));
}

}  // namespace

AlgorithmEntry const topk_dsa = {
    .name = "topk_dsa",
    .description = "as ssar_split_allgather, and all regions turn dense together",
    .words = "4k(P-1)/P to (2k + N)(P-1)/P",
    .source = "Ok-Topk Table 1",
    .sparse = true,
    .cost = topk_dsa_cost,
    .make = MakeSparseOf<TopkDsa>::all,
};

}  // namespace sparsecomm
