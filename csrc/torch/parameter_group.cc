#include "parameter_group.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>

namespace sparsecomm {
namespace {

// Large ones lie in huge pages where the system has them: samples and scattered results touch a
// page each.
at::Tensor zeros(std::size_t numel, at::TensorOptions const& options) {
  constexpr std::size_t huge = std::size_t{2} << 20;
  std::size_t const bytes = numel * options.dtype().itemsize();
  auto const size = static_cast<std::int64_t>(numel);
  if (!options.device().is_cpu() || bytes < 4 * huge) return at::zeros({size}, options);
  void* memory = nullptr;
  if (posix_memalign(&memory, huge, bytes) != 0) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  // A hint: its failure changes nothing. Not of the rest, which might take a whole huge page.
  madvise(memory, bytes / huge * huge, MADV_HUGEPAGE);
#endif
  return at::from_blob(memory, {size}, [](void* data) { std::free(data); }, options).zero_();
}

// What is kept of a member or an arrival, 1-D, in the order of memory.
at::Tensor part_of(at::Tensor const& kept, auto const& place) {
  return kept.narrow(0, static_cast<std::int64_t>(place.offset),
                     static_cast<std::int64_t>(place.numel));
}

template <class T>
class TypedGroup final : public ParameterGroup {
 public:
  using V = accumulate_t<T>;

  TypedGroup(std::string const& name, std::string operation, at::ScalarType dtype,
             std::vector<Member> members, ExchangeOptions const& options,
             Communicator& communicator, bool keeps_residual, SideStream const* side)
      : ParameterGroup(name, std::move(operation), dtype, std::move(members), communicator,
                       keeps_residual, options.rule, side),
        exchange_(std::make_shared<GradientExchange<T>>(
            name, numel_, options, communicator,
            side ? make_device_gradient<T>(options.schedule, options.rule, numel_, side->queue())
                 : nullptr)) {
    exchange_->show_to(labels_);
    exchange_->set_layout(layout_text());
    exchange_->on_rescale([this](double ratio) { rescale(ratio); });
  }

  bool delivered() const override { return exchange_->delivered(); }
  bool ended_batch() const override { return exchange_->ended_batch(); }
  std::optional<std::span<const std::uint32_t>> received() const override {
    return exchange_->received();
  }
  ExchangeState const& state() const override { return exchange_->state(); }
  void load_state(ExchangeState const& state) override { exchange_->load_state(state); }
  ExchangeStats const& stats() const override { return exchange_->stats(); }
  StepRecord const& last_step() const override { return exchange_->last_step(); }
  void set_density(double density) override { exchange_->set_density(density); }
  void set_share(DensityShare const& share) override { exchange_->set_share(share); }
  double density_of_all() const override { return exchange_->density_of_all(); }
  void require_possible(Communicator const& communicator) const override {
    exchange_->require_possible(communicator);
  }
  void reconnect_exchange(Communicator& communicator) override {
    exchange_->reconnect(communicator);
  }
  void follow(double loss_scale) override { exchange_->follow(loss_scale); }
  std::string_view algorithm() const override { return exchange_->algorithm(); }
  bool settled() const override { return exchange_->settled(); }

 protected:
  void withdraw_exchange(bool failed) override {
    if (failed) {
      exchange_->withdraw_step();
    } else {
      exchange_->withdraw();
    }
  }
  bool accumulated() const override { return exchange_->accumulated(); }
  void residual_changed() override { exchange_->residual_changed(); }
  void set_layout(std::string text) override { exchange_->set_layout(std::move(text)); }
  void set_velocity_of_exchange(VelocityRule const& rule) override {
    exchange_->set_velocity(rule);
  }
  void set_former(std::uint64_t checksum) override { exchange_->set_former(checksum); }
  std::shared_ptr<Operation> bind(Awaited awaited, Batch const& batch, double loss_scale) override {
    std::vector<Segment<T>> segments;
    bool const keeps_residual = residual_.numel() > 0;
    auto* const residual = static_cast<V*>(residual_.data_ptr());
    for (Arrival const& arrival : take_arrivals()) {
      Segment<T>& segment = segments.emplace_back();
      segment.gradient = {reinterpret_cast<T*>(arrival.data), arrival.numel};
      if (keeps_residual) segment.residual = {residual + arrival.offset, arrival.numel};
    }
    std::span<V> moment;
    if (moment_.defined()) moment = {static_cast<V*>(moment_.data_ptr()), numel_};
    exchange_->bind(std::move(segments), std::move(awaited), moment, batch, loss_scale);
    return exchange_;
  }

 private:
  std::shared_ptr<GradientExchange<T>> exchange_;
};

}  // namespace

std::unique_ptr<ParameterGroup> ParameterGroup::make(std::string const& name, std::string operation,
                                                     at::ScalarType dtype,
                                                     std::vector<Member> members,
                                                     ExchangeOptions const& options,
                                                     Communicator& communicator,
                                                     bool keeps_residual, SideStream const* side) {
  auto const typed = [&]<class T>() -> std::unique_ptr<ParameterGroup> {
    return std::make_unique<TypedGroup<T>>(name, std::move(operation), dtype, std::move(members),
                                           options, communicator, keeps_residual, side);
  };
  switch (dtype) {
    case at::kFloat:
      return typed.template operator()<float>();
    case at::kDouble:
      return typed.template operator()<double>();
    case at::kHalf:
      return typed.template operator()<Half>();
    case at::kBFloat16:
      return typed.template operator()<BFloat16>();
    default:
      throw InvalidArgument(
          concat("gradients of dtype ", at::toString(dtype),
                 " cannot be exchanged sparsely; parameters must be float32, float64, "
                 "float16 or bfloat16"));
  }
}

ParameterGroup::ParameterGroup(std::string name, std::string operation, at::ScalarType dtype,
                               std::vector<Member> members, Communicator& communicator,
                               bool keeps_residual, SelectionRule const& rule,
                               SideStream const* side)
    : name_(std::move(name)),
      operation_(std::move(operation)),
      dtype_(dtype),
      members_(std::move(members)),
      communicator_(&communicator),
      labels_(name_),
      rule_(rule),
      side_(side) {
  for (Member const& member : members_) numel_ += member.numel;
  // Cleared on the stream that uses it, so that nothing has to wait.
  c10::OptionalStreamGuard const current(side ? std::optional(side->stream()) : std::nullopt);
  std::size_t const kept = keeps_residual ? numel_ : 0;
  at::TensorOptions const options = at::dtype(dtype == at::kDouble ? at::kDouble : at::kFloat)
                                        .device(side ? side->device() : at::Device(at::kCPU));
  residual_ = zeros(kept, options);
  if (rule.has_moment()) moment_ = zeros(kept, options);
}

at::Tensor ParameterGroup::residual_of(Member const& member) const {
  return member.layout.view(part_of(residual_, member));
}

at::Tensor ParameterGroup::moment_of(Member const& member) const {
  if (!moment_.defined()) return {};
  return member.layout.view(part_of(moment_, member));
}

std::string ParameterGroup::layout_text() const {
  std::string text;
  for (Member const& member : members_) {
    if (member.layout.row_major()) continue;
    text += concat(text.empty() ? "" : ", ", member.key, ' ', member.layout.text());
  }
  return text;
}

void ParameterGroup::lay_out(std::size_t member, at::Tensor const& parameter) {
  require_idle();
  Member& moved = members_.at(member);
  Layout const former = std::exchange(moved.layout, Layout(parameter));
  c10::OptionalStreamGuard const current(side_ ? std::optional(side_->stream()) : std::nullopt);
  for (at::Tensor const& kept : {residual_, moment_}) {
    if (!kept.defined() || kept.numel() == 0) continue;
    at::Tensor const part = part_of(kept, moved);
    at::Tensor const copy = former.view(part).clone();
    moved.layout.view(part).copy_(copy.reshape(moved.layout.sizes()));
  }
  set_layout(layout_text());
}

void ParameterGroup::set_velocity(VelocityRule const& rule) {
  require_idle();
  rule_.velocity = rule;
  set_velocity_of_exchange(rule);
}

void ParameterGroup::rescale(double ratio) {
  c10::OptionalStreamGuard const current(side_ ? std::optional(side_->stream()) : std::nullopt);
  residual_.mul_(ratio);
  if (moment_.defined()) moment_.mul_(ratio);
  for (auto const& [part, kept] : withheld_) kept.mul_(ratio);
}

void ParameterGroup::reconnect(Communicator& communicator) {
  discard_arrivals();
  communicator_ = &communicator;
  reconnect_exchange(communicator);
}

bool ParameterGroup::arrive(Member const& member, void* data, bool unused) {
  require_idle();
  arrivals_.push_back({member.offset, static_cast<std::byte*>(data), member.numel, unused});
  arrived_ += member.numel;
  require(arrived_ <= numel_, "parameter ", member.key, " arrived twice in one step");
  return arrivals_.size() == members_.size();
}

void ParameterGroup::require_idle() const {
  require(!busy_,
          "the gradients of a new step arrived while those of the last one are being exchanged");
}

void ParameterGroup::hold_former(at::Tensor const& former) {
  if (!former_) former_.emplace();
  // Of the entries in the order of their indices, whatever the memory's is.
  at::Tensor const entries = former.cpu().contiguous();
  former_->add({static_cast<std::byte const*>(entries.const_data_ptr()), entries.nbytes()});
}

void ParameterGroup::discard_arrivals() {
  arrivals_.clear();
  arrived_ = 0;
  continues_ = false;
  former_.reset();
}

void ParameterGroup::submit(Awaited awaited, End end, Communicator::Completion done,
                            Batch const& batch, double loss_scale) {
  labels_.follow_this_thread();
  busy_ = true;
  auto const finish = [this, end = std::move(end),
                       done = std::move(done)](std::exception_ptr error) {
    bool const failed = error != nullptr;
    keep_first_error(error, [&] { give_back(); });
    keep_first_error(error, [&] { end(failed, !error); });
    busy_ = false;  // before whoever waits for `done` may begin the next step
    done(std::move(error));
  };
  std::shared_ptr<Operation> operation;
  try {
    operation = bind(std::move(awaited), batch, loss_scale);
    communicator_->submit(operation, finish, operation_);
  } catch (...) {
    if (operation) operation->roll_back();
    give_back();
    busy_ = false;
    throw;
  }
}

void ParameterGroup::run(Batch const& batch) {
  std::shared_ptr<Operation> const operation = bind({}, batch, 1);
  labels_.follow_this_thread();
  busy_ = true;
  try {
    communicator_->run(operation, nullptr, operation_);
  } catch (...) {
    busy_ = false;
    throw;
  }
  busy_ = false;
}

std::vector<ParameterGroup::Arrival> ParameterGroup::take_arrivals() {
  std::ranges::sort(arrivals_, {}, &Arrival::offset);
  std::size_t const width = at::elementSize(dtype_);
  std::vector<Arrival> joined;
  given_back_.clear();
  for (Arrival const& arrival : arrivals_) {
    if (arrival.numel == 0) continue;  // it shares its offset with the next one
    if (arrival.unused) withhold(arrival);
    if (!joined.empty() && joined.back().data + joined.back().numel * width == arrival.data) {
      joined.back().numel += arrival.numel;
    } else {
      joined.push_back(arrival);
    }
  }
  if (continues_ && has_moment()) continue_moments();
  set_former(former_ ? former_->value() : 0);
  discard_arrivals();
  return joined;
}

// The rule makes m' = f m + g of a moment m, and adds s m' (and g, if it is Nesterov's) to the
// residual: s is f with Nesterov, else 1, or 0 for a first moment. A further pass of a step is to
// make m' = m + g, and to add only what is new, so m is divided by f, and s m taken out before.
void ParameterGroup::continue_moments() {
  c10::OptionalStreamGuard const current(side_ ? std::optional(side_->stream()) : std::nullopt);
  if (double const share = share_of_moment(); share > 0) residual_.sub_(moment_, share);
  moment_.div_(decay());
  continued_ = true;
}

void ParameterGroup::withhold(Arrival const& arrival) {
  c10::OptionalStreamGuard const current(side_ ? std::optional(side_->stream()) : std::nullopt);
  for (at::Tensor const& kept : {residual_, moment_}) {
    if (!kept.defined() || kept.numel() == 0) continue;
    at::Tensor const part = part_of(kept, arrival);
    withheld_.emplace_back(part, part.clone());
    part.zero_();
  }
}

void ParameterGroup::give_back() {
  c10::OptionalStreamGuard const current(side_ ? std::optional(side_->stream()) : std::nullopt);
  bool const undo = std::exchange(continued_, false) && !accumulated();
  if (undo) {
    moment_.mul_(decay());
    if (double const share = share_of_moment(); share > 0) residual_.add_(moment_, share);
  }
  for (auto const& [part, kept] : withheld_) part.add_(kept);
  if (undo || !withheld_.empty()) residual_changed();
  given_back_ = std::exchange(withheld_, {});
}

void ParameterGroup::withdraw(bool failed) {
  withdraw_exchange(failed);
  // As far as the exchange knows there was nothing.
  c10::OptionalStreamGuard const current(side_ ? std::optional(side_->stream()) : std::nullopt);
  for (auto const& [part, kept] : given_back_) part.copy_(kept);
}

}  // namespace sparsecomm
