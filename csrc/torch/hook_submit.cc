// How a hook's groups and buckets go to the communicator, and what becomes of them.
#include <algorithm>

#include "coo_allreduce.h"
#include "hook_step.h"

namespace sparsecomm {
namespace {

// Ends a step that its last operation has not ended on all ranks: there was more to come on one of
// them, or it was of a kind that ends nothing.
class EndOfStep final : public Operation {
 public:
  Proposal prepare() override { return {.text = "operation=end of a step"}; }
  void run(Channel& channel, Agreement const& agreement) override { agreement.commit(channel); }
  Batch const* batch() const override { return &batch_of_one; }
  bool is_last() const override { return true; }
};

}  // namespace

// Buckets that wait for one that will not come would wait forever.
void HookState::fail_waiting(std::exception_ptr const& error) {
  for (auto const& [group, buckets] : std::exchange(waiting_, {})) {
    for (auto const& bucket : buckets) bucket->group_done(error);
  }
  for (auto const& [gradient, bucket] : std::exchange(held_sparse_, {})) bucket->group_done(error);
  for (auto const& [bucket, pending] : std::exchange(unformed_, {})) pending->fail(error);
}

void HookState::release_waiting() {
  Entry const entry(*this);
  for (auto const& [group, buckets] : std::exchange(waiting_, {})) {
    for (auto const& bucket : buckets) bucket->group_done({});
  }
  for (auto const& [bucket, pending] : std::exchange(unformed_, {})) pending->complete();
}

void HookState::submit_sparse() {
  while (!held_sparse_.empty()) {
    auto const& [gradient, pending] = held_sparse_.front();
    submit_groupless(std::make_shared<CooAllreduce>(gradient, c10d::ReduceOp::AVG, *communicator_,
                                                    sparse_pool_, step_->loss_scale),
                     pending,
                     [gradient] { return gradient._values().isfinite().all().item<bool>(); });
    held_sparse_.erase(held_sparse_.begin());
  }
}

// On the thread that brings the last bucket, or that of the communicator.
void HookState::submit_end_of_step(std::shared_ptr<Step> const& step, Communicator& communicator) {
  auto const finish = [this, step](std::exception_ptr error) {
    bool const failed = error != nullptr;
    keep_first_error(error, [&] { step->end(nullptr, !failed, failed, true); });
    --groupless_in_flight_;  // before whoever waits for the last bucket may begin the next step
    step->complete_last_bucket(error);
  };
  ++groupless_in_flight_;
  try {
    communicator.submit(std::make_shared<EndOfStep>(), finish, "end of step");
  } catch (...) {
    finish(std::current_exception());
  }
}

void HookState::submit_groupless(std::shared_ptr<Operation> operation,
                                 std::shared_ptr<PendingBucket> const& pending,
                                 std::function<bool()> const& usable) {
  auto const finish = [this, pending, usable, step = step_,
                       &communicator = *communicator_](std::exception_ptr error) {
    bool const failed = error != nullptr;
    bool good = false;
    if (!failed) keep_first_error(error, [&] { good = usable(); });
    keep_first_error(error, [&] {
      if (step->end(nullptr, good, failed, false)) submit_end_of_step(step, communicator);
    });
    --groupless_in_flight_;  // before whoever waits for the bucket may begin the next step
    pending->group_done(error);
    step->complete_last_bucket();
  };
  ++groupless_in_flight_;
  try {
    communicator_->submit(std::move(operation), finish);
  } catch (...) {
    --groupless_in_flight_;
    throw;
  }
}

void HookState::submit(std::vector<ParameterGroup*> const& groups, bool last_bucket,
                       std::shared_ptr<PendingBucket> const& ends_with_step) {
  bool const agrees = last_bucket && trial_ && trial_->is_over();
  std::size_t left = groups.size() + (agrees ? 1 : 0);
  bool const lacks_end = step_->begin(left + held_sparse_.size(), last_bucket, ends_with_step);
  step_->complete_last_bucket();  // of a step that has failed before
  try {
    submit_sparse();
    submit_groups(groups, left);
    if (agrees) {
      submit_agreement();
      --left;
    }
    if (lacks_end) submit_end_of_step(step_, *communicator_);
  } catch (...) {
    step_->give_up(left + held_sparse_.size());
    throw;
  }
}

// Counts `left` down. Of a group that cannot be submitted the buckets go on waiting.
void HookState::submit_groups(std::vector<ParameterGroup*> const& groups, std::size_t& left) {
  std::shared_ptr<c10::Event const> clipped;
  if (side_ && options_.clip_norm > 0) clipped = side_->mark_current();
  for (ParameterGroup* const group : groups) {
    auto const buckets = waiting_.at(group);
    Awaited awaited;
    if (side_) {
      std::vector<std::shared_ptr<c10::Event const>> made;
      for (auto const& waiting : buckets) made.push_back(waiting->made);
      if (clipped) made.push_back(clipped);
      awaited.is_here = [side = side_.get(), made] {
        return std::ranges::all_of(made, [&](auto const& event) { return side->is_over(*event); });
      };
      awaited.wait = [side = side_.get(), made = std::move(made)] {
        for (auto const& event : made) side->wait(*event);
      };
    }
    group->submit(
        std::move(awaited),
        [this, group, step = step_, &communicator = *communicator_](bool failed, bool usable) {
          bool const lacks_end =
              step->end(group, usable && group->delivered(), failed, group->ended_batch());
          if (lacks_end) submit_end_of_step(step, communicator);
        },
        [buckets, step = step_](std::exception_ptr const& error) {
          for (auto const& waiting : buckets) waiting->group_done(error);
          step->complete_last_bucket();
        },
        *step_, step_->loss_scale);
    waiting_.erase(group);
    --left;
  }
}

}  // namespace sparsecomm
