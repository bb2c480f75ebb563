#include "hook_state.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <set>
#include <utility>

#include "clip_gradients.h"
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
    if (open_groups == 0) finish();  // of a last bucket without parameters
  }
  void end(ParameterGroup& group, bool failed) {
    std::lock_guard const lock(mutex);
    if (!failed && group.delivered()) {
      delivered.push_back(&group);
    } else {
      unusable = true;
    }
    if (--open_groups == 0) finish();
  }
  void break_off() {
    std::lock_guard const lock(mutex);
    if (!last_bucket_seen) take_back();
  }

 private:
  void finish() {
    if (last_bucket_seen && unusable) take_back();
  }
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

namespace {

void check_gradients(Bucket const& bucket) {
  require(bucket.parameters.size() == bucket.gradients.size(), "bucket ", bucket.index, " has ",
          bucket.parameters.size(), " parameters and ", bucket.gradients.size(),
          " gradients; give each parameter one");
  for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
    at::Tensor const& gradient = bucket.gradients[i];
    require(gradient.numel() == bucket.parameters[i].numel() && gradient.is_contiguous() &&
                gradient.options().type_equal(bucket.buffer.options()),
            "gradient ", i, " of bucket ", bucket.index, " is ", gradient.toString(), ' ',
            gradient.sizes(), " for a parameter of shape ", bucket.parameters[i].sizes(),
            "; it must be a contiguous view of the buffer, ", bucket.buffer.toString(),
            ", with as many elements as the parameter");
  }
}

}  // namespace

HookState::HookState(HookOptions options, CommunicatorOptions communicator_options,
                     std::string cuda_library)
    : options_((validate(options.exchange), std::move(options))),
      by_bucket_(options_.exchange.algorithm != auto_algorithm &&
                 !find_algorithm(options_.exchange.algorithm).sparse),
      communicator_options_(communicator_options),
      cuda_library_(std::move(cuda_library)) {}

HookState::~HookState() { close(); }

void HookState::close() {
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

void HookState::set_densities(std::vector<std::pair<at::Tensor, double>> const& densities) {
  require(places_.empty(), "densities must be set before the first step");
  densities_.clear();
  for (auto const& [parameter, density] : densities) {
    densities_.emplace(parameter.unsafeGetTensorImpl(), density);
    parameters_.push_back(parameter);
  }
}

void HookState::follow_loss_scale(std::function<double()> loss_scale) {
  require_idle("follow a loss scale");
  current_loss_scale_ = std::move(loss_scale);
}

void HookState::connect(std::unique_ptr<Transport> transport) {
  require(!communicator_, "this state is connected already");
  communicator_ = std::make_unique<Communicator>(std::move(transport), communicator_options_);
}

c10::intrusive_ptr<c10::ivalue::Future> HookState::run(Bucket const& bucket, c10::IValue value,
                                                       c10::TypePtr type) {
  at::Tensor const& buffer = bucket.buffer;
  require(communicator_ != nullptr, "this state has no process group yet");
  require(buffer.layout() == at::kStrided, "bucket ", bucket.index,
          " holds a sparse gradient; this hook compresses dense gradients: use "
          "torch.nn.Embedding(sparse=False), or no hook and the backend \"sparsecomm\"");
  settle_device(bucket);
  check_gradients(bucket);

  if (bucket.index == 0) begin_step();
  std::vector<at::Tensor> const& parameters = bucket.parameters;
  std::vector<at::Tensor> const& gradients = bucket.gradients;
  form_group(parameters, buffer.scalar_type());
  last_buckets_ += bucket.last;
  if (bucket.last && !sealed_) {
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
    if (options_.clip_norm > 0) gradients_.insert_or_assign(place.order, gradients[i]);
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
  if (options_.clip_norm > 0) {
    held_.insert(held_.end(), complete.begin(), complete.end());
    if (bucket.last) {
      clip_gradients(gradients_,
                     options_.clip_norm * loss_scale_ / std::sqrt(communicator_->size()));
      submit(std::exchange(held_, {}), true);
    }
  } else {
    submit(complete, bucket.last);
  }
  return pending->future;
}

void HookState::submit(std::vector<ParameterGroup*> const& groups, bool last_bucket) {
  step_->begin(groups.size(), last_bucket);
  std::shared_ptr<c10::Event const> clipped;
  if (side_ && options_.clip_norm > 0) clipped = side_->mark_current();
  for (ParameterGroup* const group : groups) {
    auto const buckets = std::move(waiting_[group]);
    waiting_.erase(group);
    std::function<void()> ready;
    if (side_) {
      std::vector<std::shared_ptr<c10::Event const>> made;
      for (auto const& waiting : buckets) made.push_back(waiting->made);
      if (clipped) made.push_back(clipped);
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
}

void HookState::begin_step() {
  // The former step may have been broken off, by an exception in the backward pass say.
  for (auto const& group : groups_) {
    require(!group->busy(),
            "a new step began while the gradients of the last one are being exchanged");
    group->discard_arrivals();
  }
  waiting_.clear();
  held_.clear();
  gradients_.clear();
  if (step_) step_->break_off();
  step_ = std::make_shared<Step>();
  follow_scale();
}

// Gradients carry the loss scale, and so does all that is kept of them.
void HookState::follow_scale() {
  if (!current_loss_scale_) return;
  double const scale = current_loss_scale_();
  require(std::isfinite(scale) && scale > 0, "the loss scale is ", scale,
          ", which no gradient can be divided by");
  if (scale == loss_scale_) return;
  double const ratio = scale / loss_scale_;
  if (side_) side_->let_current_wait();
  for (auto const& group : groups_) group->rescale(ratio);
  if (side_) side_->wait_for_current();
  if (loaded_) {
    for (auto* const kept : {&loaded_->residuals, &loaded_->moments}) {
      for (auto& [key, tensor] : *kept) tensor = tensor * ratio;
    }
    for (HookCheckpoint::Group& group : loaded_->groups) {
      group.state.local_threshold *= ratio;
      group.state.collective.global_threshold *= ratio;
    }
    loaded_->loss_scale = scale;
  }
  loss_scale_ = scale;
}

// Opens what the gradients' device needs; throws InvalidArgument where they cannot be exchanged.
void HookState::settle_device(Bucket const& bucket) {
  at::Device const device = bucket.buffer.device();
  if (!device_) {
    require(device.is_cpu() || device.is_cuda(), "bucket ", bucket.index, " is on ", device.str(),
            "; gradients are exchanged on CPUs and on CUDA devices: move the model to "
            "one of these, or train without the hook");
    if (device.is_cuda()) {
      side_ = std::make_unique<SideStream>(device, open_cuda_library(cuda_library_));
    }
    device_ = device;
  }
  require(device == *device_, "bucket ", bucket.index, " is on ", device.str(),
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

// Parameters that no bucket has brought before form a new group, in the order of the bucket, and
// those with a density of their own further ones. By bucket, all of a bucket that is new do; a
// group that has none left is no more.
void HookState::form_group(std::vector<at::Tensor> const& parameters, at::ScalarType dtype) {
  struct Fresh {
    std::optional<double> density;
    std::vector<ParameterGroup::Member> members;
    std::vector<at::Tensor> parameters;
  };
  std::vector<Fresh> fresh;
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
    auto const density = density_of(parameter);
    auto group = std::ranges::find(fresh, density, &Fresh::density);
    if (group == fresh.end()) group = fresh.insert(fresh.end(), Fresh{density, {}, {}});
    std::size_t const offset =
        group->members.empty() ? 0 : group->members.back().offset + group->members.back().numel;
    group->members.push_back(
        {key_of(parameter), offset, static_cast<std::size_t>(parameter.numel())});
    group->parameters.push_back(parameter);
  }
  for (Fresh& group : fresh) {
    add_group(dtype, group.density, std::move(group.members), group.parameters);
  }
  if (regroups) drop_empty_groups();
}

void HookState::add_group(at::ScalarType dtype, std::optional<double> density,
                          std::vector<ParameterGroup::Member> members,
                          std::vector<at::Tensor> const& parameters) {
  std::string const name = concat(groups_formed_++, " from ", members.front().key);
  groups_.push_back(ParameterGroup::make(name, dtype, std::move(members), options_at(density),
                                         *communicator_, !by_bucket_, side_.get()));
  if (density) own_densities_.emplace(groups_.back().get(), *density);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto const known = places_.find(parameters[i].unsafeGetTensorImpl());
    std::size_t const order = known == places_.end() ? places_.size() : known->second.order;
    if (known == places_.end()) parameters_.push_back(parameters[i]);
    places_[parameters[i].unsafeGetTensorImpl()] = {groups_.back().get(), i, order};
  }
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

std::optional<double> HookState::density_of(at::Tensor const& parameter) const {
  if (by_bucket_) return std::nullopt;
  auto const own = densities_.find(parameter.unsafeGetTensorImpl());
  if (own != densities_.end()) return own->second;
  if (parameter.dim() < options_.dense_below) return 1;
  return std::nullopt;
}

ExchangeOptions HookState::options_at(std::optional<double> density) const {
  ExchangeOptions options = options_.exchange;
  if (!density) return options;
  options.density = *density;
  if (*density < 1) return options;
  // Few, as a rule, so that messages count for more than bytes.
  options.algorithm = "dense_rabenseifner";
  options.feedback = true;
  options.collective.frame.value_codec = options.collective.dense_codec = ValueCodec::raw;
  options.rule.bucket = 0;
  options.rule.first_moment = 0;
  options.warmup = {};
  return options;
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

void HookState::set_density(double density) {
  require_idle("change the density");
  ExchangeOptions changed = options_.exchange;
  changed.density = density;
  validate(changed);
  for (auto const& group : groups_) {
    if (!own_densities_.contains(group.get())) group->set_density(density);
  }
  options_.exchange = changed;
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

void HookState::require_idle(char const* what) const {
  bool const idle = std::ranges::none_of(groups_, [](auto const& group) { return group->busy(); });
  require(idle, "cannot ", what,
          " while gradients are being exchanged; do it after backward() has returned");
}

}  // namespace sparsecomm
