// Which of two ways of grouping a hook's state tries and keeps, see GroupsBy::measured.
#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "engine/payload.h"
#include "hook_step.h"

namespace sparsecomm {

// Tells the ranks what each of them has measured.
class HookState::GroupingAgreement final : public Operation {
 public:
  GroupingAgreement(GroupingTimes const& own, std::shared_ptr<Batch const> step)
      : own_(own), step_(std::move(step)) {}

  Proposal prepare() override {
    return {.text = "operation=agreement on groups", .payload = payload_of(own_)};
  }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return merge_payload<GroupingTimes>(into, other);
  }
  void run(Channel& channel, Agreement const& agreement) override {
    ends_batch_ = agreement.ends_batch;
    if (ends_batch_) agreement.commit(channel);
    agreed_ = read_payload<GroupingTimes>(agreement.payload);
  }
  Batch const* batch() const override { return step_.get(); }

  bool ended_batch() const { return ends_batch_; }
  // None if it has failed.
  std::optional<GroupingTimes> const& agreed() const { return agreed_; }

 private:
  GroupingTimes own_;
  std::shared_ptr<Batch const> step_;
  bool ends_batch_ = false;
  std::optional<GroupingTimes> agreed_;
};

// Before the first bucket of a step, when the former one, if there is one, is over.
void HookState::follow_trial() {
  if (!trial_) return;
  if (agreement_) {
    if (agreement_->agreed()) trial_->decide(*agreement_->agreed());
    agreement_.reset();
  }
  if (!trial_->decided() && step_ && !std::exchange(step_->observed, true)) observe_step();
  bool const by_bucket = trial_->grouping() == Grouping::buckets;
  GroupsBy const next = by_bucket ? GroupsBy::bucket : GroupsBy::number;
  if (next == groups_by_) return;
  if (!by_bucket) {
    while (!groups_.empty()) dissolve(*groups_.back());
  }
  groups_by_ = next;
  // These dissolve as the buckets come.
  for (auto const& group : groups_) {
    HookCheckpoint::Group& tried = tried_.emplace_back();
    for (ParameterGroup::Member const& member : group->members()) {
      tried.parameters.push_back(member.key);
    }
    tried.state = group->state();
  }
}

void HookState::observe_step() {
  auto const duration = step_->time_since_first_bucket();
  if (!duration) return;
  DensityWarmup const& warmup = options_.exchange.warmup;
  std::uint64_t const warm = warmup.dense_steps + warmup.stage_steps * warmup.stages.size();
  for (auto const& group : groups_) {
    if (group->state().step <= warm) return;  // of the step before, since it counts steps
  }
  std::optional<double> seconds;
  if (!step_->joined) seconds = std::chrono::duration<double>(*duration).count();
  trial_->observe(step_->buckets,
                  std::ranges::all_of(groups_, [](auto const& group) { return group->settled(); }),
                  seconds);
}

void HookState::submit_agreement() {
  auto const agreement = std::make_shared<GroupingAgreement>(trial_->times(), step_);
  auto const finish = [this, agreement, step = step_,
                       &communicator = *communicator_](std::exception_ptr error) {
    bool const failed = error != nullptr;
    keep_first_error(error, [&] {
      if (step->end(nullptr, !failed, failed, agreement->ended_batch()))
        submit_end_of_step(step, communicator);
    });
    --groupless_in_flight_;  // before whoever waits for the last bucket may begin the next step
    step->complete_last_bucket(error);
  };
  ++groupless_in_flight_;
  try {
    communicator_->submit(agreement, finish, "agreement on groups");
  } catch (...) {
    --groupless_in_flight_;
    throw;
  }
  agreement_ = agreement;
}

// None: there has been no decision.
void HookState::load_grouping(std::optional<GroupingTimes> const& decision) {
  if (!trial_) return;
  trial_.emplace();
  if (decision) trial_->decide(*decision);
  agreement_.reset();
  if (step_) step_->observed = true;
}

std::optional<GroupingTimes> HookState::decision() const {
  if (agreement_ && agreement_->agreed()) return agreement_->agreed();
  if (trial_ && trial_->decided()) return trial_->times();
  return std::nullopt;
}

// That of a group with the same parameters, before the other way was tried or in a checkpoint.
void HookState::adopt_plan(ParameterGroup& group) const {
  auto const same = [&](HookCheckpoint::Group const& tried) {
    return std::ranges::equal(group.members(), tried.parameters, {}, &ParameterGroup::Member::key);
  };
  auto const tried = std::ranges::find_if(tried_, same);
  if (tried == tried_.end()) return;
  ExchangeState state = group.state();
  state.plan = tried->state.plan;
  group.load_state(state);
}

}  // namespace sparsecomm
