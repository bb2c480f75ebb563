#include "hook_state.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <set>
#include <utility>

#include "clip_gradients.h"
#include "hook_step.h"
#include "interpreter.h"
#include "kernels/cuda_library.h"
#include "tensor_collective.h"

namespace sparsecomm {

HookState::Entry::Entry(HookState const& state) : state_(state) {
  require(
      state.holder_ != std::this_thread::get_id(),
      "this thread is in the middle of another call of this state, as a callback or the handler "
      "of a signal may be; call it after backward() has returned");
  if (!state.mutex_.try_lock()) {
    InterpreterRelease const release;
    state.mutex_.lock();
  }
  state.holder_ = std::this_thread::get_id();
}

HookState::Entry::~Entry() {
  state_.holder_ = std::thread::id();
  state_.mutex_.unlock();
}

namespace {

void check_gradients(Bucket const& bucket) {
  require(bucket.parameters.size() == bucket.gradients.size(), "bucket ", bucket.index, " has ",
          bucket.parameters.size(), " parameters and ", bucket.gradients.size(),
          " gradients; give each parameter one");
  if (bucket.buffer.is_sparse()) {
    require(bucket.gradients.size() == 1, "bucket ", bucket.index, " is sparse and has ",
            bucket.gradients.size(), " gradients; give each sparse one a bucket of its own");
    return;
  }
  for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
    at::Tensor const& gradient = bucket.gradients[i];
    c10::IntArrayRef const sizes = bucket.parameters[i].sizes();
    require((gradient.sizes() == sizes ||
             (gradient.is_contiguous() && gradient.numel() == bucket.parameters[i].numel())) &&
                gradient.options().type_equal(bucket.buffer.options()),
            "gradient ", i, " of bucket ", bucket.index, " is ", gradient.toString(), ' ',
            gradient.sizes(), " for a parameter of shape ", sizes, "; it must be ",
            bucket.buffer.toString(),
            " as the buffer, and of that shape, or contiguous with as many elements");
  }
}

}  // namespace

HookState::HookState(HookOptions options, CommunicatorOptions communicator_options,
                     std::string cuda_library)
    : options_((validate(options.exchange), std::move(options))),
      by_bucket_(options_.exchange.algorithm != auto_algorithm &&
                 !find_algorithm(options_.exchange.algorithm).sparse),
      groups_by_(options_.groups_by == GroupsBy::measured ? GroupsBy::number : options_.groups_by),
      communicator_options_(std::move(communicator_options)),
      cuda_library_(std::move(cuda_library)) {
  // With clipping nothing is exchanged before the last bucket, whatever the groups are.
  if (options_.groups_by == GroupsBy::measured && !by_bucket_ && options_.clip_norm == 0)
    trial_.emplace();
}

std::shared_ptr<HookState> HookState::make(HookOptions options,
                                           CommunicatorOptions communicator_options,
                                           std::string cuda_library) {
  return {
      new HookState(std::move(options), std::move(communicator_options), std::move(cuda_library)),
      [](HookState const* state) {
        run_off_own_threads(state->communicator_ && state->communicator_->on_own_thread(),
                            [state] { delete state; });
      }};
}

HookState::~HookState() { close(); }

void HookState::close() {
  if (owner_ != ::getpid())
    return;  // a forked child may end; the lock is as another thread held it
  auto const self = weak_from_this().lock();
  if (holder_ == std::this_thread::get_id()) {  // the garbage collector's doing
    run_off_own_threads(true, [self] { self->close(); });
    return;
  }
  std::shared_ptr<Communicator> communicator;
  {
    Entry const entry(*this);
    closed_ = true;
    communicator = std::exchange(communicator_, nullptr);
  }
  if (!communicator) return;
  // Its thread uses the groups.
  run_off_own_threads(communicator->on_own_thread(),
                      [communicator, self] { communicator->close(); });
}

std::weak_ptr<Communicator const> HookState::communicator() const {
  Entry const entry(*this);
  return communicator_;
}

bool HookState::connected() const {
  Entry const entry(*this);
  return communicator_ != nullptr;
}

std::optional<int> HookState::rank() const {
  Entry const entry(*this);
  return communicator_ ? std::optional(communicator_->rank()) : std::nullopt;
}

bool HookState::delivered() const {
  Entry const entry(*this);
  return step_ && step_->stands;
}

void HookState::request() {
  Entry const entry(*this);
  if (communicator_) communicator_->request();
}

bool HookState::take_requested() {
  Entry const entry(*this);
  return communicator_ && communicator_->take_requested();
}

void HookState::require_open() const {
  require(!closed_, "this state is closed, as the program ends or nobody held it any longer");
}

void HookState::name_parameters(std::vector<std::pair<std::string, at::Tensor>> const& parameters) {
  Entry const entry(*this);
  require(has_made_no_step(), "parameters must be named before the first step");
  names_.clear();
  for (auto const& [name, parameter] : parameters) {
    names_.emplace(parameter.unsafeGetTensorImpl(), name);
    parameters_.push_back(parameter);
  }
}

template <class Value>
void HookState::set_before_first_step(char const* what,
                                      std::vector<std::pair<at::Tensor, Value>> const& values,
                                      std::unordered_map<void const*, Value>& by_parameter) {
  Entry const entry(*this);
  require(has_made_no_step(), what, " must be set before the first step");
  by_parameter.clear();
  for (auto const& [parameter, value] : values) {
    by_parameter.emplace(parameter.unsafeGetTensorImpl(), value);
    parameters_.push_back(parameter);
  }
}

void HookState::set_densities(std::vector<std::pair<at::Tensor, double>> const& densities) {
  set_before_first_step("densities", densities, densities_);
}

void HookState::set_groups(std::vector<std::pair<at::Tensor, int>> const& numbers) {
  set_before_first_step("groups", numbers, group_numbers_);
}

void HookState::follow_loss_scale(std::function<double()> loss_scale) {
  auto followed = std::make_shared<std::function<double()> const>(std::move(loss_scale));
  Entry const entry(*this);
  require_idle("follow a loss scale");
  current_loss_scale_.swap(followed);
}

void HookState::connect(std::unique_ptr<Transport> transport, TimelineOptions timeline) {
  Entry const entry(*this);
  require_open();
  require(!communicator_, "this state is connected already");
  communicator_options_.timeline = std::move(timeline);
  communicator_ = std::make_shared<Communicator>(std::move(transport), communicator_options_);
  sparse_pool_ = std::make_shared<CollectivePool>();
}

void HookState::reconnect(std::unique_ptr<Transport> transport, TimelineOptions timeline) {
  std::shared_ptr<Communicator> former;
  {
    Entry const entry(*this);
    require_open();
    require_idle("reconnect");
    require(communicator_ != nullptr,
            "this state has not been connected yet; it connects by itself");
    communicator_options_.timeline = std::move(timeline);
    auto fresh = std::make_shared<Communicator>(std::move(transport), communicator_options_);
    for (auto const& group : groups_) group->require_possible(*fresh);
    take_back_broken_step("reconnect");
    step_.reset();
    drop_waiting();
    agreement_.reset();
    tried_.clear();
    if (trial_) trial_->restart();
    former_counters_ = counters();
    former = std::exchange(communicator_, std::move(fresh));
    sparse_pool_ = std::make_shared<CollectivePool>();
    for (auto const& group : groups_) group->reconnect(*communicator_);
  }
  run_off_own_threads(former->on_own_thread(), [former] { former->close(); });
}

c10::intrusive_ptr<c10::ivalue::Future> HookState::run(Bucket const& bucket, c10::IValue value,
                                                       c10::TypePtr type) {
  // A joined rank's scaler does not hear of the others' steps.
  double const loss_scale = bucket.index == 0 && !bucket.joined ? ask_loss_scale() : 0;
  Entry const entry(*this);
  try {
    return take(bucket, std::move(value), std::move(type), loss_scale);
  } catch (...) {
    fail_waiting(std::current_exception());
    throw;
  }
}

c10::intrusive_ptr<c10::ivalue::Future> HookState::take(Bucket const& bucket, c10::IValue value,
                                                        c10::TypePtr type, double loss_scale) {
  at::Tensor const& buffer = bucket.buffer;
  require_open();
  require(communicator_ != nullptr, "this state has no process group yet");
  settle_device(bucket);
  check_gradients(bucket);

  if (bucket.index == 0) begin_step(loss_scale);
  step_->note(bucket);
  auto const pending = std::make_shared<PendingBucket>();
  pending->value = std::move(value);
  pending->future = c10::make_intrusive<c10::ivalue::Future>(
      std::move(type), side_ ? std::vector{*device_} : std::vector<at::Device>{});
  pending->side = side_.get();
  if (must_wait(bucket)) {
    if (side_) pending->made = side_->mark_current();
    unformed_.emplace_back(bucket, pending);
    return pending->future;
  }
  std::vector<Bucket const*> unformed;
  if (bucket.last) {
    for (auto const& [waiting, its_pending] : unformed_) unformed.push_back(&waiting);
  }
  if (!buffer.is_sparse()) unformed.push_back(&bucket);
  form_groups(unformed);
  last_buckets_ += bucket.last;
  if (bucket.last && loaded_ && !sealed_) {
    check_all_loaded();
    settle_loaded();
  }
  if (bucket.last && dissolved_) settle_dissolved();
  sealed_ = sealed_ || bucket.last;
  while (bucket.last && !unformed_.empty()) {
    auto const [waiting, its_pending] = std::move(unformed_.front());
    unformed_.pop_front();
    try {
      accept(waiting, its_pending);
    } catch (...) {
      its_pending->fail(std::current_exception());
      throw;
    }
  }
  accept(bucket, pending);
  return pending->future;
}

// Whether the groups of its parameters are to be formed later.
bool HookState::must_wait(Bucket const& bucket) const {
  return groups_by_ == GroupsBy::number && !by_bucket_ && !bucket.last &&
         !bucket.buffer.is_sparse() &&
         std::ranges::any_of(bucket.parameters, [this](at::Tensor const& parameter) {
           return !places_.contains(parameter.unsafeGetTensorImpl());
         });
}

// Takes what the bucket brings to its groups, and submits those that are complete.
void HookState::accept(Bucket const& bucket, std::shared_ptr<PendingBucket> const& pending) {
  at::Tensor const& buffer = bucket.buffer;
  std::vector<at::Tensor> const& parameters = bucket.parameters;
  bool const sparse = buffer.is_sparse();
  std::size_t const sparse_order = sparse ? order_of_sparse(parameters.front()) : 0;
  if (bucket.of_grads && !by_bucket_ && !sparse) {
    step_->parameters.insert(step_->parameters.end(), parameters.begin(), parameters.end());
  }
  if (bucket.of_grads && bucket.last) Step::check_after_backward(step_);
  if (pending->made) side_->let_current_wait(*pending->made);  // it may have come on another one
  std::vector<bool> const unused = sparse ? bucket.unused : take_fresh(bucket, *pending);
  std::vector<at::Tensor> const gradients = sparse ? bucket.gradients : arrange(bucket, *pending);
  if (side_) {
    pending->made = side_->mark_current();
    if (!sparse) side_->use(buffer);
  }
  if (sparse) {
    held_sparse_.emplace_back(buffer, pending);
    if (options_.clip_norm > 0) {
      c10::NoGradGuard const no_grad;
      buffer.copy_(buffer.coalesce());  // the norm is that of the sums
      gradients_.insert_or_assign(sparse_order, buffer._values());
    }
  }
  std::set<ParameterGroup*> touched;
  std::vector<ParameterGroup*> complete;
  for (std::size_t i = 0; i < parameters.size() && !sparse; ++i) {
    Place const place = places_.at(parameters[i].unsafeGetTensorImpl());
    if (options_.clip_norm > 0) gradients_.insert_or_assign(place.order, gradients[i]);
    touched.insert(place.group);
    require(place.group->dtype() == buffer.scalar_type(), "parameter ",
            place.group->members()[place.member].key, " changed its dtype to ",
            at::toString(buffer.scalar_type()), "; make a new state for the converted model");
    if (place.group->arrive(place.group->members()[place.member], gradients[i].data_ptr(),
                            unused[i])) {
      complete.push_back(place.group);
    }
  }
  bool const ends_step =
      bucket.last && (step_->has_begun() || !complete.empty() || !held_.empty() ||
                      !held_sparse_.empty() || (trial_ && trial_->is_over()));
  pending->open_groups = (sparse ? 1 : touched.size()) + (ends_step ? 1 : 0);
  for (ParameterGroup* const group : touched) waiting_[group].push_back(pending);
  if (pending->open_groups == 0) pending->complete();
  if (options_.clip_norm > 0) {
    held_.insert(held_.end(), complete.begin(), complete.end());
    if (bucket.last) {
      if (!bucket.joined) {
        clip_gradients(gradients_, options_.clip_norm / std::sqrt(communicator_->size()),
                       step_->loss_scale);
      }
      submit(std::exchange(held_, {}), true, ends_step ? pending : nullptr);
    }
  } else {
    submit(complete, bucket.last, ends_step ? pending : nullptr);
  }
}

void HookState::drop_waiting() {
  waiting_.clear();
  unformed_.clear();
  held_.clear();
  held_sparse_.clear();
  gradients_.clear();
}

void HookState::begin_step(double loss_scale) {
  // The former step may have been broken off, by an exception in the backward pass say.
  require(!busy(), "a new step began while the gradients of the last one are being exchanged");
  for (auto const& group : groups_) group->discard_arrivals();
  drop_waiting();
  if (step_) {
    break_off_step();
    exposed_ += step_->time_exposed();
  }
  follow_trial();
  share_density();
  step_ = std::make_shared<Step>();
  step_->follow_backward();
  step_->loss_scale = loss_scale;
}

// If its last bucket has not come. Other ranks that have begun the step must break it off too.
void HookState::break_off_step() const {
  if (step_->break_off()) {
    communicator_->set_steps_broken_off(communicator_->steps_broken_off() + 1);
  }
}

// What a step delivered whose last bucket never came is nobody's: before anything else touches the
// residuals it goes back there.
void HookState::take_back_broken_step(char const* before_what) const {
  if (!step_) return;
  bool const over = step_->backward.expired() && torch::autograd::get_current_graph_task_id() == -1;
  require(!step_->open() || over, "cannot ", before_what,
          " in the middle of a backward pass; do it after backward() has returned");
  break_off_step();
}

// Runs Python's code, so not under the lock.
double HookState::ask_loss_scale() const {
  std::shared_ptr<std::function<double()> const> current;
  {
    Entry const entry(*this);
    current = current_loss_scale_;
  }
  double const scale = current ? (*current)() : 1;
  require(std::isfinite(scale) && scale > 0, "the loss scale is ", scale,
          ", which no gradient can be divided by");
  return scale;
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

void HookState::set_density(double density) {
  Entry const entry(*this);
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
  Entry const entry(*this);
  require_idle("read the statistics");
  HookStats total{left_, counters(), exposed_, {}, {}, trial_};
  if (communicator_) total.lost_aggregators = communicator_->lost_aggregators();
  if (step_) total.exposed += step_->time_exposed();
  for (auto const& group : groups_) {
    total.exchange += group->stats();
    total.exchange.steps = std::max(total.exchange.steps, group->steps());
    total.groups.push_back({group->name(), group->members().size(), group->numel(),
                            group->last_step(), group->exposed()});
  }
  if (by_bucket_) total.exchange.steps = last_buckets_;
  return total;
}

// Counts what went through previous communicators as one more peer's.
Counters HookState::counters() const {
  Counters all = communicator_ ? communicator_->counters() : Counters{};
  for (auto const part : {&Counters::sent_bytes, &Counters::sent_messages,
                          &Counters::received_bytes, &Counters::received_messages}) {
    (all.*part).push_back(Counters::total(former_counters_.*part));
  }
  return all;
}

std::vector<std::string> HookState::algorithms() const {
  Entry const entry(*this);
  require_idle("read the algorithms");
  std::vector<std::string> names;
  names.reserve(groups_.size());
  for (auto const& group : groups_) names.emplace_back(group->algorithm());
  return names;
}

bool HookState::busy() const {
  return groupless_in_flight_ > 0 ||
         std::ranges::any_of(groups_, [](auto const& group) { return group->busy(); });
}

void HookState::require_idle(char const* what) const {
  require(!busy(), "cannot ", what,
          " while gradients are being exchanged; do it after backward() has returned");
}

}  // namespace sparsecomm
