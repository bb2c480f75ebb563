#include "engine/gradient_exchange.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/shortest.h"
#include "engine/link_model.h"

namespace sparsecomm {
namespace {

template <class V>
AlgorithmOptions collective_options(ExchangeOptions const& options) {
  AlgorithmOptions collective = options.collective;
  collective.schedule = options.schedule;
  // Blocks that are selected are what aggregators add.
  if (std::size_t const block = options.rule.block; block > 0) {
    collective.block_bytes =
        std::min(static_cast<std::uint32_t>(block * sizeof(V)), most_block_bytes);
  }
  return collective;
}

ThresholdSchedule local_schedule(AlgorithmEntry const& algorithm, ExchangeOptions const& options) {
  ThresholdSchedule schedule = options.schedule;
  schedule.between = algorithm.selection.value_or(schedule.between);
  return schedule;
}

}  // namespace

template <class T>
GradientExchange<T>::GradientExchange(std::string name, std::uint64_t extent,
                                      ExchangeOptions const& options, Communicator& communicator,
                                      std::unique_ptr<LocalGradient<T>> local)
    : name_(std::move(name)),
      extent_(extent),
      options_(options),
      text_(text_of(name_, extent_, dtype_of<T>(), options)),
      key_(Digest().add(text_).add(layout_).value()),
      number_(communicator.draw_number()),
      communicator_(&communicator),
      planned_((validate(options), options.algorithm == auto_algorithm)),
      local_(local ? std::move(local)
                   : make_host_gradient<T>(options.schedule, options.rule, extent,
                                           communicator.executor())) {
  require(extent < std::numeric_limits<std::uint32_t>::max(), "a gradient of ", extent,
          " entries exceeds 2^32 - 2; split it into smaller groups");
  for (AlgorithmEntry const& entry : algorithms()) {
    if (planned_ ? is_candidate(entry, workload()) : entry.name == options.algorithm)
      check_messages(entry);
  }
  if (!planned_) use(find_algorithm(options.algorithm));
  if (options.warmup.dense_steps > 0) make_warmup();
}

template <class T>
void GradientExchange<T>::make_warmup() {
  AlgorithmEntry const& dense = find_algorithm(warmup_algorithm);
  check_messages(dense);
  warmup_ = dense.dense->make<T>(collective_options<V>(options_), communicator_->services());
}

template <class T>
void GradientExchange<T>::check_messages(AlgorithmEntry const& algorithm) const {
  double most = options_.shares_density ? 1 : options_.density;
  for (double const density : options_.warmup.stages) most = std::max(most, density);
  std::uint64_t const largest_message =
      algorithm.sparse
          ? selection_limit(extent_, k_of(most)) * (sizeof(std::uint32_t) + sizeof(V))
          : algorithm.dense->largest_message(extent_, communicator_->size()) * sizeof(T);
  require(largest_message <= std::numeric_limits<std::uint32_t>::max(), "a message of ", extent_,
          " entries at density ", most, " may take ", largest_message,
          " bytes, more than a frame's 2^32 - 1; split the gradient into smaller groups");
}

template <class T>
void GradientExchange<T>::use(AlgorithmEntry const& algorithm) {
  algorithm_ = &algorithm;
  require_possible(*communicator_);
  received_.reset();
  sparse_.reset();
  dense_.reset();
  if (!algorithm.sparse) {
    dense_ = algorithm.dense->make<T>(collective_options<V>(options_), communicator_->services());
    return;
  }
  sparse_ = make_sparse_allreduce<V>(algorithm, collective_options<V>(options_),
                                     communicator_->services());
  local_->follow(local_schedule(algorithm, options_));
  local_->reset(state_.local_threshold);
}

template <class T>
void GradientExchange<T>::bind(std::vector<Segment<T>> segments, Awaited awaited,
                               std::span<V> moment, Batch const& batch, double loss_scale) {
  std::uint64_t total = 0;
  for (Segment<T> const& segment : segments) {
    require(!keeps_residual() || segment.residual.size() == segment.gradient.size(),
            "a gradient of ", segment.gradient.size(), " entries has a residual of ",
            segment.residual.size());
    total += segment.gradient.size();
  }
  require(total == extent_, "the segments hold ", total, " entries, the group ", extent_);
  local_->forget();
  local_->bind(std::move(segments), moment);
  unselected_ = true;
  accumulated_ = false;
  awaited_ = std::move(awaited);
  batch_ = &batch;
  ends_batch_ = false;
  payload_.step.loss_scale = {loss_scale};
}

template <class T>
Workload GradientExchange<T>::workload() const {
  return {.ranks = communicator_->size(),
          .extent = extent_,
          .k = k(),
          .element_bytes = sizeof(T),
          .value_bytes = sizeof(V),
          .run = std::max<std::uint64_t>(options_.rule.block, 1),
          .has_moment = options_.rule.has_moment(),
          .native_allreduce = communicator_->services().native != nullptr,
          .aggregators = communicator_->services().aggregators_left(),
          .commits = ends_batch_,
          .options = collective_options<V>(options_)};
}

// In the order in which prepare() adds them to the digest.
template <class T>
std::string GradientExchange<T>::changing_fields(std::span<const std::byte> payload) const {
  std::ostringstream text;
  text << ";layout=" << (layout_.empty() ? "row-major" : layout_)
       << ";gradients_of_earlier_passes=" << former_ << ";density=" << Shortest{density()}
       << ";step=" << state_.step << ";global_threshold=" << Shortest{unscaled_global_threshold()}
       << ";boundaries=";
  for (std::uint32_t const boundary : state_.collective.boundaries) text << boundary << ',';
  if (planned_) text << ";planned=" << algorithm();
  text << payload_.step.loss_scale.field(read(payload).step.loss_scale);
  return text.str();
}

template <class T>
typename GradientExchange<T>::V GradientExchange<T>::divisor() const {
  // A division, not a multiplication by 1/P, which would round even where the average is exact.
  return options_.average ? static_cast<V>(communicator_->size()) : V{1};
}

template <class T>
Proposal GradientExchange<T>::prepare() {
  delivered_ = false;
  received_.reset();
  // Not before, since what the former one rejected may have had to be put back.
  if (planned_ && plan_.algorithm() != nullptr && plan_.algorithm() != algorithm_)
    use(*plan_.algorithm());
  await_gradient();
  before_ = stats_;
  state_before_ = state_;
  lacks_threshold_ = true;
  std::uint64_t const step = state_.step;
  if (step > 0 && density_at(step) != density_at(step - 1)) forget_thresholds();  // a stage
  TimePoint const started = communicator_->clock().now();
  Stopwatch const watch = time(Stage::select, stats_.select);
  follow_gradient(payload_.step.loss_scale.value);
  payload_.counts = state_.share.own.value_or(ShareCounts());
  bool const finite = local_->all_finite();
  Digest changing;
  changing.add(former_)
      .add(density())
      .add(step)
      .add(unscaled_global_threshold())
      .add(std::as_bytes(std::span(state_.collective.boundaries)));
  if (planned_) changing.add(algorithm());
  // Where it is of what will have been added up, or in a unit that others name, this waits for the
  // agreement.
  if (finite && payload_.step.loss_scale.value > 0 && !options_.rule.accumulates() &&
      !warms_up_densely() && algorithm_ != nullptr && algorithm_->sparse) {
    find_threshold();
  }
  prepared_ = communicator_->clock().now() - started;
  return {.text = text_,
          .key = key_,
          .changing = changing.value(),
          .version = Digest().add(number_).add(changes_).add(former_).value(),
          .step = step,
          .finite = finite,
          .payload = payload(),
          .payload_is_known = !planned_ && payload_.step.loss_scale.value == state_.loss_scale &&
                              payload_.counts.entries == 0};
}

template <class T>
void GradientExchange<T>::await_gradient() {
  if (!awaited_.wait) return;
  unselected_ = false;  // what never came cannot be kept
  std::exchange(awaited_, {}).wait();
  unselected_ = true;
}

template <class T>
void GradientExchange<T>::find_threshold() {
  if (extent_ == 0) return;
  ThresholdSource const source =
      local_schedule(*algorithm_, options_).local_at(state_.step, state_.local_threshold > 0);
  if (source != ThresholdSource::reused) threshold_found_ = state_.step;
  if (shares()) local_->reset(state_.local_threshold);  // not what it has selected by
  local_->find_threshold(k(), state_.step);
  state_.local_threshold = local_->threshold();
  lacks_threshold_ = false;
  if (shares() && state_.share.magnitude > 0) local_->reset(threshold());
}

template <class T>
void GradientExchange<T>::run(Channel& channel, Agreement const& agreement) {
  Clock const& clock = communicator_->clock();
  bool const warmup = warms_up_densely();
  ends_batch_ = agreement.ends_batch;
  stats_.agree += agreement.waited;
  traffic_before_ = communicator_->traffic_before();
  auto const agreed_on = agreement.payload.empty() ? payload_ : read(agreement.payload);
  if (agreed_on.step.loss_scale.value > 0) follow(agreed_on.step.loss_scale.value);
  state_.share.own.reset();
  if (agreed_on.counts.entries > 0) state_.share.agreed = agreed_on.counts;
  std::optional<double> predicted;
  if (planned_ && !warmup) {
    plan_.observe(agreed_on.step.previous_seconds, agreed_on.step.previous_entries, k(),
                  state_.step);
    if (plan_.algorithm() == nullptr) {
      plan_.begin(communicator_->figures(channel), workload(), state_.step);
      use(*plan_.algorithm());
    }
    predicted = plan_.expected(workload(), state_.step);
  }
  AlgorithmEntry const& algorithm = warmup ? find_algorithm(warmup_algorithm) : *algorithm_;
  TimePoint const agreed = clock.now();
  if (!agreement.all_finite) {
    // Somebody's overflow: all ranks see it, and no residual is touched.
    unselected_ = false;
    agreement.commit(channel);
    V const nan = std::numeric_limits<V>::quiet_NaN();
    local_->fill(static_cast<T>(nan));
  } else if (warmup) {
    run_dense(channel, agreement, *warmup_, true);
  } else if (algorithm_->sparse) {
    run_sparse(channel, agreement);
  } else {
    run_dense(channel, agreement, *dense_, planned_ || options_.feedback);
  }
  delivered_ = agreement.all_finite;
  // Without the wait for ranks that came late, which is no algorithm's doing.
  double const seconds = std::chrono::duration<double>(prepared_ + (clock.now() - agreed)).count();
  record(algorithm, predicted, seconds);
  if (planned_ && !warmup) {
    payload_.step.previous_seconds = static_cast<float>(seconds);
    payload_.step.previous_entries =
        static_cast<std::uint32_t>(algorithm.sparse ? last_.selected : 0);
    if (agreement.all_finite) follow_plan(last_.result_nnz);
    state_.plan = plan_.state();
  }
  ++state_.step;
  ++stats_.steps;
  stats_.numel += extent_;
}

template <class T>
void GradientExchange<T>::record(AlgorithmEntry const& algorithm, std::optional<double> predicted,
                                 double seconds) {
  Traffic const traffic = communicator_->traffic();
  last_ = {.algorithm = algorithm.name,
           .step = state_.step,
           .finite = delivered_,
           .selected = stats_.selected - before_.selected,
           .result_nnz = stats_.result_nnz - before_.result_nnz,
           .sent_bytes = traffic.sent_bytes - traffic_before_.sent_bytes,
           .received_bytes = traffic.received_bytes - traffic_before_.received_bytes,
           .messages = traffic.messages - traffic_before_.messages,
           .agree = stats_.agree - before_.agree,
           .select = stats_.select - before_.select,
           .exchange = stats_.exchange - before_.exchange,
           .apply = stats_.apply - before_.apply,
           .observed_seconds = seconds,
           .predicted_seconds = predicted};
  if (!algorithm.sparse || state_.local_threshold == 0) return;
  last_.threshold = threshold();
  if (threshold_found_) last_.threshold_age = state_.step - *threshold_found_;
}

template <class T>
void GradientExchange<T>::follow_plan(std::uint64_t result_nnz) {
  ThresholdSchedule const& schedule = options_.schedule;
  bool const ordinary = schedule.period == 1 || state_.step % schedule.period != 0;
  plan_.conclude(workload(), result_nnz, ordinary, state_.step);
  if (plan_.algorithm() == algorithm_) return;
  // A new algorithm begins without a state, so that a checkpoint needs to hold only one. After a
  // dense exchange the residuals are gone that the threshold was found for.
  state_.collective = {};
  if (!algorithm_->sparse) state_.local_threshold = 0;
}

template <class T>
void GradientExchange<T>::run_sparse(Channel& channel, Agreement const& agreement) {
  SparseView<V> selection;
  {
    Stopwatch const watch = time(Stage::select, stats_.select);
    if (options_.rule.accumulates()) accumulate();
    if (lacks_threshold_) find_threshold();
    selection = local_->select(k());
    unselected_ = false;
  }
  AllreduceResult<V> result;
  {
    Stopwatch const watch = time(Stage::exchange, stats_.exchange);
    result = sparse_->run(channel, selection,
                          {extent_, k(), selection_limit(extent_, k()), state_.step});
  }
  Stopwatch const watch = time(Stage::apply, stats_.apply);
  // What can fail, and be undone, comes before the commit.
  excess_.reject(result.reduced, result.rejected, divisor(), communicator_->size());
  local_->keep(result.rejected);
  local_->mask(result.reduced);
  AlgorithmState next = sparse_->state();
  agreement.commit(channel);
  local_->store(result.reduced, divisor());
  state_.collective = std::move(next);
  if (!result.reduced.is_dense) received_ = result.reduced.sparse.indices;
  stats_.selected += selection.nnz();
  stats_.result_nnz += result.reduced.nnz();
  if (shares()) {
    constexpr double most = std::numeric_limits<float>::max();
    double const own = std::min(most, state_.local_threshold / residual_scale_);
    state_.share.own = {static_cast<float>(selection.nnz() + 1), static_cast<float>(own)};
  }
}

template <class T>
void GradientExchange<T>::run_dense(Channel& channel, Agreement const& agreement,
                                    DenseAllreduce<T>& dense, bool feedback) {
  if (feedback) {
    Stopwatch const watch = time(Stage::select, stats_.select);
    if (options_.rule.accumulates()) accumulate();
    local_->flush();
  }
  unselected_ = false;
  Stopwatch const watch = time(Stage::exchange, stats_.exchange);
  // The sum and the average of one gradient are the gradient.
  if (communicator_->size() > 1) {
    std::span<T> const gradient = local_->gather();
    dense.run(channel, gradient, Reduction::sum, divisor());
    agreement.commit(channel);
    dense.write(gradient);
    local_->spread();
  }
  stats_.selected += extent_;
  stats_.result_nnz += extent_;
}

template <class T>
void GradientExchange<T>::roll_back() noexcept {
  try {
    withdraw();
  } catch (...) {
    // A device that has failed, in torch's words or ours; its residual is lost with it, and the
    // error that led here says so.
  }
}

template <class T>
void GradientExchange<T>::withdraw() {
  local_->restore();
  if (unselected_ && keeps_residual()) {
    await_gradient();
    if (local_->all_finite()) {
      follow_gradient(payload_.step.loss_scale.value);
      accumulate();
    }
    unselected_ = false;
  }
  delivered_ = false;
}

template <class T>
void GradientExchange<T>::withdraw_step() {
  withdraw();
  restore_state(state_before_);
}

template class GradientExchange<float>;
template class GradientExchange<double>;
template class GradientExchange<Half>;
template class GradientExchange<BFloat16>;

}  // namespace sparsecomm
