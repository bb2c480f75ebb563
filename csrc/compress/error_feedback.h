// Local selection with error feedback: what is not sent now is added to the next gradient.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/executor.h"
#include "compress/schedule.h"
#include "compress/selection_rule.h"
#include "kernels/block_top_k.h"
#include "kernels/kernels.h"
#include "kernels/parallel.h"
#include "sparse/stream.h"

namespace sparsecomm {

// The most entries one selection may hold when k are wanted: a stale or estimated threshold that
// lets more pass leaves the rest in the residual.
constexpr std::uint64_t selection_limit(std::uint64_t extent, std::uint64_t k) {
  return std::min(extent, 4 * k + 1024);
}

// One in this many runs of entries is looked at by a sampled threshold.
inline constexpr std::size_t threshold_stride = 127;

// Appends those of the sorted indices at which the result has an entry that is not zero.
template <class V>
void delivered(std::span<const std::uint32_t> indices, StreamView<V> const& reduced,
               std::vector<std::uint32_t>& out);

// Selects about k entries of residual + gradient by magnitude and keeps the rest in the residual.
// One object per group of parameters; the residuals themselves belong to the caller. Source:
// Ok-Topk Algorithms 1 and 2.
template <class T>
class ErrorFeedback {
 public:
  using V = accumulate_t<T>;

  // The executor lives as long as this.
  ErrorFeedback(ThresholdSchedule schedule, SelectionRule const& rule, std::uint64_t extent,
                Executor const& executor = inline_executor());

  // The rule's u or m, of as many entries as the segments together; empty where it has none.
  void bind_moment(std::span<V> moment);

  // If rule.accumulates(), before all that follows: adds the gradient to the residual, by way of
  // u where there is one, and zeroes it.
  void accumulate(std::span<const Segment<T>> segments);

  // The threshold of this step, by the schedule. Reads at most the gradient and the residual.
  void find_threshold(std::span<const Segment<T>> segments, std::uint64_t k, std::uint64_t step);

  // Packs what passes, leaves the rest in the residual and zeroes the gradient; without a rule in
  // one pass over memory. With buckets or blocks, k is what entries_wanted() says. The result is
  // valid until the next call.
  SparseView<V> select(std::span<const Segment<T>> segments, std::uint64_t k);

  // Instead of select(), for a dense exchange: adds the residual to the gradient and leaves in it
  // only what T rounds away, or cannot hold. From one flush to the next nobody else may change the
  // residual, but before a reset().
  void flush(std::span<const Segment<T>> segments);

  // Adds to the residual what an allreduce rejected (sorted indices). `rejected` must stay valid
  // until the next call of select(), forget() or restore().
  void keep(std::span<const Segment<T>> segments, SparseView<V> rejected);

  // Factor masking: of what was selected, entries that are in `reduced` lose their momentum.
  void mask(StreamView<V> const& reduced);

  // Undoes mask(), keep(), and select() or flush() but for the gradient, now part of the residual.
  // Forgets the selection.
  void restore(std::span<const Segment<T>> segments);

  // The caller has written to the residual.
  void residual_changed() { residual_is_clear_ = false; }

  // Forgets the selection: there is nothing left to restore.
  void forget();

  void follow(ThresholdSchedule schedule) { schedule_ = schedule; }

  // From the next step on; whether momentum is above 0 must not change.
  void set_velocity(VelocityRule const& rule) {
    rule_.velocity = rule;
    selector_ = selector_of(rule_);
  }

  // The residual is another one; `threshold`: the last one's magnitude, 0 for none.
  void reset(double threshold) {
    threshold_ = {static_cast<V>(threshold), 0};
    residual_is_clear_ = false;
  }

  // The last threshold's magnitude; 0 before the first.
  double threshold() const { return static_cast<double>(threshold_.magnitude); }

 private:
  using Segments = std::span<const Segment<T>>;

  // The functions of a selector, found once for a rule.
  struct Row {
    Selector id;
    // Null: it needs none.
    void (ErrorFeedback::*find_threshold)(Segments, std::uint64_t k, std::uint64_t step);
    // Takes what is selected out of the residual, into selection_.
    void (ErrorFeedback::*pack)(Segments, std::uint64_t k);
  };
  static Row const* selector_of(SelectionRule const& rule);

  void find_in_sums(Segments segments, std::uint64_t k, std::uint64_t step);
  void find_in_keys(Segments segments, std::uint64_t k, std::uint64_t step);
  void pack_fused(Segments segments, std::uint64_t k);
  void pack_by_threshold(Segments segments, std::uint64_t k);
  void pack_buckets(Segments segments, std::uint64_t k);
  void pack_blocks(Segments segments, std::uint64_t k);

  template <class S>
  void search(std::span<const Segment<S>> segments, std::uint64_t k, std::uint64_t step);
  std::span<const Segment<V>> keys(Segments segments);
  void take(Segments segments, std::size_t count);

  ThresholdSchedule schedule_;
  SelectionRule rule_;
  Row const* selector_;  // the rule's
  std::uint64_t extent_;
  std::span<V> moment_;
  std::vector<Segment<V>> keys_;  // see keys()
  Threshold<V> threshold_;
  Buffer<std::uint32_t> indices_;
  Buffer<V> values_;
  SparseView<V> selection_, rejected_;
  std::vector<V> before_;  // the residuals that keep() changed
  bool whole_ = false;     // every entry was wanted
  std::vector<std::uint32_t> masked_;
  std::vector<V> masked_moments_;
  Buffer<T> flushed_;  // what flush() put into the gradient
  bool has_flushed_ = false;
  bool residual_is_clear_ = false;
  ThresholdScratch<V> threshold_scratch_;
  SelectionScratch<V> selection_scratch_;
  BlockTopKScratch block_scratch_;
  Executor const& executor_;
};

}  // namespace sparsecomm
