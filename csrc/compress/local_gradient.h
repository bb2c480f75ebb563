// A group's gradient and residual where they lie, in the processor's memory or in a device's, and
// all that an exchange does to them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "compress/error_feedback.h"
#include "kernels/kernels.h"
#include "sparse/stream.h"

namespace sparsecomm {

// What is not said here is as in ErrorFeedback. The views and spans that are returned lie in the
// processor's memory and are valid until the next call. On a device, what changes gradient and
// residual has been enqueued when a call returns, in order; what returns something has waited.
template <class T>
class LocalGradient {
 public:
  using V = accumulate_t<T>;

  virtual ~LocalGradient() = default;

  // What the calls below work on, until the next bind(). `moment`: where the rule has one, as many
  // entries as the segments together.
  virtual void bind(std::vector<Segment<T>> segments, std::span<V> moment = {}) = 0;

  virtual bool all_finite() = 0;
  virtual void accumulate() = 0;
  virtual void find_threshold(std::uint64_t k, std::uint64_t step) = 0;
  virtual SparseView<V> select(std::uint64_t k) = 0;
  virtual void flush() = 0;
  virtual void keep(SparseView<V> rejected) = 0;
  virtual void mask(StreamView<V> const& reduced) = 0;
  virtual void restore() = 0;
  virtual void forget() = 0;
  virtual void residual_changed() = 0;
  virtual void follow(ThresholdSchedule schedule) = 0;
  virtual void set_velocity(VelocityRule const& rule) = 0;
  virtual void reset(double threshold) = 0;
  virtual double threshold() const = 0;

  // Sets entries of the gradient to those of `result` divided by `divisor`; a sparse result leaves
  // the others as they are.
  virtual void store(StreamView<V> const& result, V divisor) = 0;
  virtual void fill(T value) = 0;

  // All entries of the gradient, to be changed in place, and then written back.
  virtual std::span<T> gather() = 0;
  virtual void spread() = 0;
};

// Of a gradient in the processor's memory. The executor lives as long as what is returned.
template <class T>
std::unique_ptr<LocalGradient<T>> make_host_gradient(ThresholdSchedule schedule,
                                                     SelectionRule const& rule,
                                                     std::uint64_t extent,
                                                     Executor const& executor);

}  // namespace sparsecomm
