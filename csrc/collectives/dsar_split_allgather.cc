// Sparse reduce-scatter, then a dense allgather.
//
// 1. The positions are split into P even regions. Each rank sends to each other rank the entries of
//    that rank's region and sums what arrives for its own (split_reduce.h).
// 2. With a lossy dense_codec the owner of a region rounds its sums and rejects what that takes,
//    unless one of them is not finite.
// 3. A Bruck allgather of the regions, all N values of them, completes the result.
//
// P-1 + ceil(log2 P) messages, up to (2k + N)(P-1)/P words if the selections are spread evenly. For
// unions that are dense anyway: no index is sent in step 3. Sources: SparCML sections 5.3.3 and 6.
#include <algorithm>
#include <cmath>
#include <limits>

#include "collectives/entries.h"
#include "collectives/region_gather.h"
#include "collectives/split_reduce.h"

namespace sparsecomm {
namespace {

template <class V>
class DsarSplitAllgather final : public SparseAllreduce<V> {
 public:
  explicit DsarSplitAllgather(AlgorithmOptions const& options)
      : options_(options), split_(options), gather_(options) {
    value_codec_for(options.dense_codec, dtype_of<V>());
  }

  AllreduceResult<V> run(Channel& channel, SparseView<V> contribution,
                         SparseProblem const& problem) override {
    require(options_.dense_codec == ValueCodec::raw || problem.reduction == Reduction::sum,
            "dsar_split_allgather: a ", name(problem.reduction),
            " cannot be rounded; use dense_codec raw");
    auto const regions = even_regions(problem.extent, channel.size(), regions_);
    // Step 1.
    std::span<const V> own = split_.run(channel, contribution, regions, problem).dense();
    rejected_indices_.clear();
    rejected_values_.clear();
    ValueCodec codec = ValueCodec::raw;
    // Step 2. Sums that overflowed must arrive, so their region travels as it is.
    if (options_.dense_codec != codec && channel.size() > 1 &&
        std::ranges::all_of(own, [](V x) { return std::isfinite(static_cast<double>(x)); })) {
      codec = options_.dense_codec;
      own = round(own, channel.rank(), regions[channel.rank()].first, problem.step);
    }
    // Step 3. Dense, however few entries came together.
    std::uint64_t const any = std::numeric_limits<std::uint64_t>::max();
    return {.reduced = gather_.run(channel, {.dense = own, .is_dense = true}, regions, problem, any,
                                   codec),
            .rejected = {rejected_indices_, rejected_values_}};
  }

 private:
  // What the codec carries of a region; the rest is rejected.
  std::span<const V> round(std::span<const V> sums, int rank, std::uint64_t first,
                           std::uint64_t step) {
    rounded_.assign(sums.begin(), sums.end());
    round_values<V>(options_.dense_codec, rounded_,
                    {.seed = options_.seed,
                     .operation = step,  // that a resumed run rounds alike
                     .stream = static_cast<std::uint32_t>(rank)});
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (sums[i] == rounded_[i]) continue;
      rejected_indices_.push_back(static_cast<std::uint32_t>(first + i));
      rejected_values_.push_back(sums[i] - rounded_[i]);
    }
    return rounded_;
  }

  AlgorithmOptions options_;
  SplitReduce<V> split_;
  RegionGather<V> gather_;
  std::vector<Region> regions_;
  std::vector<V> rounded_, rejected_values_;
  std::vector<std::uint32_t> rejected_indices_;
};

Cost dsar_split_allgather_cost(CostShape const& shape, AlgorithmOptions const& options) {
  if (shape.ranks == 1) return {.exact = true};
  std::uint64_t const ranks = shape.ranks;
  std::uint64_t const region = (shape.extent + ranks - 1) / ranks;
  double bytes = static_cast<double>(region) * shape.value_bytes;
  if (options.dense_codec != ValueCodec::raw) {
    std::size_t const value_size =
        shape.value_bytes > sizeof(float) ? sizeof(double) : sizeof(float);
    ValueCodecEntry const& codec = *find_value_codec(options.dense_codec);
    bytes = static_cast<double>(codec.encoded_bytes(region, value_size));
  }
  Cost gather = allgather_cost(shape.ranks, header_bytes + bytes);
  gather.dense_entries = static_cast<double>(shape.extent);
  return split_reduce_cost(shape, options) + gather;
}

}  // namespace

AlgorithmEntry const dsar_split_allgather = {
    .name = "dsar_split_allgather",
    .description = "sparse reduce-scatter by regions, then dense allgather",
    .words = "(2k + N)(P-1)/P",
    .source = "SparCML sections 5.3.3 and 6",
    .sparse = true,
    .cost = dsar_split_allgather_cost,
    .make = MakeSparseOf<DsarSplitAllgather>::all,
};

}  // namespace sparsecomm
