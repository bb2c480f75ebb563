// Local selection with error feedback: what is not sent now is added to the next gradient.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "compress/schedule.h"
#include "kernels/kernels.h"
#include "sparse/stream.h"

namespace sparsecomm {

// The most entries one selection may hold when k are wanted: a stale or estimated threshold that
// lets more pass leaves the rest in the residual.
constexpr std::uint64_t selection_limit(std::uint64_t extent, std::uint64_t k) {
  return std::min(extent, 4 * k + 1024);
}

// Selects about k entries of residual + gradient by magnitude and keeps the rest in the residual.
// One object per group of parameters; the residuals themselves belong to the caller. Source:
// Ok-Topk Algorithms 1 and 2.
template <class T>
class ErrorFeedback {
 public:
  using V = accumulate_t<T>;

  ErrorFeedback(ThresholdSchedule schedule, std::uint64_t extent);

  // The threshold of this step, by the schedule. Reads at most the gradient and the residual.
  void find_threshold(std::span<const Segment<T>> segments, std::uint64_t k, std::uint64_t step);

  // Packs what passes, leaves the rest in the residual and zeroes the gradient, in one pass over
  // memory. The result is valid until the next call.
  SparseView<V> select(std::span<const Segment<T>> segments, std::uint64_t k);

  // Adds to the residual what an allreduce rejected (sorted indices). `rejected` must stay valid
  // until the next call of select(), forget() or restore().
  void keep(std::span<const Segment<T>> segments, SparseView<V> rejected);

  // Undoes keep(), and select() but for the gradient, now part of the residual. Forgets the
  // selection.
  void restore(std::span<const Segment<T>> segments);

  // Forgets the selection: there is nothing left to restore.
  void forget();

  // The last threshold's magnitude; 0 before the first.
  double threshold() const { return static_cast<double>(threshold_.magnitude); }
  void load_threshold(double magnitude) { threshold_ = {static_cast<V>(magnitude), 0}; }

 private:
  ThresholdSchedule schedule_;
  std::uint64_t extent_;
  Threshold<V> threshold_;
  Buffer<std::uint32_t> indices_;
  Buffer<V> values_;
  SparseView<V> selection_, rejected_;
  std::vector<V> before_;  // the residuals that keep() changed
  std::vector<V> scratch_;
};

}  // namespace sparsecomm
