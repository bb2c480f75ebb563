// Time comes from outside, so that tests own it.
#pragma once

#include <chrono>

namespace sparsecomm {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

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
  static SteadyClock const clock;
  return clock;
}

// One deadline for a whole operation: every wait inside it gets what is left, never a fresh
// allowance.
class Deadline {
 public:
  Deadline(Clock const& clock, Duration allowance)
      : clock_(&clock), end_(clock.now() + allowance), allowance_(allowance) {}

  Duration remaining() const {
    auto const left = end_ - clock_->now();
    return left > Duration::zero() ? left : Duration::zero();
  }
  // For what took time that the operation is not accountable for.
  void postpone(Duration time) { end_ += time; }
  bool passed() const { return remaining() == Duration::zero(); }
  double allowance_seconds() const { return std::chrono::duration<double>(allowance_).count(); }

 private:
  Clock const* clock_;
  TimePoint end_;
  Duration allowance_;
};

}  // namespace sparsecomm
