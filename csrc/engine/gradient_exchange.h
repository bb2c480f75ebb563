// One group of parameters of a data-parallel model: its options, its schedule state and its
// exchange.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/dense.h"
#include "compress/bucket_selection.h"
#include "compress/excess.h"
#include "compress/local_gradient.h"
#include "engine/communicator.h"
#include "engine/payload.h"
#include "engine/planner.h"
#include "engine/step_record.h"

namespace sparsecomm {

// Leaves the choice to a plan, made anew for every step (see Plan).
inline constexpr std::string_view auto_algorithm = "auto";
// Of the dense steps of a warm-up.
inline constexpr std::string_view warmup_algorithm = "dense_overlap";

struct ExchangeOptions {
  std::string algorithm = "oktopk";  // of algorithms(), or "auto"
  double density = 0.01;             // k = density * N, at least 1
  ThresholdSchedule schedule;        // of the local and the global threshold
  AlgorithmOptions collective;       // its schedule is replaced by the one above
  bool average = true;  // the result is the mean over ranks, as DDP expects; false: the sum
  SelectionRule rule;
  DensityWarmup warmup;  // towards `density`
  // Of a dense algorithm that is named: it takes the residual along, and leaves in it what the type
  // rounds away, and what is taken back. Where an algorithm is sparse, or planned, it is so always.
  bool feedback = false;
  // The density is that of several groups together, each of which has an exchange: see
  // set_share().
  bool shares_density = false;
  // How the caller has put parameters into groups, in words, which ranks must agree on.
  std::string groups = {};
};

// Throws InvalidArgument, naming the option, its value and its range.
void validate(ExchangeOptions const& options);
void validate(VelocityRule const& rule);
// What ranks must agree on, as a proposal's text.
std::string text_of(std::string const& group, std::uint64_t extent, DType dtype,
                    ExchangeOptions const& options);

// What must be kept, beside the residuals, for a resumed run to be bit-identical.
struct ExchangeState {
  std::uint64_t step = 0;
  double local_threshold = 0;  // 0: none yet
  AlgorithmState collective;
  // The unit of the global threshold, and between steps of all that is kept: the loss scale on
  // which ranks agreed last.
  double loss_scale = 1;
  PlanState plan;  // of "auto" alone
  DensityShare share;
};

// Of a gradient that is submitted before it is there.
struct Awaited {
  std::function<void()> wait = {};     // returns once it is there; may throw
  std::function<bool()> is_here = {};  // none: it is, as far as anybody has to know
};

// Exchanges a gradient that lies in segments: afterwards every rank's gradient holds the same bits,
// the average of what was exchanged, and the residuals hold what was not. Contracts 1, 2, 4, 5, 6
// and 7 of docs/architecture.md are kept here. T is the gradient's type, accumulate_t<T> the
// residual's.
template <class T>
class GradientExchange final : public Operation {
 public:
  using V = accumulate_t<T>;

  // `name` identifies the group; ranks must agree on it. `local` tells where gradient and residual
  // lie; null: in the processor's memory.
  GradientExchange(std::string name, std::uint64_t extent, ExchangeOptions const& options,
                   Communicator& communicator, std::unique_ptr<LocalGradient<T>> local = nullptr);

  // What the next submission works on: the sizes of the segments add up to the extent, and that of
  // `moment` is the extent where the rule has one. The memory must stay until the operation has
  // ended. prepare() waits for `awaited` first. What that takes is in no statistics. `batch`: whose
  // results are used together; it stays as long as the memory. `loss_scale`: the unit of the
  // gradient; 0: it is zero, and what is kept follows the others' unit.
  void bind(std::vector<Segment<T>> segments, Awaited awaited = {}, std::span<V> moment = {},
            Batch const& batch = batch_of_one, double loss_scale = 1);
  void set_density(double density);
  // Of state().share, what share_density() has made of it; between steps, on all ranks alike.
  void set_share(DensityShare const& share) { state_.share = share; }
  // Of the next step, of all groups that share it.
  double density_of_all() const { return density_at(state_.step); }
  // A valid rule, between steps; whether momentum is above 0 must not change. Ranks compare it when
  // they meet, so in their first exchange and after reconnect(), not whenever it changes.
  void set_velocity(VelocityRule const& rule) {
    options_.rule.velocity = rule;
    local_->set_velocity(rule);
  }
  // How entries are ordered, in words: ranks must agree on it.
  void set_layout(std::string text);
  // A checksum, which ranks must agree on, of what the caller adds to the next result by itself.
  void set_former(std::uint64_t checksum) { former_ = checksum; }
  // `rescale` multiplies residual and moment, which are the caller's, by a ratio. It is called
  // where their unit changes: in follow(), and in an exchange before anything is selected.
  void on_rescale(std::function<void(double)> rescale) { rescale_ = std::move(rescale); }
  // Brings all that is kept into the unit of another loss scale; not amid an exchange.
  void follow(double loss_scale);

  // True when the last exchange delivered a result: it did not fail and nobody's gradient was
  // non-finite.
  bool delivered() const { return delivered_; }
  // Whether ranks agreed that the last exchange ends its batch.
  bool ended_batch() const { return ends_batch_; }
  // True when the gradient that was bound last went through the rule into residual and moment,
  // whatever became of it then.
  bool accumulated() const { return accumulated_; }
  // Where the last result has entries, sorted, until the next exchange; none: everywhere.
  std::optional<std::span<const std::uint32_t>> received() const { return received_; }
  // For a caller who cannot use the result: what this rank contributed to it returns to the
  // residual, and so does a finite gradient of which nothing had been selected yet. All ranks must
  // do so alike.
  void withdraw();
  // The same if another part of the same step failed, perhaps before this one on other ranks: the
  // step has not been made.
  void withdraw_step();
  // Somebody else has written to the residuals since the last exchange.
  void residual_changed() { local_->residual_changed(); }

  // Throws InvalidArgument if the algorithm cannot run over that transport.
  void require_possible(Communicator const& communicator) const;
  // Goes on with other ranks, at the same step.
  void reconnect(Communicator& communicator);

  ExchangeState const& state() const { return state_; }
  // The caller loads residual and moment, too, in units of state.loss_scale.
  void load_state(ExchangeState state);
  ExchangeStats const& stats() const { return stats_; }
  StepRecord const& last_step() const { return last_; }
  std::uint64_t extent() const { return extent_; }
  // False while a plan tries algorithms; the same on all ranks.
  bool settled() const { return !planned_ || plan_.settled(state_.step); }
  // Of the next step; "auto" while a plan is undecided.
  std::string_view algorithm() const {
    if (warms_up_densely()) return warmup_algorithm;
    return algorithm_ ? algorithm_->name : auto_algorithm;
  }

  // Lives as long as the exchange.
  void show_to(StageObserver& observer) { observer_ = &observer; }

  Proposal prepare() override;
  bool is_ready() const override { return !awaited_.is_here || awaited_.is_here(); }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    if (options_.shares_density) return merge_payload<SharingPayload>(into, other, extent_);
    return merge_payload<StepPayload>(into, other, extent_);
  }
  std::string changing_fields(std::span<const std::byte> payload) const override;
  void run(Channel& channel, Agreement const& agreement) override;
  Batch const* batch() const override { return batch_; }
  void roll_back() noexcept override;
  StageObserver* observer() override { return observer_; }

 private:
  Stopwatch time(Stage stage, Duration& total) {
    return {observer_, &communicator_->timeline(), stage, communicator_->clock(), total};
  }
  void accumulate() {
    unselected_ = false;
    accumulated_ = true;
    local_->accumulate();
  }
  void check_messages(AlgorithmEntry const& algorithm) const;
  void make_warmup();
  void use(AlgorithmEntry const& algorithm);
  void await_gradient();
  void find_threshold();
  void record(AlgorithmEntry const& algorithm, std::optional<double> predicted, double seconds);
  void run_dense(Channel& channel, Agreement const& agreement, DenseAllreduce<T>& dense,
                 bool feedback);
  void run_sparse(Channel& channel, Agreement const& agreement);
  void forget_thresholds();
  void restore_state(ExchangeState state);
  void follow_gradient(double loss_scale);
  bool keeps_residual() const {
    return planned_ || options_.feedback || algorithm_->sparse || options_.warmup.dense_steps > 0;
  }
  bool warms_up_densely() const { return state_.step < options_.warmup.dense_steps; }
  // Comparable before a rank has learnt the others' unit.
  double unscaled_global_threshold() const {
    return state_.collective.global_threshold / state_.loss_scale;
  }
  double density_at(std::uint64_t step) const { return options_.warmup.at(step, options_.density); }
  bool shares() const { return options_.shares_density && density_of_all() < 1; }
  double density() const {
    return shares() ? std::min(1.0, density_of_all() * state_.share.factor) : density_of_all();
  }
  // By which entries are selected, in units of the residual.
  double threshold() const {
    double const common = shares() ? state_.share.magnitude * residual_scale_ : 0;
    return common > 0 ? common : state_.local_threshold;
  }
  std::span<const std::byte> payload() const {
    return options_.shares_density ? payload_of(payload_) : payload_of(payload_.step);
  }
  SharingPayload read(std::span<const std::byte> payload) const {
    if (options_.shares_density) return read_payload<SharingPayload>(payload);
    return {read_payload<StepPayload>(payload)};
  }
  void follow_plan(std::uint64_t result_nnz);
  Workload workload() const;
  std::uint64_t k() const { return k_of(density()); }
  std::uint64_t k_of(double density) const {
    return entries_wanted(options_.rule, density, extent_);
  }
  V divisor() const;

  std::string name_;
  std::uint64_t extent_;
  ExchangeOptions options_;
  std::string text_;    // of the proposal
  std::string layout_;  // empty: the usual one
  std::uint64_t key_;   // of both
  std::uint64_t former_ = 0;
  // Of what ranks must agree on beside the text; such as every exchange makes do not count.
  std::uint64_t changes_ = 0;
  std::uint64_t number_;  // another one for each that the communicator has seen
  Communicator* communicator_;
  bool planned_;  // by plan_, and dense exchanges take the residual along
  Plan plan_;
  AlgorithmEntry const* algorithm_ = nullptr;  // null: not decided yet
  std::unique_ptr<LocalGradient<T>> local_;
  std::unique_ptr<SparseAllreduce<V>> sparse_;
  std::unique_ptr<DenseAllreduce<T>> dense_;
  Excess<T> excess_;
  Awaited awaited_;
  Batch const* batch_ = &batch_of_one;
  bool ends_batch_ = false;    // as agreed, of the exchange that was bound last
  double residual_scale_ = 1;  // of residual, moment and local threshold
  std::function<void(double)> rescale_ = [](double) {};
  bool accumulated_ = false;
  bool lacks_threshold_ = true;  // of this step
  bool unselected_ = false;      // the gradient that was bound: no part of it is in the residual
  std::unique_ptr<DenseAllreduce<T>> warmup_;  // of the dense steps that come first
  bool delivered_ = false;
  std::optional<std::span<const std::uint32_t>> received_;
  StageObserver* observer_ = nullptr;
  std::optional<std::uint64_t> threshold_found_;  // the step
  // As this step began.
  ExchangeStats before_;
  ExchangeState state_before_;
  Traffic traffic_before_;  // its agreement included
  Duration prepared_{};     // how long its proposal took
  // Tells the other ranks the scale of this one's gradient, 0 for theirs, and what its last step
  // says to the plan.
  SharingPayload payload_{{.loss_scale = {1}}};
  ExchangeState state_;
  ExchangeStats stats_;
  StepRecord last_;
};

}  // namespace sparsecomm
