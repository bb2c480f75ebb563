// Time comes from outside, so that tests own it.
#pragma once

#include <algorithm>
#include <chrono>

#include "base/never_destroyed.h"

namespace sparsecomm {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

// Stands for "never": a point in time that is as far away can still be computed.
inline constexpr Duration longest_duration = std::chrono::hours(24) * 36525;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  TimePoint now() const override { return std::chrono::steady_clock::now(); }
};

inline Clock const& steady_clock() {
  static Clock const* const clock = never_destroyed(SteadyClock());
  return *clock;
}

// Throws to end a wait, for a reason that the caller of the operation has.
class Interrupt {
 public:
  // How long a wait goes on before it asks, and between two questions, which may be slow.
  static constexpr Duration period = std::chrono::milliseconds(50);

  virtual ~Interrupt() = default;
  void poll(TimePoint now) {
    if (next_ == TimePoint{}) next_ = now + period;
    if (now < next_) return;
    next_ = now + period;
    raised_ = true;  // unless check() returns
    check();
    raised_ = false;
  }
  bool raised() const { return raised_; }

 private:
  virtual void check() = 0;

  TimePoint next_{};
  bool raised_ = false;
};

// One deadline for a whole operation: every wait inside it gets what is left, never a fresh
// allowance.
class Deadline {
 public:
  // An allowance is cut to what is from zero to longest_duration. `interrupt`: of the thread that
  // waits, or null; it outlives the deadline.
  Deadline(Clock const& clock, Duration allowance, Interrupt* interrupt = nullptr)
      : clock_(&clock),
        allowance_(std::clamp(allowance, Duration::zero(), longest_duration)),
        end_(clock.now() + allowance_),
        interrupt_(interrupt) {}

  TimePoint now() const { return clock_->now(); }
  Duration remaining() const {
    auto const left = end_ - now();
    return left > Duration::zero() ? left : Duration::zero();
  }
  // One that ends after `allowance` at the latest.
  Deadline within(Duration allowance) const {
    Deadline sooner = *this;
    sooner.allowance_ = std::min(remaining(), std::max(allowance, Duration::zero()));
    sooner.end_ = now() + sooner.allowance_;
    return sooner;
  }
  // One with another allowance, which begins now.
  Deadline restarted(Duration allowance) const { return {*clock_, allowance, interrupt_}; }
  // For what took time that the operation is not accountable for.
  void postpone(Duration time) { end_ += time; }
  bool passed() const { return remaining() == Duration::zero(); }
  double allowance_seconds() const { return std::chrono::duration<double>(allowance_).count(); }

  // Asked now and then by a wait; throws where the caller wants it to end.
  bool interruptible() const { return interrupt_ != nullptr; }
  void poll_interrupt(TimePoint now) const {
    if (interrupt_ != nullptr) interrupt_->poll(now);
  }

 private:
  Clock const* clock_;
  Duration allowance_;
  TimePoint end_;
  Interrupt* interrupt_;
};

}  // namespace sparsecomm
