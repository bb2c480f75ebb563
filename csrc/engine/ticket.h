// An operation that was submitted, and what the one who did so holds of it.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "base/runtime.h"
#include "engine/operation.h"

namespace sparsecomm {

// Called on the progress thread when an operation ends; null when it went well. What it throws
// then, whoever waits for the operation gets too.
using Completion = std::function<void(std::exception_ptr)>;

class Ticket {
 public:
  explicit Ticket(Runtime runtime) : runtime_(runtime) {}

  // The operation begins: it can no longer be cancelled. Returns whether it was before.
  bool begin() {
    std::lock_guard const lock(mutex_);
    begun_ = true;
    return cancelled_;
  }
  // It has not begun after all.
  void put_back() {
    std::lock_guard const lock(mutex_);
    begun_ = false;
    cancelled_ = cancelled_ || wanted_cancelled_;
  }
  bool cancelled() const {
    std::lock_guard const lock(mutex_);
    return cancelled_;
  }
  // False where it has begun; it is cancelled if it is put back.
  bool cancel() {
    std::lock_guard const lock(mutex_);
    wanted_cancelled_ = true;
    if (!begun_) cancelled_ = true;
    return !begun_;
  }
  void end(std::exception_ptr const& error) {
    {
      std::lock_guard const lock(mutex_);
      error_ = error;
      done_ = true;
    }
    changed_.notify_all();
  }
  bool done() const {
    std::lock_guard const lock(mutex_);
    return done_;
  }
  // Blocks until the operation has ended; throws what it threw.
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    if (error_) std::rethrow_exception(error_);
  }
  void wait(Interrupt& interrupt) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, Interrupt::period, [&] { return done_; })) {
      lock.unlock();
      interrupt.poll(runtime_.clock().now());
      lock.lock();
    }
    if (error_) std::rethrow_exception(error_);
  }
  // Blocks until the operation uses nothing of the caller's any more: what was cancelled never
  // will.
  void wait_until_unused() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ || cancelled_; });
  }

 private:
  Runtime const runtime_;
  mutable std::mutex mutex_;  // guards what follows
  Condition changed_{runtime_, "the end of an operation"};
  bool begun_ = false;
  bool cancelled_ = false;
  bool wanted_cancelled_ = false;  // if it does not run now
  bool done_ = false;
  std::exception_ptr error_;
};

struct Pending {
  std::shared_ptr<Operation> operation;
  std::shared_ptr<Ticket> ticket = {};  // null: the caller runs it
  Completion completion = {};
  std::string name = {};   // empty: known by its place among those without one
  int priority = 0;        // of those with a name that are ready together the highest runs first
  bool stands_in = false;  // see Join: nobody waits for it
  TimePoint submitted{};   // see Timeline
};

}  // namespace sparsecomm
