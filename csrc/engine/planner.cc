#include "engine/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "compress/error_feedback.h"
#include "engine/communicator.h"

namespace sparsecomm {
namespace {

constexpr double raw_index_bits = 32;
constexpr double delta_over_entropy = 1.02;

double as_double(std::uint64_t count) { return static_cast<double>(count); }

// Seconds per entry of finding a threshold, averaged over a period of the schedule.
double threshold_seconds(Workload const& workload, Rates const& rates) {
  ThresholdSchedule const& schedule = workload.options.schedule;
  double const exact = rates.exact * as_double(workload.extent);
  double between = exact;
  if (schedule.between == ThresholdSource::reused) between = 0;
  if (schedule.between == ThresholdSource::sampled) {
    std::size_t const stride = sampled_stride(workload.extent, workload.k, threshold_stride);
    if (stride > 0) between = rates.sample * as_double(workload.extent / stride);
  }
  double const share = 1 / as_double(schedule.period);
  return share * exact + (1 - share) * between;
}

double in_steps(double ratio) { return std::exp(0.02 * std::round(std::log(ratio) / 0.02)); }

double smoothed(double former, double value, double weight) {
  return former + weight * (value - former);
}

}  // namespace

std::array<double, Figures::count> Figures::values() const {
  return {link.round, link.message, link.byte,   rates.check,   rates.exact, rates.sample,
          rates.pass, rates.pack,   rates.merge, rates.scatter, rates.reduce};
}

Figures Figures::from_values(std::span<const double> values) {
  require(values.size() == count, values.size(), " figures of link and processor are not ",
          std::size_t{count});
  for (double const value : values) {
    require(std::isfinite(value) && value >= 0, "a figure of link or processor is ", value,
            " s, not a time");
  }
  return {
      {values[0], values[1], values[2]},
      {values[3], values[4], values[5], values[6], values[7], values[8], values[9], values[10]}};
}

double expected_index_bits(std::uint64_t extent, std::uint64_t nnz, IndexCodecChoice choice) {
  if (choice == IndexCodecChoice::raw32 || nnz == 0 || extent == 0) return raw_index_bits;
  double const density = std::min(1.0, as_double(nnz) / as_double(extent));
  double const delta = delta_over_entropy * std::log2(std::numbers::e / density);
  return choice == IndexCodecChoice::delta ? delta : std::min(raw_index_bits, delta);
}

std::uint64_t expected_union(std::uint64_t extent, std::uint64_t k, int ranks) {
  if (k >= extent) return extent;
  double const absent = std::log1p(-as_double(k) / as_double(extent));
  auto const hit = static_cast<std::uint64_t>(
      std::llround(-as_double(extent) * std::expm1(static_cast<double>(ranks) * absent)));
  return std::clamp(hit, k, std::min(extent, k * static_cast<std::uint64_t>(ranks)));
}

Prediction predict(AlgorithmEntry const& entry, Workload const& workload, Figures const& figures) {
  Link const& link = figures.link;
  Rates const& rates = figures.rates;
  double const extent = as_double(workload.extent);
  double const k = as_double(workload.k);
  auto const sparse_bytes = static_cast<double>(workload.value_bytes);
  auto const dense_bytes = static_cast<double>(workload.element_bytes);
  // Memory is what selection costs: its rates were measured with 4 bytes of each.
  double const width = (dense_bytes + sparse_bytes) / 8;

  CostShape shape{.ranks = workload.ranks, .extent = workload.extent, .k = workload.k};
  shape.union_nnz = workload.union_nnz > 0
                        ? workload.union_nnz
                        : expected_union(workload.extent, workload.k, workload.ranks);
  if (entry.sparse) {
    shape.value_bytes = sparse_bytes;
    shape.index_bytes =
        expected_index_bits(workload.extent, workload.k, workload.options.frame.index_codec) / 8;
    if (workload.options.frame.allow_dense && workload.k > 0) {
      shape.index_bytes = std::min(shape.index_bytes, sparse_bytes * (extent / k - 1));
    }
  } else {
    shape.value_bytes = dense_bytes;
  }
  // One rank's gradient is the result of a dense exchange already.
  bool const nothing = !entry.sparse && workload.ranks == 1;
  Cost const cost = nothing ? Cost{} : entry.cost(shape, workload.options);
  Cost const agreement = agreement_cost(workload.ranks);

  Prediction prediction{.algorithm = &entry};
  prediction.bytes = cost.bytes + agreement.bytes;
  prediction.messages = cost.messages + agreement.messages;
  prediction.latency =
      (cost.rounds + agreement.rounds) * link.round + prediction.messages * link.message;
  prediction.transfer = prediction.bytes * link.byte;
  prediction.compute = cost.entries * rates.merge * (4 + sparse_bytes) / 8 +
                       cost.dense_entries * rates.reduce * shape.value_bytes / 4;
  if (workload.selects) prediction.select = width * extent * rates.check;
  if (!entry.sparse) {
    // Error feedback keeps a copy, in case the exchange fails.
    if (workload.selects) prediction.select += width * extent * 2 * rates.check;
    return prediction;
  }
  double const all = as_double(shape.union_nnz);
  double const result = entry.top_k_result ? std::min(k, all) : all;
  prediction.apply = std::min(result * rates.scatter, extent * rates.reduce);
  if (workload.selects) {
    prediction.select +=
        width * (threshold_seconds(workload, rates) + extent * rates.pass + k * rates.pack);
    if (entry.top_k_result && all > 0) prediction.apply += k * (1 - result / all) * rates.scatter;
  }
  return prediction;
}

bool delivers_exact_entries(AlgorithmEntry const& entry) {
  return !entry.sparse || entry.lossless() || entry.top_k_result;
}

std::vector<Prediction> rank_algorithms(Workload const& workload, Figures const& figures,
                                        bool (*eligible)(AlgorithmEntry const&)) {
  std::vector<Prediction> predictions;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (eligible(entry)) predictions.push_back(predict(entry, workload, figures));
  }
  std::ranges::sort(predictions, [](Prediction const& a, Prediction const& b) {
    return std::pair(a.total(), a.algorithm) < std::pair(b.total(), b.algorithm);
  });
  return predictions;
}

void Plan::load_state(PlanState state) {
  auto const check = [](char const* what, double value, double least) {
    require(std::isfinite(value) && value >= least, "the plan to load has ", what, " of ", value,
            ", not a number of ", least, " or more");
  };
  require(state.algorithm == nullptr || state.figures.has_value(),
          "the plan to load has chosen an algorithm without figures to choose by");
  check("a union ratio", state.union_ratio, 0);
  check("a realised share", state.realised, std::numeric_limits<double>::min());
  check("a predicted time", state.former_predicted, 0);
  for (Experience const& experience : state.experience) {
    require(experience.algorithm != nullptr, "the plan to load has experience of no algorithm");
    check("a correction", experience.correction, std::numeric_limits<double>::min());
  }
  state_ = std::move(state);
  predictions_.clear();
}

Workload Plan::corrected(Workload workload) const {
  workload.k = std::min<std::uint64_t>(
      workload.extent, std::llround(as_double(workload.k) * in_steps(state_.realised)));
  if (state_.union_ratio > 0) {
    std::uint64_t const most =
        std::min(workload.extent, workload.k * static_cast<std::uint64_t>(workload.ranks));
    workload.union_nnz = std::clamp<std::uint64_t>(
        std::llround(in_steps(state_.union_ratio) * as_double(workload.k)),
        std::min(workload.k, most), most);
  }
  return workload;
}

Experience const* Plan::experience_of(AlgorithmEntry const* algorithm, std::uint64_t step) const {
  auto const found = std::ranges::find(state_.experience, algorithm, &Experience::algorithm);
  if (found == state_.experience.end() || found->observations < options_.trial) return nullptr;
  bool const current = algorithm == state_.algorithm || step - found->last_step <= options_.forget;
  return current ? &*found : nullptr;
}

// What all algorithms have in common is blamed on the figures.
double Plan::common_correction(std::uint64_t step) const {
  double sum = 0;
  int count = 0;
  for (Experience const& experience : state_.experience) {
    if (experience_of(experience.algorithm, step) == nullptr) continue;
    sum += std::log(experience.correction);
    ++count;
  }
  return count == 0 ? 1 : std::exp(sum / count);
}

double Plan::estimate(Prediction const& prediction, std::uint64_t step) const {
  Experience const* const experience = experience_of(prediction.algorithm, step);
  if (experience != nullptr) return prediction.total() * experience->correction;
  return prediction.total() * std::min(1.0, common_correction(step)) / options_.uncertainty;
}

void Plan::begin(Figures const& figures, Workload const& workload, std::uint64_t step) {
  state_.figures = figures;
  predictions_.clear();
  decide(corrected(workload), step);
}

void Plan::observe(double seconds, std::uint64_t most_selected, std::uint64_t k,
                   std::uint64_t step) {
  if (most_selected > 0) {
    state_.realised =
        smoothed(state_.realised, as_double(most_selected) / as_double(k), options_.smoothing);
  }
  AlgorithmEntry const* const former = std::exchange(state_.former, nullptr);
  if (former == nullptr || seconds <= 0 || state_.former_predicted <= 0) return;
  double const ratio = seconds / state_.former_predicted;
  auto experience = std::ranges::find(state_.experience, former, &Experience::algorithm);
  if (experience == state_.experience.end()) {
    experience = state_.experience.insert(experience, {former, ratio, 0, step});
  } else if (experience->observations < options_.trial) {
    // The mean, but of two that differ too much the lesser one: the other was disturbed.
    double const surprise = ratio / experience->correction;
    double const share = 1.0 / (1.0 + as_double(experience->observations));
    if (surprise < 1 / options_.largest_surprise) {
      experience->correction = ratio;
    } else if (surprise < options_.largest_surprise) {
      experience->correction *= std::pow(surprise, share);
    }
  } else {
    double const surprise = std::clamp(ratio / experience->correction,
                                       1 / options_.largest_surprise, options_.largest_surprise);
    experience->correction *= std::pow(surprise, options_.smoothing);
  }
  ++experience->observations;
  experience->last_step = step;
}

void Plan::conclude(Workload const& workload, std::uint64_t result_nnz, bool timed,
                    std::uint64_t step) {
  AlgorithmEntry const& entry = *state_.algorithm;
  Workload const known = corrected(workload);
  if (entry.sparse && !entry.top_k_result && known.k > 0) {
    double const ratio = as_double(result_nnz) / as_double(known.k);
    state_.union_ratio =
        state_.union_ratio > 0 ? smoothed(state_.union_ratio, ratio, options_.smoothing) : ratio;
  }
  // The first step with an algorithm allocates its buffers and finds its thresholds.
  if (timed && state_.steps_with > 0) {
    auto const all = predictions(known);
    auto const own = std::ranges::find(all, &entry, &Prediction::algorithm);
    state_.former = &entry;
    state_.former_predicted =
        own == all.end() ? predict(entry, known, *state_.figures).total() : own->total();
  }
  ++state_.steps_with;
  decide(known, step);
}

std::span<const Prediction> Plan::predictions(Workload const& known) {
  bool const same = known.k == predicted_.k && known.union_nnz == predicted_.union_nnz &&
                    known.extent == predicted_.extent && known.ranks == predicted_.ranks;
  if (same && !predictions_.empty()) return predictions_;
  predictions_.clear();
  for (AlgorithmEntry const& entry : algorithms()) {
    if (delivers_exact_entries(entry)) {
      predictions_.push_back(predict(entry, known, *state_.figures));
    }
  }
  predicted_ = known;
  return predictions_;
}

void Plan::decide(Workload const& known, std::uint64_t step) {
  bool const on_trial =
      state_.algorithm != nullptr && experience_of(state_.algorithm, step) == nullptr;
  if (on_trial) return;
  AlgorithmEntry const* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  double present = least;
  for (Prediction const& prediction : predictions(known)) {
    double const seconds = estimate(prediction, step);
    if (prediction.algorithm == state_.algorithm) present = seconds;
    if (best == nullptr || seconds < least) {
      best = prediction.algorithm;
      least = seconds;
    }
  }
  if (state_.algorithm != nullptr && least >= (1 - options_.hysteresis) * present) return;
  if (experience_of(best, step) == nullptr) {
    std::erase_if(state_.experience,
                  [&](Experience const& former) { return former.algorithm == best; });
  }
  state_.algorithm = best;
  state_.steps_with = 0;
}

}  // namespace sparsecomm
