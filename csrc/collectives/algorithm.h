// The table of allreduce algorithms. Tests, benches, docs and the command line iterate
// algorithms().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "collectives/channel.h"
#include "collectives/dense.h"
#include "collectives/services.h"
#include "compress/schedule.h"
#include "ina/plan.h"
#include "sparse/stream.h"

namespace sparsecomm {

// The problem of one call, the same on every rank.
struct SparseProblem {
  std::uint64_t extent = 0;  // N, below 2^32
  std::uint64_t k = 0;       // entries wanted in the selections and, where it is cut, in the result
  std::uint64_t limit = 0;   // the most entries any rank contributes
  std::uint64_t step = 0;    // counts calls; what the periods are measured against
  Reduction reduction = Reduction::sum;  // only sum unless the algorithm is lossless
};

struct AlgorithmOptions {
  FrameOptions frame;
  ThresholdSchedule schedule;           // of the global threshold
  std::uint64_t partition_period = 64;  // tau: steps between repartitions
  double balance_factor = 4;  // largest share over average above which shares are evened out
  int window = 8;  // messages that are reduced together while the next window of them arrives
  // The density above which a partial result turns dense, decided by an upper bound on its entries;
  // 0: where index-value pairs would be larger than all values, V / (4 + V) for values of V bytes
  // (SparCML section 5.1).
  double delta = 0;
  // The values of the dense half of dsar_split_allgather. All but raw are for sums of f32 and f64
  // only, and make it lossy: the owner of a region rounds its sums and rejects what that takes.
  ValueCodec dense_codec = ValueCodec::raw;
  std::uint64_t seed = 0;  // of stochastic rounding; the same on every rank
  std::uint64_t overlap_chunk = std::uint64_t{1} << 18;  // elements of a chunk of dense_overlap
  // Of in-network aggregation: bytes of a block, a power of two from 64 to 65,536; blocks of a
  // message, at most 64; whether aggregators add in the order of ranks, for the same bits in every
  // run.
  std::uint32_t block_bytes = 1024;
  std::uint8_t block_window = 16;
  CombineOrder combine_order = CombineOrder::arrival;
};

// What an algorithm keeps from step to step and a checkpoint must hold.
struct AlgorithmState {
  std::vector<std::uint32_t> boundaries;
  double global_threshold = 0;  // 0: none yet
};

template <class V>
struct AllreduceResult {
  StreamView<V> reduced;  // the same bits on every rank
  // What this rank must keep so that nothing is lost: over all ranks, the contributions sum to
  // `reduced` and everybody's `rejected`. Partial sums that were cut, and errors of rounding.
  SparseView<V> rejected;
};

// The reduction of one sparse contribution per rank. V is float or double, and std::int32_t or
// std::int64_t where the algorithm is lossless.
template <class V>
class SparseAllreduce {
 public:
  virtual ~SparseAllreduce() = default;
  // Valid until the next run(). The contribution must stay unchanged as long.
  virtual AllreduceResult<V> run(Channel& channel, SparseView<V> contribution,
                                 SparseProblem const& problem) = 0;
  virtual AlgorithmState state() const { return {}; }
  virtual void load_state(AlgorithmState const&) {}
};

// What one call takes of one rank, the communicator's agreement (see agreement_cost) excluded and
// frame headers, histograms and a repartition included.
struct Cost {
  double rounds = 0;    // messages that wait for one another
  double messages = 0;  // sent
  double bytes = 0;     // received, between ranks
  // On links of other ranks, one after another, before this rank can end.
  double awaited_bytes = 0;
  double entries = 0;  // of sparse streams, encoded, decoded or merged: what the processor does
  double dense_entries = 0;  // likewise of dense blocks
  // Through aggregators: messages one after another, bytes received, and bytes each way over the
  // link that has most, a rank's or an aggregator's.
  double aggregator_rounds = 0;
  double aggregator_bytes = 0;
  double aggregator_load = 0;
  bool exact = false;  // messages and bytes are what is counted; otherwise upper bounds

  double received_bytes() const { return bytes + aggregator_bytes; }

  // One after the other.
  friend Cost operator+(Cost const& a, Cost const& b) {
    return {a.rounds + b.rounds,
            a.messages + b.messages,
            a.bytes + b.bytes,
            a.awaited_bytes + b.awaited_bytes,
            a.entries + b.entries,
            a.dense_entries + b.dense_entries,
            a.aggregator_rounds + b.aggregator_rounds,
            a.aggregator_bytes + b.aggregator_bytes,
            a.aggregator_load + b.aggregator_load,
            a.exact && b.exact};
  }
  // So many times, or in so many of the calls.
  friend Cost operator*(double times, Cost const& a) {
    return {times * a.rounds,
            times * a.messages,
            times * a.bytes,
            times * a.awaited_bytes,
            times * a.entries,
            times * a.dense_entries,
            times * a.aggregator_rounds,
            times * a.aggregator_bytes,
            times * a.aggregator_load,
            a.exact};
  }
};

// With `union_nnz` a cost is a prediction, for positions that are spread evenly; without, it is a
// bound for any positions.
struct CostShape {
  int ranks = 1;
  std::uint64_t extent = 0;
  std::uint64_t k = 0;     // the largest contribution of any rank
  double value_bytes = 4;  // on the wire
  // By default a bound for every choice, but for the headers of delta's blocks.
  FrameOptions frame = {.index_codec = IndexCodecChoice::raw32, .allow_dense = false};
  // Entries of the reduction over all ranks; 0: as many as there can be.
  std::uint64_t union_nnz = 0;
  int aggregators = 1;    // where an algorithm needs them
  std::uint64_t run = 1;  // entries of a contribution that lie side by side; k is a multiple of it

  // Entries of the reduction of `count` ranks' contributions, at most: what an algorithm that
  // merges on the way passes on.
  double merged(int count) const;
  bool predicts() const { return union_nnz > 0; }
  // On the wire, of one of `entries` random positions of `among`.
  double pair_bytes(double entries, double among) const {
    return expected_frame(entries, among, value_bytes, frame).pair_bytes;
  }
  double pair_bytes() const {
    return pair_bytes(static_cast<double>(k), static_cast<double>(extent));
  }
};

// Only of a sum may zeros vanish.
inline FrameOptions frame_options(AlgorithmOptions const& options, SparseProblem const& problem) {
  FrameOptions frame = options.frame;
  frame.allow_dense = frame.allow_dense && problem.reduction == Reduction::sum;
  return frame;
}

// The most entries of a range of `extent` positions that travel as pairs.
template <class V>
std::uint64_t sparse_limit(AlgorithmOptions const& options, std::uint64_t extent) {
  if (options.delta == 0) return default_delta<V>(extent);
  return static_cast<std::uint64_t>(options.delta * static_cast<double>(extent));
}

template <class V>
using MakeAllreduce = std::unique_ptr<SparseAllreduce<V>> (*)(AlgorithmOptions const&,
                                                              Services const&);

// One sparse allreduce for every type of value; those of integers are null unless it is lossless.
struct SparseMakers {
  MakeAllreduce<float> f32 = nullptr;
  MakeAllreduce<double> f64 = nullptr;
  MakeAllreduce<std::int32_t> i32 = nullptr;
  MakeAllreduce<std::int64_t> i64 = nullptr;
};

struct AlgorithmEntry {
  std::string_view name = {};
  std::string_view description = {};
  std::string_view words = {};   // the leading term of the words received per rank, for the docs
  std::string_view source = {};  // paper and section
  bool sparse = false;           // exchanges selections; otherwise the whole gradient
  bool top_k_result = false;     // the result is cut to the k largest
  Cost (*cost)(CostShape const& shape, AlgorithmOptions const& options) = nullptr;
  SparseMakers make = {};              // if sparse
  DenseMakers const* dense = nullptr;  // if not sparse
  // Replaces the schedule's source of the local threshold.
  std::optional<ThresholdSource> selection = {};
  bool rounds = false;  // values may travel in a lossy codec; the errors are rejected
  // With raw values, and of a T that is accumulate_t<T>, an entry's result has the same bits
  // wherever it lies in the vector and whatever lies beside it, so that vectors may be reduced as
  // segments of one. But for which NaN it is, whether a neutral entry is there and, of min and max
  // if it is not sparse, the sign of a zero.
  bool fusible = false;
  Needs needs = Needs::nothing;  // on more than one rank

  // The result is the exact reduction of the contributions, for every reduction; with raw values.
  bool lossless() const { return make.i32 != nullptr; }
};

std::span<const AlgorithmEntry> algorithms();
// Throws InvalidArgument that lists the names there are.
AlgorithmEntry const& find_algorithm(std::string_view name);

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_sparse_allreduce(AlgorithmEntry const& entry,
                                                          AlgorithmOptions const& options,
                                                          Services const& services) {
  if constexpr (std::is_same_v<V, float>) return entry.make.f32(options, services);
  if constexpr (std::is_same_v<V, double>) return entry.make.f64(options, services);
  if constexpr (std::is_same_v<V, std::int32_t>) return entry.make.i32(options, services);
  if constexpr (std::is_same_v<V, std::int64_t>) return entry.make.i64(options, services);
}

// The cost of a Bruck allgather whose frames have at most `frame_bytes` bytes.
Cost allgather_cost(int ranks, double frame_bytes);

}  // namespace sparsecomm
