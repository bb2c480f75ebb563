// What hook_state.cc and hook_submit.cc share: buckets on their way, and the step they belong to.
#pragma once

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
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
    try {
      future->setErrorIfNeeded(as_distributed_error(error));
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
struct HookState::Step {
  std::mutex mutex;
  std::size_t open_groups = 0;
  bool begun = false;
  bool last_bucket_seen = false;
  bool unusable = false;             // a part of it failed or was not finite
  std::atomic<bool> stands = false;  // it is over, and every part has been delivered
  bool failed = false;
  double loss_scale = 1;  // of the gradients; 0: of the other ranks', see Bucket::joined
  std::vector<ParameterGroup*> delivered;
  std::vector<at::Tensor> parameters;  // of which something is kept, and whose grads are results
  TimePoint last_bucket_came{};
  Duration exposed{};
  std::weak_ptr<void const> backward;  // the pass that brings the gradients, as long as it goes on

  // Called on the pass's own thread, if there is one.
  static void follow_backward(std::shared_ptr<Step> const& step) {
    if (torch::autograd::get_current_graph_task_id() == -1) return;
    // The pass drops its callbacks as it ends, in whatever way.
    auto const going_on = std::make_shared<int const>();
    step->backward = going_on;
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.queue_callback([going_on, &engine, followed = std::weak_ptr(step)] {
      // After DDP's, which is queued by now, and makes the results the grads.
      engine.queue_callback([followed] {
        if (auto const over = followed.lock()) over->spoil();
      });
    });
  }
  void begin(std::size_t groups, bool last_bucket) {
    std::lock_guard const lock(mutex);
    open_groups += groups;
    begun = begun || groups > 0;
    last_bucket_seen = last_bucket_seen || last_bucket;
    if (last_bucket) last_bucket_came = steady_clock().now();
    if (open_groups == 0) finish();  // of a last bucket without parameters
  }
  bool has_begun() {
    std::lock_guard const lock(mutex);
    return begun;
  }
  // `group`: null for an operation of which nothing is kept.
  void end(ParameterGroup* group, bool usable, bool with_error) {
    std::lock_guard const lock(mutex);
    failed = failed || with_error;
    if (!usable) {
      unusable = true;
    } else if (group) {
      delivered.push_back(group);
    }
    if (last_bucket_seen) exposed = steady_clock().now() - last_bucket_came;
    if (group) group->set_exposed(exposed);
    if (--open_groups == 0) finish();
  }
  // Ends `groups` of those that began, which could not be submitted.
  void give_up(std::size_t groups) {
    std::lock_guard const lock(mutex);
    unusable = failed = true;
    open_groups -= groups;
    if (open_groups == 0) finish();
  }
  bool open() {
    std::lock_guard const lock(mutex);
    return !last_bucket_seen;
  }
  void break_off() {
    std::lock_guard const lock(mutex);
    if (last_bucket_seen) return;
    failed = true;
    take_back();
  }
  Duration time_exposed() {
    std::lock_guard const lock(mutex);
    return exposed;
  }

 private:
  // What was delivered has been taken back, so nobody must find it in a grad.
  void spoil() {
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
  void finish() {
    stands = last_bucket_seen && !unusable;
    if (last_bucket_seen && unusable) take_back();
  }
  void take_back() {
    std::exception_ptr error;
    for (ParameterGroup* const group : std::exchange(delivered, {})) {
      try {
        group->withdraw(failed);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }
};

}  // namespace sparsecomm
