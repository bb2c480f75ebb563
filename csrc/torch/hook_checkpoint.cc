// What a hook's state saves, and how it is restored.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "hook_state.h"
#include "tensor_memory.h"

namespace sparsecomm {
namespace {

at::ScalarType residual_dtype(at::Tensor const& parameter) {
  return parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// What the checkpoint has for the group. Thresholds and boundaries fit only the group they were
// found for; a new grouping finds its own.
ExchangeState state_for(ParameterGroup const& group, HookCheckpoint const& loaded) {
  std::vector<std::string> keys;
  for (ParameterGroup::Member const& member : group.members()) keys.push_back(member.key);
  ExchangeState state;
  state.loss_scale = loaded.loss_scale;
  for (HookCheckpoint::Group const& saved : loaded.groups) {
    if (saved.parameters == keys) return saved.state;
    state.step = std::max(state.step, saved.state.step);
  }
  return state;
}

// A 1-D copy.
at::Tensor row_major(at::Tensor const& kept) {
  return kept.clone(at::MemoryFormat::Contiguous).view({-1});
}

// The layout first: of other tensors no number can be read.
void check_readable(at::Tensor const& tensor, std::string const& key) {
  require(tensor.defined() && tensor.layout() == at::kStrided && has_memory(tensor),
          "the state_dict to load has no dense tensor with values for ", key);
}

}  // namespace

void HookCheckpoint::follow(double other_scale) {
  if (other_scale == loss_scale) return;
  double const ratio = other_scale / loss_scale;
  for (auto* const kept : {&residuals, &moments}) {
    for (auto& [key, tensor] : *kept) tensor = tensor * ratio;
  }
  for (Group& group : groups) {
    group.state.local_threshold *= ratio;
    group.state.collective.global_threshold *= ratio;
    group.state.loss_scale = other_scale;
  }
  loss_scale = other_scale;
}

// Throws InvalidArgument unless the loaded checkpoint fits the group.
void HookState::check_loaded(ParameterGroup const& group) const {
  for (ParameterGroup::Member const& member : group.members()) {
    check_loaded(member.key, member.layout, group.residual().scalar_type(), group.has_moment());
  }
}

void HookState::check_loaded(std::string const& key, Layout const& layout, at::ScalarType dtype,
                             bool keeps_moment) const {
  std::int64_t const numel = c10::multiply_integers(layout.sizes());
  auto const saved = loaded_->residuals.find(key);
  require(saved != loaded_->residuals.end(), "the loaded state_dict has no residual for ", key,
          "; it belongs to another model, or was saved with other parameter names; to a parameter "
          "that was frozen then, give a residual of zeros (docs/training.md, Unfreezing layers)");
  require(saved->second.numel() == numel, "the loaded residual of ", key, " has ",
          saved->second.numel(), " entries, the parameter ", numel,
          "; it belongs to another model");
  require(saved->second.scalar_type() == dtype, "the loaded residual of ", key, " is ",
          at::toString(saved->second.scalar_type()), ", that of this model ", at::toString(dtype),
          "; it belongs to another model");
  require(loaded_->row_major || layout.row_major(), "the state_dict to load has the residual of ",
          key,
          " in the order of memory that the parameter had when it was saved, and does not say "
          "which that was; now its strides are ",
          layout.strides(), " for the shape ", layout.sizes(),
          ": load it while the model is contiguous, as the saved one was, and "
          "convert the model afterwards; or put it into row-major order yourself "
          "(docs/training.md, Checkpoints)");
  auto const moment = loaded_->moments.find(key);
  bool const has_moment = moment != loaded_->moments.end();
  require(has_moment == keeps_moment, "the loaded state_dict has ", has_moment ? "a" : "no",
          " moment for ", key, ", this state ", keeps_moment ? "keeps one" : "keeps none",
          ": use the momentum and first_moment that it was saved with");
  if (!has_moment) return;
  require(!moment->second.is_complex(), "the loaded moment of ", key, " is complex");
  require(moment->second.numel() == saved->second.numel(), "the loaded moment of ", key, " has ",
          moment->second.numel(), " entries, its residual ", saved->second.numel(),
          "; it belongs to another model");
}

// As above, of the named parameters that have not come yet. What the checkpoint lacks may have had
// a sparse gradient, of which nothing is kept.
void HookState::check_loaded_names() const {
  if (names_.empty()) return;
  for (at::Tensor const& parameter : parameters_) {
    auto const name = names_.find(parameter.unsafeGetTensorImpl());
    if (name == names_.end() || !loaded_->residuals.contains(name->second)) continue;
    check_loaded(name->second, Layout(parameter), residual_dtype(parameter),
                 options_of(parameter).rule.has_moment());
  }
  check_all_loaded();
}

void HookState::restore(ParameterGroup& group) {
  group.load_state(state_for(group, *loaded_));  // which may throw, so before anything is written
  copy_kept(*loaded_, group);
}

// Of those members that the checkpoint has.
void HookState::copy_kept(HookCheckpoint const& from, ParameterGroup const& group) const {
  if (side_) side_->let_current_wait();
  for (ParameterGroup::Member const& member : group.members()) {
    auto const residual = from.residuals.find(member.key);
    if (residual == from.residuals.end()) continue;
    c10::IntArrayRef const sizes = member.layout.sizes();
    group.residual_of(member).copy_(residual->second.reshape(sizes));
    if (group.has_moment()) {
      group.moment_of(member).copy_(from.moments.at(member.key).reshape(sizes));
    }
  }
  if (side_) side_->wait_for_current();
}

// Gives a new group what its parameters have kept in groups that are no more, and zeros to others.
// Returns false if it has none of them.
bool HookState::restore_dissolved(ParameterGroup& group) {
  auto const is_kept = [this](ParameterGroup::Member const& member) {
    return dissolved_->residuals.contains(member.key);
  };
  if (!dissolved_ || std::ranges::none_of(group.members(), is_kept)) return false;
  group.load_state(state_for(group, *dissolved_));
  copy_kept(*dissolved_, group);
  return true;
}

// What no group has taken over waits for parameters that have not come again.
void HookState::settle_dissolved() {
  std::set<std::string> const taken = keys_of_groups();
  std::erase_if(dissolved_->residuals,
                [&](auto const& item) { return taken.contains(item.first); });
  std::erase_if(dissolved_->moments, [&](auto const& item) { return taken.contains(item.first); });
  if (dissolved_->residuals.empty()) dissolved_.reset();
}

std::set<std::string> HookState::keys_of_groups() const {
  std::set<std::string> keys;
  for (auto const& group : groups_) {
    for (ParameterGroup::Member const& member : group->members()) keys.insert(member.key);
  }
  return keys;
}

void HookState::check_all_loaded() const {
  std::set<std::string> known = keys_of_groups();
  for (auto const& [parameter, place] : former_places_) known.insert(place.key);
  for (auto const& [parameter, name] : names_) known.insert(name);
  for (auto const& [key, residual] : loaded_->residuals) {
    require(known.contains(key), "the loaded state_dict has a residual of ", key,
            ", which the model does not have; it belongs to another model");
  }
}

// What no group has taken over waits for parameters that have not come yet.
void HookState::settle_loaded() {
  std::set<std::string> const taken = keys_of_groups();
  std::set<std::string> between_groups;
  for (auto const& [parameter, place] : former_places_) between_groups.insert(place.key);
  auto const has_mass = [](std::map<std::string, at::Tensor> const& kept, std::string const& key) {
    auto const found = kept.find(key);
    return found != kept.end() && found->second.any().item<bool>();
  };
  std::erase_if(loaded_->residuals, [&](auto const& item) {
    return taken.contains(item.first) ||
           !(between_groups.contains(item.first) || has_mass(loaded_->residuals, item.first) ||
             has_mass(loaded_->moments, item.first));
  });
  if (loaded_->residuals.empty()) loaded_.reset();
}

// The unit that a checkpoint is in. What a group kept of a step that failed may be in another.
double HookState::kept_loss_scale() const {
  if (!groups_.empty()) return groups_.front()->state().loss_scale;
  if (dissolved_) return dissolved_->loss_scale;
  return loaded_ ? loaded_->loss_scale : 1;
}

// Adds a group. On a device copies are made on the current stream.
void HookState::keep(ParameterGroup const& group, HookCheckpoint& checkpoint) {
  HookCheckpoint::Group& saved = checkpoint.groups.emplace_back();
  saved.state = group.state();
  for (ParameterGroup::Member const& member : group.members()) {
    saved.parameters.push_back(member.key);
    checkpoint.residuals.insert_or_assign(member.key, row_major(group.residual_of(member)));
    if (group.has_moment()) {
      checkpoint.moments.insert_or_assign(member.key, row_major(group.moment_of(member)));
    }
  }
}

// Adds what no group has taken over yet.
void HookState::add_rest(HookCheckpoint rest, HookCheckpoint& checkpoint) {
  rest.follow(checkpoint.loss_scale);
  for (HookCheckpoint::Group const& group : rest.groups) {
    bool const taken = std::ranges::any_of(
        group.parameters, [&](auto const& key) { return checkpoint.residuals.contains(key); });
    if (!taken) checkpoint.groups.push_back(group);
  }
  checkpoint.residuals.merge(rest.residuals);
  checkpoint.moments.merge(rest.moments);
}

HookCheckpoint HookState::checkpoint() const {
  Entry const entry(*this);
  require_idle("save the state");
  take_back_broken_step("save the state");
  HookCheckpoint checkpoint;
  if (by_bucket_) return checkpoint;
  share_density();  // as before the next step, which a resumed run has other groups for at first
  checkpoint.loss_scale = kept_loss_scale();
  checkpoint.grouping = decision();
  for (auto const& group : groups_) group->follow(checkpoint.loss_scale);
  if (side_) side_->let_current_wait();
  for (auto const& group : groups_) keep(*group, checkpoint);
  if (side_) side_->wait_for_current();  // before the next step changes what is being copied
  if (dissolved_) add_rest(*dissolved_, checkpoint);
  if (loaded_) {
    add_rest(*loaded_, checkpoint);
    checkpoint.row_major = loaded_->row_major;
  } else {
    add_unseen(checkpoint);
  }
  add_moments_to_come(checkpoint);
  return checkpoint;
}

// Zeros of the named parameters that have not come, since torch.distributed.checkpoint loads into
// what it finds.
void HookState::add_unseen(HookCheckpoint& checkpoint) const {
  for (at::Tensor const& parameter : parameters_) {
    auto const name = names_.find(parameter.unsafeGetTensorImpl());
    if (name == names_.end() || !parameter.requires_grad() ||
        checkpoint.residuals.contains(name->second)) {
      continue;
    }
    at::Tensor const zeros =
        at::zeros({parameter.numel()}, parameter.options().dtype(residual_dtype(parameter)));
    checkpoint.residuals.emplace(name->second, zeros);
    if (options_of(parameter).rule.has_moment()) {
      checkpoint.moments.emplace(name->second, zeros.clone());
    }
  }
}

void HookState::load(HookCheckpoint checkpoint) {
  Entry const entry(*this);
  require_idle("load a state");
  require_open();
  if (by_bucket_) {
    require(checkpoint.residuals.empty() && checkpoint.groups.empty(),
            "the state_dict to load has ", checkpoint.residuals.size(),
            " residuals, and a dense exchange has none; it belongs to another kind of state");
    return;
  }
  double const loss_scale = checkpoint.loss_scale;
  require(std::isfinite(loss_scale) && loss_scale > 0,
          "the state_dict to load has a loss scale of ", loss_scale,
          ", which no gradient can be divided by");
  take_back_broken_step("load a state");
  if (communicator_) communicator_->set_steps_broken_off(0);
  if (groups_.empty() && checkpoint.residuals.empty() && checkpoint.groups.empty()) {
    loaded_.reset();  // of a run without a step, whose parameters had no names
    moments_.clear();
    load_grouping({});
    return;
  }
  std::optional<HookCheckpoint> const before = std::exchange(loaded_, std::move(checkpoint));
  std::vector<ExchangeState> former;  // of the groups that have been tried
  try {
    for (auto const* const kept : {&loaded_->residuals, &loaded_->moments}) {
      for (auto const& [key, tensor] : *kept) check_readable(tensor, key);
    }
    for (auto const& group : groups_) check_loaded(*group);
    check_loaded_names();
    if (sealed_) check_all_loaded();
    for (auto const& group : groups_) {
      group->follow(group->state().loss_scale);
      former.push_back(group->state());
      group->load_state(state_for(*group, *loaded_));
    }
  } catch (InvalidArgument const&) {
    for (std::size_t i = 0; i < former.size(); ++i) groups_[i]->load_state(former[i]);
    loaded_ = before;
    throw;
  }
  for (auto const& group : groups_) restore(*group);
  dissolved_.reset();
  moments_.clear();
  load_grouping(loaded_->grouping);
  tried_ = loaded_->groups;
  // What is named has been checked, in whatever layout it comes then.
  if (!names_.empty()) loaded_->row_major = true;
  if (sealed_) settle_loaded();
  if (!loaded_) return;
  // The rest is kept until its parameters come, and the caller, or a file, may change meanwhile.
  for (auto* const kept : {&loaded_->residuals, &loaded_->moments}) {
    for (auto& [key, tensor] : *kept) tensor = tensor.detach().clone();
  }
}

void HookState::put_moment(at::Tensor const& velocity, ParameterGroup const& group,
                           ParameterGroup::Member const& member) const {
  at::Tensor const moment = group.moment_of(member);
  if (side_) side_->let_current_wait();
  moment.copy_(velocity.detach());
  moment.mul_(group.state().loss_scale);
  if (side_) side_->wait_for_current();
}

// To a new group, which has made no step.
void HookState::copy_moments_to(ParameterGroup const& group) const {
  if (!group.has_moment()) return;
  for (ParameterGroup::Member const& member : group.members()) {
    auto const velocity = moments_.find(member.parameter);
    if (velocity != moments_.end()) put_moment(velocity->second, group, member);
  }
}

void HookState::add_moments_to_come(HookCheckpoint& checkpoint) const {
  for (auto const& [parameter, velocity] : moments_) {
    auto const name = names_.find(parameter);
    if (name == names_.end() || velocity_of(parameter).momentum == 0) continue;
    at::Tensor const moment = row_major(velocity).mul_(checkpoint.loss_scale);
    checkpoint.moments.insert_or_assign(name->second, moment);
    checkpoint.residuals.try_emplace(name->second, at::zeros_like(moment));
  }
}

void HookState::set_moments(std::vector<std::pair<at::Tensor, at::Tensor>> const& velocities) {
  Entry const entry(*this);
  require_idle("set velocities");
  take_back_broken_step("set velocities");
  for (auto const& [parameter, velocity] : velocities) {
    void const* const key = parameter.unsafeGetTensorImpl();
    if (!places_.contains(key)) require_of_model(parameter);
    require(velocity_of(key).momentum > 0, "a velocity for a parameter of shape ",
            parameter.sizes(), ", which has no momentum: set its momentum first");
    require(velocity.layout() == at::kStrided && has_memory(velocity) &&
                velocity.sizes() == parameter.sizes() &&
                velocity.scalar_type() == residual_dtype(parameter),
            "a velocity of shape ", velocity.sizes(), " and dtype ",
            at::toString(velocity.scalar_type()), " for a parameter of shape ", parameter.sizes(),
            ": it must be a dense ", at::toString(residual_dtype(parameter)), " of that shape");
    require(at::isfinite(velocity).all().item<bool>(), "a velocity for a parameter of shape ",
            parameter.sizes(), " has a NaN or an infinity, which would stay in it for good");
  }
  for (auto const& group : groups_) group->follow(group->state().loss_scale);
  c10::NoGradGuard const no_grad;
  for (auto const& [parameter, velocity] : velocities) {
    auto const place = places_.find(parameter.unsafeGetTensorImpl());
    if (place != places_.end()) {
      ParameterGroup const& group = *place->second.group;
      put_moment(velocity, group, group.members()[place->second.member]);
      continue;
    }
    if (!moments_.contains(parameter.unsafeGetTensorImpl())) parameters_.push_back(parameter);
    moments_.insert_or_assign(parameter.unsafeGetTensorImpl(), velocity.detach().clone());
  }
}

}  // namespace sparsecomm
