#include "hook_state.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <set>
#include <utility>

#include "clip_gradients.h"
#include "coo_allreduce.h"
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
  TimePoint last_bucket_came{};
  Duration exposed{};

  void begin(std::size_t groups, bool last_bucket) {
    std::lock_guard const lock(mutex);
    open_groups += groups;
    last_bucket_seen = last_bucket_seen || last_bucket;
    if (last_bucket) last_bucket_came = steady_clock().now();
    if (open_groups == 0) finish();  // of a last bucket without parameters
  }
  // `group`: null for a gradient of which nothing is kept.
  void end(ParameterGroup* group, bool usable) {
    std::lock_guard const lock(mutex);
    if (!usable) {
      unusable = true;
    } else if (group) {
      delivered.push_back(group);
    }
    if (last_bucket_seen) exposed = steady_clock().now() - last_bucket_came;
    if (group) group->set_exposed(exposed);
    if (--open_groups == 0) finish();
  }
  bool open() {
    std::lock_guard const lock(mutex);
    return !last_bucket_seen;
  }
  void break_off() {
    std::lock_guard const lock(mutex);
    if (!last_bucket_seen) take_back();
  }
  Duration time_exposed() {
    std::lock_guard const lock(mutex);
    return exposed;
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
  if (bucket.buffer.is_sparse()) {
    require(bucket.gradients.size() == 1, "bucket ", bucket.index, " is sparse and has ",
            bucket.gradients.size(), " gradients; give each sparse one a bucket of its own");
    return;
  }
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

std::shared_ptr<HookState> HookState::make(HookOptions options,
                                           CommunicatorOptions communicator_options,
                                           std::string cuda_library) {
  return {new HookState(std::move(options), communicator_options, std::move(cuda_library)),
          [](HookState const* state) {
            run_off_own_threads(state->communicator_.get(), [state] { delete state; });
          }};
}

HookState::~HookState() { close(); }

void HookState::close() {
  closed_ = true;
  // First, since its thread uses the groups.
  run_off_own_threads(communicator_.get(),
                      [this, self = weak_from_this().lock()] { communicator_.reset(); });
}

void HookState::require_open() const {
  require(!closed_, "this state is closed, as the program ends or nobody held it any longer");
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
  require_open();
  require(!communicator_, "this state is connected already");
  communicator_ = std::make_unique<Communicator>(std::move(transport), communicator_options_);
}

c10::intrusive_ptr<c10::ivalue::Future> HookState::run(Bucket const& bucket, c10::IValue value,
                                                       c10::TypePtr type) {
  at::Tensor const& buffer = bucket.buffer;
  require(communicator_ != nullptr, "this state has no process group yet");
  settle_device(bucket);
  check_gradients(bucket);

  if (bucket.index == 0) begin_step();
  std::vector<at::Tensor> const& parameters = bucket.parameters;
  std::vector<at::Tensor> const& gradients = bucket.gradients;
  bool const sparse = buffer.is_sparse();
  if (!sparse) form_group(parameters, buffer.scalar_type());
  std::size_t const sparse_order = sparse ? order_of_sparse(parameters.front()) : 0;
  last_buckets_ += bucket.last;
  if (bucket.last && !sealed_) {
    if (loaded_) {
      check_all_loaded();
      settle_loaded();
    }
    sealed_ = true;
  }

  auto const pending = std::make_shared<PendingBucket>();
  pending->value = std::move(value);
  pending->future = c10::make_intrusive<c10::ivalue::Future>(
      std::move(type), side_ ? std::vector{*device_} : std::vector<at::Device>{});
  pending->side = side_.get();
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
                            !bucket.unused.empty() && bucket.unused[i])) {
      complete.push_back(place.group);
    }
  }
  pending->open_groups = sparse ? 1 : touched.size();
  for (ParameterGroup* const group : touched) waiting_[group].push_back(pending);
  if (pending->open_groups == 0) pending->complete();
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

void HookState::submit_sparse() {
  for (auto const& [gradient, pending] : std::exchange(held_sparse_, {})) {
    auto operation = std::make_shared<CooAllreduce>(gradient, c10d::ReduceOp::AVG, coo_gather_);
    auto const finish = [this, gradient, pending, step = step_](std::exception_ptr error) {
      try {
        step->end(nullptr, !error && gradient._values().isfinite().all().item<bool>());
      } catch (...) {
        if (!error) error = std::current_exception();
      }
      --sparse_in_flight_;  // before whoever waits for the bucket may begin the next step
      pending->group_done(error);
    };
    ++sparse_in_flight_;
    try {
      communicator_->submit(std::move(operation), finish);
    } catch (...) {
      --sparse_in_flight_;
      throw;
    }
  }
}

void HookState::submit(std::vector<ParameterGroup*> const& groups, bool last_bucket) {
  step_->begin(groups.size() + held_sparse_.size(), last_bucket);
  submit_sparse();
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
          step->end(group, !error && group->delivered());
        },
        [buckets](std::exception_ptr const& error) {
          for (auto const& waiting : buckets) waiting->group_done(error);
        });
  }
}

void HookState::begin_step() {
  // The former step may have been broken off, by an exception in the backward pass say.
  require(!busy(), "a new step began while the gradients of the last one are being exchanged");
  for (auto const& group : groups_) group->discard_arrivals();
  waiting_.clear();
  held_.clear();
  held_sparse_.clear();
  gradients_.clear();
  if (step_) {
    step_->break_off();
    exposed_ += step_->time_exposed();
  }
  step_ = std::make_shared<Step>();
  follow_scale();
}

// What a step delivered whose last bucket never came is nobody's: before anything else touches the
// residuals it goes back there.
void HookState::take_back_broken_step(char const* before_what) const {
  if (!step_) return;
  require(!step_->open() || torch::autograd::get_current_graph_task_id() == -1, "cannot ",
          before_what, " in the middle of a backward pass; do it after backward() has returned");
  step_->break_off();
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
  HookStats total{left_, communicator_ ? communicator_->counters() : Counters{}, exposed_, {}};
  if (step_) total.exposed += step_->time_exposed();
  for (auto const& group : groups_) {
    total.exchange += group->stats();
    total.groups.push_back({group->name(), group->members().size(), group->numel(),
                            group->last_step(), group->exposed()});
  }
  if (by_bucket_) total.exchange.steps = last_buckets_;
  return total;
}

std::vector<std::string> HookState::algorithms() const {
  require_idle("read the algorithms");
  std::vector<std::string> names;
  for (auto const& group : groups_) names.emplace_back(group->algorithm());
  return names;
}

bool HookState::busy() const {
  return sparse_in_flight_ > 0 ||
         std::ranges::any_of(groups_, [](auto const& group) { return group->busy(); });
}

void HookState::require_idle(char const* what) const {
  require(!busy(), "cannot ", what,
          " while gradients are being exchanged; do it after backward() has returned");
}

}  // namespace sparsecomm
