// What hook_state.cc and hook_submit.cc share: buckets on their way, and the step they belong to.
#pragma once

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "distributed_error.h"
#include "hook_state.h"

namespace sparsecomm {

// A bucket is done when all groups that have parameters in it are.
struct HookState::PendingBucket {
  c10::IValue value;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  SideStream const* side = nullptr;
  std::shared_ptr<c10::Event const> made;  // on a device: what makes the bucket
  // What is copied to where the bucket wants it, of gradients that were exchanged elsewhere.
  std::vector<std::pair<at::Tensor, at::Tensor>> moved;
  // Results, and what former ones have left in the same grads.
  std::vector<std::pair<at::Tensor, at::Tensor>> continued;
  std::mutex mutex;
  std::size_t open_groups = 0;
  std::exception_ptr error;

  // Throws nothing: whatever fails here fails the future.
  void group_done(std::exception_ptr const& group_error) {
    {
      std::lock_guard const lock(mutex);
      if (group_error && !error) error = group_error;
      if (--open_groups > 0) return;
    }
    if (!error) {
      try {
        complete();
        return;
      } catch (...) {
        error = std::current_exception();
      }
    }
    fail(error);
  }

  // Before any group has it. Throws nothing.
  void fail(std::exception_ptr const& why) const {
    try {
      future->setErrorIfNeeded(as_distributed_error(why));
    } catch (...) {
      // A callback's: the future has its own error.
    }
  }

  // On a device the result has been enqueued: whoever waits for the future waits for the stream
  // that is current now.
  void complete() {
    if (!side) {
      move_back();
      future->markCompleted(value);
      return;
    }
    auto const current = side->make_current();
    move_back();
    // A future that fails to record its event never wakes who waits for it: fail before.
    side->mark_current();
    future->markCompleted(value);
  }

 private:
  void move_back() {
    c10::NoGradGuard const no_grad;
    for (auto const& [exchanged, result] : moved) result.copy_(exchanged.reshape(result.sizes()));
    moved.clear();
    for (auto const& [result, former] : continued) result.add_(former.reshape(result.sizes()));
    continued.clear();
  }
};

// The exchanges between two optimizer steps stand or fall together: when one of them failed, or
// carried a NaN, the optimizer will not use the others' results, so what they delivered is taken
// back.
struct HookState::Step final : Batch {
  mutable std::mutex mutex;  // guards what follows, but for what is atomic or set as a step begins
  std::size_t open_groups = 0;
  bool begun = false;
  bool last_bucket_seen = false;
  bool ended = false;                          // on all ranks, by an operation that was the last
  bool unusable = false;                       // a part of it failed or was not finite
  bool over = false;                           // nothing more happens to it
  std::atomic<bool> stands = false;            // it is over, and every part has been delivered
  std::shared_ptr<PendingBucket> last_bucket;  // which is done when the step is over
  bool failed = false;
  std::exception_ptr error;  // of an operation that no bucket waits for
  double loss_scale = 1;     // of the gradients; 0: of the other ranks', see Bucket::joined
  std::vector<ParameterGroup*> delivered;
  std::vector<at::Tensor> parameters;  // of which something is kept, and whose grads are results
  std::size_t buckets = 0;  // that have come; this and the next two are of the caller's thread
  bool joined = false;      // this rank is out of data
  bool observed = false;    // by a GroupingTrial, or none of its business
  TimePoint first_bucket_came = steady_clock().now();
  TimePoint last_bucket_came{};
  Duration exposed{};
  std::weak_ptr<void const> backward;  // the pass that brings the gradients, as long as it goes on

  void note(Bucket const& bucket) {
    ++buckets;
    joined = joined || bucket.joined;
  }
  // Until its groups were done; none if its last bucket has not come.
  std::optional<Duration> time_since_first_bucket() const {
    std::lock_guard const lock(mutex);
    if (!last_bucket_seen) return std::nullopt;
    return last_bucket_came - first_bucket_came + exposed;
  }
  // Called on the pass's own thread, if there is one.
  void follow_backward() {
    if (torch::autograd::get_current_graph_task_id() == -1) return;
    // The pass drops its callbacks as it ends, in whatever way.
    auto const going_on = std::make_shared<int const>();
    backward = going_on;
    torch::autograd::Engine::get_default_engine().queue_callback([going_on] {});
  }
  // Called with the last bucket, on the thread of the pass that brings it, if there is one.
  static void check_after_backward(std::shared_ptr<Step> const& step) {
    if (torch::autograd::get_current_graph_task_id() == -1) return;
    // DDP queues its own callback, which copies the results to the grads, when the hook has
    // returned. The pass has ended when these run, so what the first one queues runs after DDP's.
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.queue_callback([&engine, weak = std::weak_ptr(step)] {
      engine.queue_callback([weak] {
        if (auto const step = weak.lock()) step->poison_unusable();
      });
    });
  }
  std::optional<std::size_t> left() const override {
    std::lock_guard const lock(mutex);
    return last_bucket_seen ? std::optional(open_groups) : std::nullopt;
  }
  bool is_closed() const override {
    std::lock_guard const lock(mutex);
    return last_bucket_seen;
  }
  // Begins `groups` operations. `last`: the last bucket, which comes with them and is done when the
  // step is over, if it has operations; null: there are others to come. Returns as end() does.
  bool begin(std::size_t groups, bool with_last_bucket, std::shared_ptr<PendingBucket> last) {
    std::lock_guard const lock(mutex);
    delivered.reserve(delivered.size() + open_groups + groups);  // so that end() cannot fail
    open_groups += groups;
    begun = begun || groups > 0;
    if (!with_last_bucket) return false;
    last_bucket = std::move(last);
    last_bucket_seen = true;
    last_bucket_came = steady_clock().now();
    return open_groups == 0 && lacks_end();
  }
  bool has_begun() {
    std::lock_guard const lock(mutex);
    return begun;
  }
  // Ends an operation. `group`: null if nothing is kept of it. `failure`: it failed, as it did on
  // all ranks; one that this rank alone cannot use is not `usable`. `ends`: all ranks know that it
  // was the step's last. Returns true if the caller is to submit one more operation, which ends the
  // step and counts as begun.
  bool end(ParameterGroup* group, bool usable, bool failure, bool ends) {
    std::lock_guard const lock(mutex);
    --open_groups;
    ended = ended || ends;
    failed = failed || failure;
    if (!usable) {
      unusable = true;
    } else if (group) {
      delivered.push_back(group);
    }
    if (last_bucket_seen) exposed = steady_clock().now() - last_bucket_came;
    if (group) group->set_exposed(exposed);
    return open_groups == 0 && lacks_end();
  }
  // If the step is over. Whoever waits for all buckets learns of a failure from those it befell.
  void complete_last_bucket(std::exception_ptr const& failure = {}) {
    std::shared_ptr<PendingBucket> bucket;
    std::exception_ptr first;
    {
      std::lock_guard const lock(mutex);
      if (failure && !error) error = failure;
      first = error;
      if (over) bucket = std::exchange(last_bucket, nullptr);
    }
    if (bucket) bucket->group_done(first);
  }
  // Ends `groups` of those that began, which could not be submitted, and so the step.
  void give_up(std::size_t groups) {
    std::lock_guard const lock(mutex);
    unusable = failed = true;
    last_bucket = nullptr;
    open_groups -= groups;
    if (open_groups == 0) finish();
  }
  bool open() {
    std::lock_guard const lock(mutex);
    return !last_bucket_seen;
  }
  // Returns whether there was more to come, of a step that all ranks have begun.
  bool break_off() {
    std::lock_guard const lock(mutex);
    if (last_bucket_seen) return false;
    failed = true;
    take_back();
    return std::exchange(begun, false);
  }
  Duration time_exposed() {
    std::lock_guard const lock(mutex);
    return exposed;
  }

 private:
  // Of an unusable step, makes the grads NaN: what was delivered has been taken back, so nobody may
  // find it there.
  void poison_unusable() {
    {
      std::lock_guard const lock(mutex);
      if (!last_bucket_seen || !unusable) return;
    }
    c10::NoGradGuard const no_grad;
    for (at::Tensor const& parameter : parameters) {
      at::Tensor& grad = parameter.mutable_grad();
      if (grad.defined()) grad.mul_(std::numeric_limits<double>::quiet_NaN());
    }
  }
  // When no operation is left; finishes the step if it needs none. No rank uses a step of which an
  // operation failed: it did so on all, or on this one alone, which has given up.
  bool lacks_end() {
    if (last_bucket_seen && begun && !ended && !failed) {
      open_groups = 1;
      return true;
    }
    finish();
    return false;
  }
  void finish() {
    over = last_bucket_seen;
    stands = last_bucket_seen && !unusable;
    if (last_bucket_seen && unusable) take_back();
  }
  void take_back() {
    std::exception_ptr error;
    for (ParameterGroup* const group : std::exchange(delivered, {})) {
      keep_first_error(error, [&] { group->withdraw(failed); });
    }
    if (error) std::rethrow_exception(error);
  }
};

}  // namespace sparsecomm
