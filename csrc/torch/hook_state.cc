#include "hook_state.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "distributed_error.h"
#include "interpreter.h"
#include "kernels/cuda_library.h"

namespace sparsecomm {

// A bucket is done when all groups that have parameters in it are.
struct HookState::PendingBucket {
  c10::IValue value;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  SideStream const* side = nullptr;
  std::shared_ptr<c10::Event const> made;  // on a device: what makes the bucket
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
      // Of a callback: the future has its error.
    }
  }

  // On a device the result has been enqueued: whoever waits for the future waits for the stream
  // that is current now.
  void complete() {
    if (!side) {
      future->markCompleted(value);
      return;
    }
    auto const current = side->make_current();
    // A future that fails to record its event never wakes who waits for it: fail before.
    side->mark_current();
    future->markCompleted(value);
  }
};

// The exchanges between two optimizer steps stand or fall together: when one of them failed, or
// carried a NaN, the optimizer will not use the others' results, so what they delivered is taken
// back.
struct HookState::Step {
  std::mutex mutex;
  std::size_t open_groups = 0;
  bool last_bucket_seen = false;
  bool unusable = false;
  std::vector<ParameterGroup*> delivered;

  void begin(std::size_t groups, bool last_bucket) {
    std::lock_guard const lock(mutex);
    open_groups += groups;
    last_bucket_seen = last_bucket_seen || last_bucket;
  }
  void end(ParameterGroup& group, bool failed) {
    std::lock_guard const lock(mutex);
    if (!failed && group.delivered()) {
      delivered.push_back(&group);
    } else {
      unusable = true;
    }
    if (--open_groups == 0 && last_bucket_seen && unusable) take_back();
  }
  void break_off() {
    std::lock_guard const lock(mutex);
    if (!last_bucket_seen) take_back();
  }

 private:
  void take_back() {
    std::exception_ptr error;
    for (ParameterGroup* const group : std::exchange(delivered, {})) {
      try {
        group->withdraw();
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }
};

HookState::HookState(ExchangeOptions options, CommunicatorOptions communicator_options,
                     std::string cuda_library)
    : options_((validate(options), std::move(options))),
      by_bucket_(options_.algorithm != auto_algorithm &&
                 !find_algorithm(options_.algorithm).sparse),
      communicator_options_(communicator_options),
      cuda_library_(std::move(cuda_library)) {}

HookState::~HookState() {
  InterpreterRelease const release;
  communicator_.reset();  // first, since its thread uses the groups
}

void HookState::name_parameters(std::vector<std::pair<std::string, at::Tensor>> const& parameters) {
  require(places_.empty(), "parameters must be named before the first step");
  names_.clear();
  for (auto const& [name, parameter] : parameters) {
    names_.emplace(parameter.unsafeGetTensorImpl(), name);
    parameters_.push_back(parameter);
  }
}

void HookState::connect(std::unique_ptr<Transport> transport) {
  require(!communicator_, "this state is connected already");
  communicator_ = std::make_unique<Communicator>(std::move(transport), communicator_options_);
}

c10::intrusive_ptr<c10::ivalue::Future> HookState::run(c10d::GradBucket& bucket, c10::IValue value,
                                                       c10::TypePtr type) {
  at::Tensor& buffer = bucket.getBufferRef();
  require(communicator_ != nullptr, "this state has no process group yet");
  require(buffer.layout() == at::kStrided, "bucket ", bucket.getIndex(),
          " holds a sparse gradient; this hook compresses dense gradients: use "
          "torch.nn.Embedding(sparse=False), or no hook and the backend \"sparsecomm\"");
  settle_device(bucket);

  if (bucket.getIndex() == 0) {
    // The former step may have been broken off, by an exception in the backward pass say.
    for (auto const& group : groups_) {
      require(!group->busy(),
              "a new step began while the gradients of the last one are being exchanged");
      group->discard_arrivals();
    }
    waiting_.clear();
    if (step_) step_->break_off();
    step_ = std::make_shared<Step>();
  }
  std::vector<at::Tensor> const parameters = bucket.getParameters();
  std::vector<at::Tensor> const gradients = bucket.getGradients();
  form_group(parameters, buffer.scalar_type());
  last_buckets_ += bucket.isLast();
  if (bucket.isLast() && !sealed_) {
    if (loaded_) check_all_loaded();
    loaded_.reset();
    sealed_ = true;
  }

  auto const pending = std::make_shared<PendingBucket>();
  pending->value = std::move(value);
  pending->future = c10::make_intrusive<c10::ivalue::Future>(
      std::move(type), side_ ? std::vector{*device_} : std::vector<at::Device>{});
  pending->side = side_.get();
  if (side_) {
    pending->made = side_->mark_current();
    side_->use(buffer);
  }
  std::set<ParameterGroup*> touched;
  std::vector<ParameterGroup*> complete;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Place const place = places_.at(parameters[i].unsafeGetTensorImpl());
    touched.insert(place.group);
    require(place.group->dtype() == buffer.scalar_type(), "parameter ",
            place.group->members()[place.member].key, " changed its dtype to ",
            at::toString(buffer.scalar_type()), "; make a new state for the converted model");
    if (place.group->arrive(place.group->members()[place.member], gradients[i].data_ptr())) {
      complete.push_back(place.group);
    }
  }
  pending->open_groups = touched.size();
  for (ParameterGroup* const group : touched) waiting_[group].push_back(pending);
  if (touched.empty()) pending->complete();
  step_->begin(complete.size(), bucket.isLast());
  for (ParameterGroup* const group : complete) {
    auto const buckets = std::move(waiting_[group]);
    waiting_.erase(group);
    std::function<void()> ready;
    if (side_) {
      std::vector<std::shared_ptr<c10::Event const>> made;
      for (auto const& waiting : buckets) made.push_back(waiting->made);
      ready = [side = side_.get(), made = std::move(made)] {
        for (auto const& event : made) side->wait(*event);
      };
    }
    group->submit(
        std::move(ready),
        [group, step = step_](std::exception_ptr const& error) {
          step->end(*group, error != nullptr);
        },
        [buckets](std::exception_ptr const& error) {
          for (auto const& waiting : buckets) waiting->group_done(error);
        });
  }
  return pending->future;
}

// Opens what the gradients' device needs; throws InvalidArgument where they cannot be exchanged.
void HookState::settle_device(c10d::GradBucket& bucket) {
  at::Device const device = bucket.getBufferRef().device();
  if (!device_) {
    require(device.is_cpu() || device.is_cuda(), "bucket ", bucket.getIndex(), " is on ",
            device.str(),
            "; gradients are exchanged on CPUs and on CUDA devices: move the model to "
            "one of these, or train without the hook");
    if (device.is_cuda()) {
      side_ = std::make_unique<SideStream>(device, open_cuda_library(cuda_library_));
    }
    device_ = device;
  }
  require(device == *device_, "bucket ", bucket.getIndex(), " is on ", device.str(),
          ", but others were on ", device_->str(),
          "; a state belongs to one device: put the model on one per process");
}

// Whether the parameters, in this order, are a group's.
bool HookState::is_group(std::vector<at::Tensor> const& parameters) const {
  ParameterGroup const* group = nullptr;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto const place = places_.find(parameters[i].unsafeGetTensorImpl());
    if (place == places_.end() || place->second.member != i) return false;
    if (group == nullptr) group = place->second.group;
    if (place->second.group != group) return false;
  }
  return group == nullptr || group->members().size() == parameters.size();
}

// Parameters that no bucket has brought before form a new group, in the order of the bucket. By
// bucket, all of a bucket that is new do; a group that has none left is no more.
void HookState::form_group(std::vector<at::Tensor> const& parameters, at::ScalarType dtype) {
  std::vector<ParameterGroup::Member> members;
  std::vector<at::Tensor> fresh;
  std::size_t offset = 0;
  bool const regroups = by_bucket_ && !is_group(parameters);
  for (at::Tensor const& parameter : parameters) {
    bool const known = places_.contains(parameter.unsafeGetTensorImpl());
    if (known && !regroups) continue;
    require(
        known || !sealed_, "a parameter of shape ", parameter.sizes(),
        " was not in this state's first step: a state belongs to one model; make one per model");
    require(
        !parameter.is_complex(), "gradients of dtype ", at::toString(parameter.scalar_type()),
        " cannot be exchanged sparsely; parameters must be float32, float64, float16 or bfloat16");
    auto const numel = static_cast<std::size_t>(parameter.numel());
    members.push_back({key_of(parameter), offset, numel});
    fresh.push_back(parameter);
    offset += numel;
  }
  if (members.empty()) return;
  std::string const name = concat(groups_formed_++, " from ", members.front().key);
  groups_.push_back(ParameterGroup::make(name, dtype, std::move(members), options_, *communicator_,
                                         !by_bucket_, side_.get()));
  for (std::size_t i = 0; i < fresh.size(); ++i) {
    if (!places_.contains(fresh[i].unsafeGetTensorImpl())) parameters_.push_back(fresh[i]);
    places_[fresh[i].unsafeGetTensorImpl()] = {groups_.back().get(), i};
  }
  if (regroups) drop_empty_groups();
  if (loaded_) {
    check_loaded(*groups_.back());
    restore(*groups_.back());
  }
}

void HookState::drop_empty_groups() {
  std::set<ParameterGroup const*> used;
  for (auto const& [parameter, place] : places_) used.insert(place.group);
  std::erase_if(groups_, [&](auto const& group) {
    if (used.contains(group.get())) return false;
    left_ += group->stats();
    return true;
  });
}

std::string HookState::key_of(at::Tensor const& parameter) {
  auto const place = places_.find(parameter.unsafeGetTensorImpl());
  if (place != places_.end()) return place->second.group->members()[place->second.member].key;
  auto const name = names_.find(parameter.unsafeGetTensorImpl());
  if (name != names_.end()) return name->second;
  require(names_.empty(), "a parameter of shape ", parameter.sizes(),
          " is not among the named parameters of this state: a state belongs to one model; make "
          "one per model");
  return concat("parameter.", unnamed_++);
}

// Throws InvalidArgument unless the loaded checkpoint fits the group.
void HookState::check_loaded(ParameterGroup const& group) const {
  for (ParameterGroup::Member const& member : group.members()) {
    auto const saved = loaded_->residuals.find(member.key);
    require(saved != loaded_->residuals.end(), "the loaded state_dict has no residual for ",
            member.key, "; it belongs to another model, or was saved with other parameter names");
    require(saved->second.numel() == static_cast<std::int64_t>(member.numel),
            "the loaded residual of ", member.key, " has ", saved->second.numel(),
            " entries, the parameter ", member.numel, "; it belongs to another model");
    require(saved->second.scalar_type() == group.residual().scalar_type(),
            "the loaded residual of ", member.key, " is ",
            at::toString(saved->second.scalar_type()), ", that of this model ",
            at::toString(group.residual().scalar_type()), "; it belongs to another model");
  }
}

void HookState::restore(ParameterGroup& group) {
  if (side_) side_->let_current_wait();
  std::vector<std::string> keys;
  for (ParameterGroup::Member const& member : group.members()) {
    keys.push_back(member.key);
    group.residual_of(member).copy_(loaded_->residuals.at(member.key).reshape(-1));
  }
  if (side_) side_->wait_for_current();
  // Thresholds and boundaries fit only the group they were found for; a new grouping finds its own.
  ExchangeState state;
  for (HookCheckpoint::Group const& saved : loaded_->groups) {
    if (saved.parameters == keys) {
      group.load_state(saved.state);
      return;
    }
    state.step = std::max(state.step, saved.state.step);
  }
  group.load_state(state);
}

void HookState::check_all_loaded() const {
  require(loaded_->residuals.size() == places_.size(), "the loaded state_dict has residuals for ",
          loaded_->residuals.size(), " parameters, the model has ", places_.size(),
          "; it belongs to another model");
}

void HookState::set_density(double density) {
  require_idle("change the density");
  ExchangeOptions changed = options_;
  changed.density = density;
  validate(changed);
  for (auto const& group : groups_) group->set_density(density);
  options_ = changed;
}

HookStats HookState::stats() const {
  require_idle("read the statistics");
  HookStats total{left_, communicator_ ? communicator_->counters() : Counters{}};
  for (auto const& group : groups_) total.exchange += group->stats();
  if (by_bucket_) total.exchange.steps = last_buckets_;
  return total;
}

std::vector<std::string> HookState::algorithms() const {
  require_idle("read the algorithms");
  std::vector<std::string> names;
  for (auto const& group : groups_) names.emplace_back(group->algorithm());
  return names;
}

HookCheckpoint HookState::checkpoint() const {
  require_idle("save the state");
  if (side_) side_->let_current_wait();
  HookCheckpoint checkpoint;
  if (by_bucket_) return checkpoint;
  for (auto const& group : groups_) {
    HookCheckpoint::Group& saved = checkpoint.groups.emplace_back();
    saved.state = group->state();
    for (ParameterGroup::Member const& member : group->members()) {
      saved.parameters.push_back(member.key);
      checkpoint.residuals.emplace(member.key, group->residual_of(member).clone());
    }
  }
  if (side_) side_->wait_for_current();  // before the next step changes what is being copied
  if (loaded_) {                         // what was loaded and no group has taken over yet
    for (HookCheckpoint::Group const& group : loaded_->groups) {
      bool const taken = std::ranges::any_of(
          group.parameters, [&](auto const& key) { return checkpoint.residuals.contains(key); });
      if (!taken) checkpoint.groups.push_back(group);
    }
    checkpoint.residuals.insert(loaded_->residuals.begin(), loaded_->residuals.end());
  }
  return checkpoint;
}

void HookState::load(HookCheckpoint checkpoint) {
  require_idle("load a state");
  if (by_bucket_) {
    require(checkpoint.residuals.empty() && checkpoint.groups.empty(),
            "the state_dict to load has ", checkpoint.residuals.size(),
            " residuals, and a dense exchange has none; it belongs to another kind of state");
    return;
  }
  std::optional<HookCheckpoint> const before = std::exchange(loaded_, std::move(checkpoint));
  try {
    for (auto const& group : groups_) check_loaded(*group);
    if (sealed_) check_all_loaded();
  } catch (InvalidArgument const&) {
    loaded_ = before;
    throw;
  }
  for (auto const& group : groups_) restore(*group);
  if (sealed_) loaded_.reset();
}

void HookState::require_idle(char const* what) const {
  bool const idle = std::ranges::none_of(groups_, [](auto const& group) { return group->busy(); });
  require(idle, "cannot ", what,
          " while gradients are being exchanged; do it after backward() has returned");
}

}  // namespace sparsecomm
