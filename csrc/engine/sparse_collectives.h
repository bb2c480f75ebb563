// The lossless collectives as operations of a communicator: a reduction of all ranks' vectors for
// all (allreduce) or by regions (reduce-scatter), and everybody's vectors for all (allgather).
//
// Each is configured with what ranks must agree on, then bound to one contribution after another;
// its scratch is kept between them. One submission at a time: bind again when it has ended.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/dense.h"
#include "collectives/pairs.h"
#include "collectives/sparse_allgather.h"
#include "collectives/split_reduce.h"
#include "engine/choice_cache.h"
#include "engine/communicator.h"
#include "engine/payload.h"
#include "engine/planner.h"

namespace sparsecomm {

// As proposals name them.
inline constexpr std::string_view allreduce_name = "allreduce";
inline constexpr std::string_view allgather_name = "allgather of sparse vectors";
inline constexpr std::string_view reduce_scatter_name = "reduce-scatter of sparse vectors";

// What ranks must agree on. Text and numbers in `vector` name what the vector is besides, its shape
// for example, as "name=value;name=value".
struct CollectiveConfig {
  std::string vector = {};
  std::uint64_t extent = 0;  // at most 2^32 - 2
  AlgorithmEntry const* algorithm =
      nullptr;  // null: "auto", the one predicted to be the quickest for each call
  Reduction reduction = Reduction::sum;
  bool average = false;  // of a sum: divided by the number of ranks
  // Aggregators add in the order of the ranks: the same bits in every run by algorithm "ina".
  bool in_rank_order = false;
};

// Whether the entry gives the exact reduction, but for the rounding of sums: what "auto" chooses
// from.
bool can_reduce(AlgorithmEntry const& entry);

// The entry of that name, null for "auto". Throws InvalidArgument that lists those that can where
// this one is unknown, or cuts or rounds its result.
AlgorithmEntry const* find_reducing(std::string_view name);

// The reduction of one vector per rank, exact but for the rounding of sums in accumulate_t<T>, with
// the same bits on every rank. T is any element type; a vector that is given as sparse has
// accumulate_t<T> values.
template <class T>
class AllreduceOperation final : public Operation, private FusibleAllreduce<accumulate_t<T>> {
 public:
  using V = accumulate_t<T>;

  // "auto" predicts with the communicator's figures, which its first use measures, once for each
  // extent and about as many entries.
  explicit AllreduceOperation(Communicator& communicator, AlgorithmOptions const& options = {});

  // Throws InvalidArgument where the extent exceeds 2^32 - 2, or the algorithm cannot reduce so.
  void configure(CollectiveConfig config);

  // A sparse contribution, whose memory stays until the operation has ended. All ranks contribute
  // in the same form: what is cheapest depends on it.
  void bind(SparseView<V> contribution);
  // After the operation, until the next one: the reduction, not divided yet where the average is
  // wanted. Entries that are the neutral element may be missing.
  StreamView<V> result() const { return result_; }

  // A dense vector of `extent` entries, which the reduction replaces. Only entries that are not the
  // neutral element travel in a sparse algorithm. Unchanged after a failure.
  void bind(std::span<T> data);

  Proposal prepare() override;
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return merge_payload<EntryCounts>(into, other, config_.extent);
  }
  Fusible* fusible(std::span<const std::byte> payload) override;
  void run(Channel& channel, Agreement const& agreement) override;

 private:
  Fusible::Terms const& terms() const override { return terms_; }
  SparseView<V> contribution() override { return is_dense_ ? compress() : contribution_; }
  void write_contribution(std::span<V> out) override;
  void take(StreamView<V> const& whole, std::uint64_t first) override;

  Fusible::Terms terms_of(AlgorithmEntry const& entry, EntryCounts const& counts) const;
  void exchange_together(Channel& channel, std::span<Fusible* const> all);
  StreamView<V> reduce_sparse(Channel& channel, Fusible::Terms const& terms,
                              SparseView<V> contribution);
  StreamView<V> reduce_dense(Channel& channel, Fusible::Terms const& terms, std::span<V> data);
  void reduce_in_place(Channel& channel, Fusible::Terms const& terms);
  void check_dense(Fusible::Terms const& terms) const;
  V divisor() const { return config_.average ? static_cast<V>(communicator_.size()) : V{1}; }
  SparseView<V> compress();
  void expand();

  std::uint64_t count_blocks();
  AlgorithmEntry const& choose(Figures const& figures, EntryCounts const& counts);
  Workload workload(ChoiceProblem const& problem) const;

  Communicator& communicator_;
  AlgorithmOptions options_;
  CollectiveConfig config_;
  ChoiceCache choices_;
  std::string dense_text_, sparse_text_;
  bool is_dense_ = false;
  SparseView<V> contribution_;
  std::span<T> data_;
  EntryCounts entries_;  // of this rank
  StreamView<V> result_;
  std::vector<std::unique_ptr<SparseAllreduce<V>>> sparse_;  // by line of the table, when needed
  std::vector<std::unique_ptr<DenseAllreduce<T>>> dense_;    // likewise
  std::vector<std::unique_ptr<DenseAllreduce<V>>> wide_dense_;
  Fusible::Terms terms_;
  bool is_taken_ = false;  // the result, from an exchange of several operations
  Pairs<V> gathered_;      // contributions of all of these; values alone if they are dense
  Pairs<V> pairs_;         // of a dense vector's entries, or the result
  std::vector<V> expanded_;
  std::vector<std::uint64_t> bitmap_;  // of a dense vector's blocks
};

// Everybody's vectors on every rank, explicit zeros included.
template <class V>
class AllgatherOperation final : public Operation {
 public:
  explicit AllgatherOperation(AlgorithmOptions const& options = {}) : gather_(options.frame) {}

  void configure(CollectiveConfig config);  // algorithm, reduction and average have no meaning
  void bind(SparseView<V> contribution) { contribution_ = contribution; }
  // [rank]; until the next operation, and as long as the contribution stays.
  std::span<const SparseView<V>> result() const { return result_; }

  Proposal prepare() override {
    entries_ = EntryCounts(contribution_.nnz());
    return {.text = text_, .payload = payload_of(entries_)};
  }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return merge_payload<EntryCounts>(into, other, config_.extent);
  }
  void run(Channel& channel, Agreement const& agreement) override;

 private:
  CollectiveConfig config_;
  std::string text_;
  SparseView<V> contribution_;
  EntryCounts entries_;
  SparseAllgather<V> gather_;
  std::span<const SparseView<V>> result_;
};

// The reduction of region r on rank r, by SplitReduce: P-1 messages, 2k(P-1)/P words where every
// contribution has an even share in each region, 2k(P-1) at most.
template <class V>
class ReduceScatterOperation final : public Operation {
 public:
  explicit ReduceScatterOperation(AlgorithmOptions const& options = {}) : reduce_(options) {}

  // The algorithm has no meaning. Region r begins at boundaries[r - 1]: ranks - 1 ascending
  // positions; where none are given the regions are even. Throws InvalidArgument where they do not
  // split the vector.
  void configure(CollectiveConfig config, int ranks,
                 std::span<const std::uint32_t> boundaries = {});
  void bind(SparseView<V> contribution) { contribution_ = contribution; }
  // Until the next operation; indices count from the start of the whole vector. Not divided yet
  // where the average is wanted. Entries that are the neutral element may be missing.
  SparseView<V> result() const { return result_; }

  Proposal prepare() override {
    entries_ = EntryCounts(contribution_.nnz());
    return {.text = text_, .payload = payload_of(entries_)};
  }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return merge_payload<EntryCounts>(into, other, config_.extent);
  }
  void run(Channel& channel, Agreement const& agreement) override;

 private:
  CollectiveConfig config_;
  std::string text_;
  SparseView<V> contribution_;
  EntryCounts entries_;
  std::vector<Region> regions_;
  SplitReduce<V> reduce_;
  SparseView<V> result_;
};

}  // namespace sparsecomm
