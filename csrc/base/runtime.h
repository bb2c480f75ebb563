// Threads and waits come from outside, as time does (clock.h): from the operating system, or under
// test from a simulation, which decides who runs and lets time pass when nobody can.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace sparsecomm {

class Condition;

// A simulation of threads, of which one runs at a time until it waits, sleeps, joins or ends. No
// lock may be held at any of these but the one that a wait releases.
class Simulation : public Clock {
 public:
  // Releases the lock and waits until the condition is notified or `until` has come. Holds it
  // again.
  virtual void wait(Condition const& condition, std::unique_lock<std::mutex>& lock,
                    TimePoint until) = 0;
  virtual void notify_all(Condition const& condition) noexcept = 0;
  virtual void sleep(Duration time) = 0;
  // The thread is joined by join(). `name`: for reports; stays.
  virtual std::thread start(char const* name, std::function<void()> body) = 0;
  virtual void join(std::thread& thread) = 0;
};

// The operating system's threads and clock, or a simulation's, which outlives all that uses it.
class Runtime {
 public:
  Runtime() = default;
  Runtime(Simulation& simulation) : simulation_(&simulation) {}  // NOLINT: one is the other

  Clock const& clock() const {
    if (simulation_ != nullptr) return *simulation_;
    return steady_clock();
  }
  void sleep(Duration time) const {
    simulation_ != nullptr ? simulation_->sleep(time) : std::this_thread::sleep_for(time);
  }
  // `name`: see Simulation.
  std::thread start(char const* name, std::function<void()> body) const {
    return simulation_ != nullptr ? simulation_->start(name, std::move(body))
                                  : std::thread(std::move(body));
  }
  void join(std::thread& thread) const {
    simulation_ != nullptr ? simulation_->join(thread) : thread.join();
  }

 private:
  friend class Condition;
  Simulation* simulation_ = nullptr;
};

// As std::condition_variable.
class Condition {
 public:
  // `what`: is waited for, for reports; stays.
  Condition(Runtime runtime, char const* what) : simulation_(runtime.simulation_), what_(what) {}

  char const* what() const { return what_; }
  void notify_all() noexcept {
    simulation_ != nullptr ? simulation_->notify_all(*this) : changed_.notify_all();
  }
  template <class Done>
  void wait(std::unique_lock<std::mutex>& lock, Done done) {
    if (simulation_ == nullptr) return changed_.wait(lock, done);
    while (!done()) simulation_->wait(*this, lock, TimePoint::max());
  }
  // False if the time is over and it is not done.
  template <class Done>
  bool wait_for(std::unique_lock<std::mutex>& lock, Duration time, Done done) {
    if (simulation_ == nullptr) return changed_.wait_for(lock, time, done);
    TimePoint const until = simulation_->now() + time;
    while (!done()) {
      if (simulation_->now() >= until) return false;
      simulation_->wait(*this, lock, until);
    }
    return true;
  }

  // False if the deadline has passed and it is not done. Lets what interrupts the deadline end the
  // wait, without the lock.
  template <class Done>
  bool wait_until(std::unique_lock<std::mutex>& lock, Deadline const& deadline, Done done) {
    for (;;) {
      Duration const left = deadline.remaining();
      bool const interruptible = deadline.interruptible();
      if (wait_for(lock, interruptible ? std::min(left, Interrupt::period) : left, done)) {
        return true;
      }
      if (!interruptible || deadline.passed()) return false;
      lock.unlock();
      deadline.poll_interrupt(simulation_ != nullptr ? simulation_->now() : steady_clock().now());
      lock.lock();
    }
  }

 private:
  Simulation* simulation_;
  char const* what_;
  std::condition_variable changed_;
};

}  // namespace sparsecomm
