// What an exchange keeps from one step to the next, and what changes between steps.
#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/gradient_exchange.h"

namespace sparsecomm {

template <class T>
void GradientExchange<T>::set_density(double density) {
  ExchangeOptions changed = options_;
  changed.density = density;
  validate(changed);
  if (density != options_.density) forget_thresholds();
  options_ = changed;
}

template <class T>
void GradientExchange<T>::set_layout(std::string text) {
  layout_ = std::move(text);
  key_ = Digest().add(text_).add(layout_).value();
}

// Those there are belong to another k.
template <class T>
void GradientExchange<T>::forget_thresholds() {
  ++changes_;
  state_.local_threshold = 0;
  state_.collective.global_threshold = 0;
  state_.share = {};
  local_->reset(0);
  if (sparse_) sparse_->load_state(state_.collective);
}

// Brings what is this rank's alone into the unit of its gradient; 0: it has none.
template <class T>
void GradientExchange<T>::follow_gradient(double loss_scale) {
  if (!(loss_scale > 0) || loss_scale == residual_scale_) return;
  double const ratio = loss_scale / residual_scale_;
  rescale_(ratio);
  residual_scale_ = loss_scale;
  state_.local_threshold *= ratio;
  state_before_.local_threshold *= ratio;
  local_->reset(state_.local_threshold);
}

// The global threshold follows only what ranks have agreed on, so that they all round alike.
template <class T>
void GradientExchange<T>::follow(double loss_scale) {
  follow_gradient(loss_scale);
  if (loss_scale == state_.loss_scale) return;
  state_.collective.global_threshold *= loss_scale / state_.loss_scale;
  state_.loss_scale = loss_scale;
  ++changes_;
  if (sparse_) sparse_->load_state(state_.collective);
}

template <class T>
void GradientExchange<T>::load_state(ExchangeState state) {
  double const loss_scale = state.loss_scale;
  restore_state(std::move(state));
  residual_scale_ = loss_scale;
}

template <class T>
void GradientExchange<T>::restore_state(ExchangeState state) {
  auto const& boundaries = state.collective.boundaries;
  require(boundaries.empty() ||
              (boundaries.size() + 1 == static_cast<std::size_t>(communicator_->size()) &&
               std::ranges::is_sorted(boundaries) && boundaries.back() <= extent_),
          "the state to load has ", boundaries.size(), " boundaries, which do not split ", extent_,
          " entries for ", communicator_->size(), " ranks");
  for (double const threshold : {state.local_threshold, state.collective.global_threshold}) {
    require(std::isfinite(threshold) && threshold >= 0, "the state to load has a threshold of ",
            threshold, ", which no magnitude is");
  }
  validate(state.share, extent_);
  if (!options_.shares_density) state.share = {};
  if (planned_) {
    AlgorithmEntry const* const chosen = state.plan.algorithm;
    if (chosen != nullptr && !is_candidate(*chosen, workload())) state.plan.algorithm = nullptr;
    plan_.load_state(state.plan);
    algorithm_ = nullptr;
    if (plan_.algorithm() != nullptr) use(*plan_.algorithm());
  }
  payload_ = {{.loss_scale = payload_.step.loss_scale}};
  threshold_found_.reset();
  local_->reset(state.local_threshold);
  if (sparse_) sparse_->load_state(state.collective);
  state_ = std::move(state);
  ++changes_;
}

template <class T>
void GradientExchange<T>::require_possible(Communicator const& communicator) const {
  if (algorithm_ == nullptr) return;
  std::string const reason = communicator.missing(*algorithm_);
  require(reason.empty(), reason);
}

template <class T>
void GradientExchange<T>::reconnect(Communicator& communicator) {
  communicator_ = &communicator;
  number_ = communicator.draw_number();
  sparse_.reset();  // made with the former communicator's services
  dense_.reset();
  if (warmup_) make_warmup();
  if (!planned_) use(*algorithm_);
  text_ = text_of(name_, extent_, dtype_of<T>(), options_);
  set_layout(std::move(layout_));
  // Thresholds, boundaries and plans are of those ranks.
  ExchangeState state;
  state.step = state_.step;
  state.loss_scale = state_.loss_scale;
  restore_state(std::move(state));
}

template class GradientExchange<float>;
template class GradientExchange<double>;
template class GradientExchange<Half>;
template class GradientExchange<BFloat16>;

}  // namespace sparsecomm
