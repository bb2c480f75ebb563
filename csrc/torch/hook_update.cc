// What an optimizer asks of a state beside the exchange.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "base/shortest.h"
#include "hook_state.h"

namespace sparsecomm {
namespace {

// All elements in the order in which they lie in memory.
at::Tensor in_memory_order(at::Tensor const& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1});
}

// As torch's own dense update rounds it: its kernel works on what is gathered.
void add_at(std::span<const std::uint32_t> indices, std::size_t offset, at::Tensor const& parameter,
            at::Tensor const& gradient, double factor) {
  at::Tensor positions = at::empty({static_cast<std::int64_t>(indices.size())}, at::kLong);
  std::ranges::transform(indices, positions.mutable_data_ptr<std::int64_t>(),
                         [&](std::uint32_t index) { return index - offset; });
  positions = positions.to(parameter.device());
  at::Tensor const all = in_memory_order(parameter);
  at::Tensor const changed = all.index_select(0, positions);
  changed.add_(in_memory_order(gradient).index_select(0, positions), factor);
  all.index_copy_(0, positions, changed);
}

std::string text_of_velocity(VelocityRule const& rule) {
  return concat("momentum = ", Shortest{rule.momentum}, ", gain = ", Shortest{rule.gain},
                ", nesterov = ", rule.nesterov ? "true" : "false");
}

}  // namespace

void HookState::set_momenta(
    std::vector<std::tuple<at::Tensor, double, double, bool>> const& entries) {
  Entry const entry(*this);
  require_idle("change the momentum");
  take_back_broken_step("change the momentum");
  // Schedulers change it at every step: the map's nodes are there from the last time.
  changed_velocities_ = velocities_;
  for (auto const& [parameter, momentum, gain, nesterov] : entries) {
    VelocityRule const rule{momentum, gain, nesterov};
    validate(rule);
    // Here and below texts are made only where they are needed.
    if (rule != VelocityRule() && (by_bucket_ || options_.exchange.rule.first_moment > 0)) {
      throw InvalidArgument(concat("a parameter with ", text_of_velocity(rule), " in a state ",
                                   by_bucket_ ? "that sends every entry and keeps nothing: use one "
                                                "that compresses, at density 1 perhaps"
                                              : "with a first_moment: leave that at 0"));
    }
    void const* const key = parameter.unsafeGetTensorImpl();
    if (!places_.contains(key) && !sparse_orders_.contains(key)) require_of_model(parameter);
    changed_velocities_.insert_or_assign(key, rule);
  }
  velocities_.swap(changed_velocities_);
  try {
    check_velocities();
  } catch (...) {
    velocities_.swap(changed_velocities_);
    throw;
  }
  for (auto const& [parameter, momentum, gain, nesterov] : entries) {
    if (!changed_velocities_.contains(parameter.unsafeGetTensorImpl()))
      parameters_.push_back(parameter);
  }
  for (auto const& group : groups_) {
    group->set_velocity(velocity_of(group->members().front().parameter));
  }
}

// Throws InvalidArgument unless each group's parameters have one rule, which differs from the one
// it has had only in numbers.
void HookState::check_velocities() const {
  for (auto const& group : groups_) {
    ParameterGroup::Member const& first = group->members().front();
    VelocityRule const rule = velocity_of(first.parameter);
    for (ParameterGroup::Member const& member : group->members()) {
      VelocityRule const other = velocity_of(member.parameter);
      if (other == rule) continue;
      throw InvalidArgument(
          concat("parameters ", first.key, " (", text_of_velocity(rule), ") and ", member.key, " (",
                 text_of_velocity(other),
                 ") have been exchanged together since the first step: change the momentum of both "
                 "alike, or make a new state, which groups them by it"));
    }
    VelocityRule const former = group->velocity();
    if ((rule.momentum > 0) == (former.momentum > 0) && rule.nesterov == former.nesterov) continue;
    throw InvalidArgument(concat(
        "parameter ", first.key, " has ", text_of_velocity(former), ", and cannot have ",
        text_of_velocity(rule),
        " now: numbers above 0 may change after the first step, nothing else; make a new state "
        "for another kind of momentum"));
  }
}

void HookState::add_parameters(std::vector<std::pair<std::string, at::Tensor>> const& parameters,
                               std::vector<std::pair<at::Tensor, double>> const& densities) {
  Entry const entry(*this);
  require_idle("add parameters");
  for (auto const& [name, parameter] : parameters) {
    names_.emplace(parameter.unsafeGetTensorImpl(), name);
    parameters_.push_back(parameter);
  }
  for (auto const& [parameter, density] : densities) {
    densities_.emplace(parameter.unsafeGetTensorImpl(), density);
  }
  sealed_ = false;
}

void HookState::add_received(std::vector<at::Tensor> const& parameters,
                             std::vector<at::Tensor> const& gradients, double factor,
                             bool everywhere) {
  Entry const entry(*this);
  require_idle("apply what was received");
  require(parameters.size() == gradients.size(), gradients.size(), " gradients for ",
          parameters.size(), " parameters: give one each");
  c10::NoGradGuard const no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor const& parameter = parameters[i];
    auto const place = places_.find(parameter.unsafeGetTensorImpl());
    require(place != places_.end(), "a parameter of shape ", parameter.sizes(),
            " has not been exchanged by this state");
    ParameterGroup const& group = *place->second.group;
    ParameterGroup::Member const& member = group.members()[place->second.member];
    auto const received = group.received();
    if (everywhere || !received || parameter.strides() != gradients[i].strides() ||
        !member.layout.is_of(gradients[i])) {
      parameter.add_(gradients[i], factor);
      continue;
    }
    auto const first = std::ranges::lower_bound(*received, member.offset);
    auto const last =
        std::ranges::lower_bound(first, received->end(), member.offset + member.numel);
    if (first == last) continue;
    add_at({first, last}, member.offset, parameter, gradients[i], factor);
  }
}

}  // namespace sparsecomm
