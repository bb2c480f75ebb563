#include "engine/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "compress/error_feedback.h"
#include "engine/communicator.h"
#include "engine/payload.h"

namespace sparsecomm {
namespace {

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

// Streams of several rounds go at once, so either the links are busy, or all wait.
double aggregator_seconds(Cost const& cost, Figures const& figures) {
  auto const measured = [](double figure, double otherwise) {
    return figure > 0 ? figure : otherwise;
  };
  AggregatorFigures const& aggregators = figures.aggregators;
  return std::max(cost.aggregator_load * measured(aggregators.byte, figures.link.byte),
                  cost.aggregator_rounds *
                      measured(aggregators.round, figures.link.round + figures.link.message));
}

double in_steps(double ratio) { return std::exp(0.02 * std::round(std::log(ratio) / 0.02)); }

double smoothed(double former, double value, double weight) {
  return former + weight * (value - former);
}

}  // namespace

std::array<double, Figures::count> Figures::values() const {
  return {link.round,   link.message,   link.byte,         rates.check,     rates.exact,
          rates.sample, rates.pass,     rates.pack,        rates.merge,     rates.scatter,
          rates.reduce, rates.momentum, aggregators.round, aggregators.byte};
}

Figures Figures::from_values(std::span<const double> values) {
  require(values.size() == count, values.size(), " figures of link and processor are not ",
          std::size_t{count});
  for (std::size_t i = 0; i < count; ++i) {
    require(std::isfinite(values[i]) && values[i] >= 0, "figure '", names[i], "' = ", values[i],
            " s is not a time: it must be finite and not negative");
  }
  return {{values[0], values[1], values[2]},
          {values[3], values[4], values[5], values[6], values[7], values[8], values[9], values[10],
           values[11]},
          {values[12], values[13]}};
}

Figures Figures::from_named(std::map<std::string, double> const& saved) {
  auto values = Figures{}.values();
  for (auto const& [name, value] : saved) {
    auto const known = std::ranges::find(names, name);
    if (known == names.end()) {
      std::string all;
      for (std::string_view const other : names) all += concat(all.empty() ? "" : ", ", other);
      throw InvalidArgument(
          concat("figure '", name, "' = ", value, " s is unknown; there are ", all));
    }
    values[static_cast<std::size_t>(known - names.begin())] = value;
  }
  return from_values(values);
}

std::uint64_t expected_union(std::uint64_t extent, std::uint64_t k, int ranks) {
  if (k >= extent) return extent;
  double const absent = std::log1p(-as_double(k) / as_double(extent));
  auto const hit = static_cast<std::uint64_t>(
      std::llround(-as_double(extent) * std::expm1(static_cast<double>(ranks) * absent)));
  return std::clamp(hit, k, std::min(extent, k * static_cast<std::uint64_t>(ranks)));
}

Cost operation_cost(AlgorithmEntry const& entry, CostShape const& shape,
                    AlgorithmOptions const& options, std::size_t payload_bytes, bool commits) {
  // One rank's gradient is the result of a dense exchange already.
  bool const nothing = !entry.sparse && shape.ranks == 1;
  Cost cost = agreement_cost(shape.ranks, payload_bytes);
  if (!nothing) cost = cost + entry.cost(shape, options);
  return commits ? cost + commit_cost(shape.ranks) : cost;
}

Prediction predict(AlgorithmEntry const& entry, Workload const& workload, Figures const& figures) {
  Link const& link = figures.link;
  Rates const& rates = figures.rates;
  double const extent = as_double(workload.extent);
  double const k = as_double(workload.k);
  // Memory is what selection costs: its rates were measured with 4 bytes of each.
  double const width = as_double(workload.element_bytes + workload.value_bytes) / 8;

  Prediction prediction{.algorithm = &entry};
  CostShape shape{.ranks = workload.ranks, .extent = workload.extent, .k = workload.k};
  shape.aggregators = std::max(workload.aggregators, 1);
  shape.run = workload.run;
  shape.union_nnz = workload.union_nnz > 0
                        ? workload.union_nnz
                        : expected_union(workload.extent, workload.k, workload.ranks);
  prediction.value_codec = find_value_codec(ValueCodec::raw);
  if (entry.sparse) {
    shape.frame = workload.options.frame;
    if (!entry.rounds) shape.frame.value_codec = ValueCodec::raw;
    prediction.value_codec = find_value_codec(shape.frame.value_codec);
    shape.value_bytes =
        as_double(prediction.value_codec->encoded_bytes(value_bucket, workload.value_bytes)) /
        value_bucket;
    prediction.index_codec = expected_frame(k, extent, shape.value_bytes, shape.frame).index_codec;
  } else {
    if (workload.selects) shape.k = shape.union_nnz = workload.extent;
    bool const narrow = workload.selects || entry.dense->rounds_once;
    std::size_t const value_bytes = narrow ? workload.element_bytes : workload.value_bytes;
    shape.value_bytes = as_double(value_bytes);
    if (workload.blocks > 0 && entry.needs == Needs::aggregators) {
      shape.run = std::max<std::uint64_t>(1, workload.options.block_bytes / value_bytes);
      std::uint64_t const all = part_count(workload.extent, shape.run);
      shape.k = std::min(workload.extent, shape.run * workload.blocks);
      shape.union_nnz =
          std::min(workload.extent,
                   shape.run * expected_union(all, std::min(all, workload.blocks), workload.ranks));
    }
  }
  std::size_t const payload = workload.selects ? sizeof(StepPayload) : sizeof(EntryCounts);
  Cost const cost = operation_cost(entry, shape, workload.options, payload, workload.commits);

  prediction.bytes = cost.received_bytes();
  prediction.messages = cost.messages;
  prediction.latency = cost.rounds * link.round + cost.messages * link.message;
  prediction.transfer =
      (cost.bytes + cost.awaited_bytes) * link.byte + aggregator_seconds(cost, figures);
  prediction.compute = cost.entries * rates.merge * as_double(4 + workload.value_bytes) / 8 +
                       cost.dense_entries * rates.reduce * shape.value_bytes / 4;
  double const result =
      entry.top_k_result ? std::min(k, as_double(shape.union_nnz)) : as_double(shape.union_nnz);
  double const pass = extent * rates.reduce;
  // Entries that lie so close that they share cache lines take no longer than all of them in order.
  auto const writing = [&](double entries) { return std::min(entries * rates.scatter, pass); };
  if (!workload.selects) {
    // From the form that the caller has to the one that travels, and back.
    if (entry.sparse && workload.dense_data) {
      prediction.select = width * extent * rates.pass;
      prediction.apply = pass + writing(result);
    } else if (entry.sparse) {
      prediction.apply = writing(result);
    } else if (!workload.dense_data) {
      prediction.select = pass + writing(k);
      prediction.apply = pass;
    }
    return prediction;
  }
  prediction.select = width * extent * rates.check;
  if (!entry.sparse) {
    // Error feedback keeps a copy, in case the exchange fails.
    prediction.select += width * extent * 2 * rates.check;
    // The velocity adds up in a pass of its own, and what that leaves is added in another.
    if (workload.has_moment) {
      prediction.select += width * extent * (2 * rates.pass + rates.momentum);
    }
    return prediction;
  }
  prediction.select +=
      width * (threshold_seconds(workload, rates) + extent * rates.pass + k * rates.pack);
  // The pass that selects has left zeros where the result is written.
  prediction.apply = writing(result);
  if (entry.top_k_result && shape.union_nnz > 0) {
    prediction.apply += writing(k * (1 - result / as_double(shape.union_nnz)));
  }
  if (workload.has_moment) {
    // What is selected is taken out of the residual entry by entry. Of that, what the result holds
    // is looked for, and loses its velocity.
    prediction.select += width * extent * rates.momentum + writing(k);
    prediction.apply += (k + result) * rates.merge;
    if (shape.union_nnz > 0) prediction.apply += writing(k * result / as_double(shape.union_nnz));
  }
  return prediction;
}

bool delivers_exact_entries(AlgorithmEntry const& entry) {
  return entry.needs == Needs::nothing && (!entry.sparse || entry.lossless() || entry.top_k_result);
}

bool is_candidate(AlgorithmEntry const& entry, Workload const& workload) {
  // Dense sums of halves come as halves, which may overflow before they are divided.
  bool const sums_wide = workload.element_bytes == workload.value_bytes;
  if (entry.needs == Needs::nothing) return delivers_exact_entries(entry);
  return workload.meets(entry.needs) && (entry.sparse || sums_wide);
}

std::vector<Prediction> rank_algorithms(Workload const& workload, Figures const& figures,
                                        bool (*eligible)(AlgorithmEntry const&, Workload const&)) {
  std::vector<Prediction> predictions;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (eligible(entry, workload)) predictions.push_back(predict(entry, workload, figures));
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
  check("a noise", state.noise, 0);
  double const most_noise = std::pow(std::log(options_.largest_surprise), 2);
  require(state.noise <= most_noise, "the plan to load has a noise of ", state.noise,
          ", more than the ", most_noise, " that a plan makes of any times");
  check("a predicted time", state.former_predicted, 0);
  for (Experience const& experience : state.experience) {
    require(experience.algorithm != nullptr, "the plan to load has experience of no algorithm");
    check("a correction", experience.correction, std::numeric_limits<double>::min());
  }
  if (state.algorithm != nullptr) {
    auto const own = std::ranges::find(state.experience, state.algorithm, &Experience::algorithm);
    std::uint64_t const observations = own == state.experience.end() ? 0 : own->observations;
    require(state.observations_before <= observations, "the plan to load has observed ",
            state.algorithm->name, ' ', observations, " times, but ", state.observations_before,
            " times before it was chosen");
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

bool Plan::stays(std::uint64_t step) const {
  if (state_.algorithm == nullptr) return false;
  Experience const* const experience = experience_of(state_.algorithm, step);
  if (experience == nullptr) return true;  // it is on trial
  std::uint64_t const before = state_.observations_before;
  return experience->observations - before < std::min(before, options_.window);
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
  if (experience != nullptr) {
    double const count = as_double(std::min(experience->observations, options_.window));
    double const doubt = options_.confidence * std::sqrt(state_.noise / count);
    return prediction.total() * experience->correction * std::exp(-doubt);
  }
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
    double const share =
        1.0 / as_double(std::min(experience->observations, options_.window - 1) + 1);
    experience->correction *= std::pow(surprise, share);
    // Of the mean that it is compared with, too.
    double const square = std::pow(std::log(surprise), 2) / (1 + share);
    state_.noise = smoothed(state_.noise, square, 1.0 / as_double(options_.window));
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

double Plan::expected(Workload const& workload, std::uint64_t step) {
  Workload const known = corrected(workload);
  auto const all = predictions(known);
  auto const own = std::ranges::find(all, state_.algorithm, &Prediction::algorithm);
  Experience const* const experience = experience_of(state_.algorithm, step);
  double const total =
      own == all.end() ? predict(*state_.algorithm, known, *state_.figures).total() : own->total();
  return total * (experience != nullptr ? experience->correction : common_correction(step));
}

std::span<const Prediction> Plan::predictions(Workload const& known) {
  bool const same = known.k == predicted_.k && known.union_nnz == predicted_.union_nnz &&
                    known.extent == predicted_.extent && known.ranks == predicted_.ranks &&
                    known.has_moment == predicted_.has_moment &&
                    known.commits == predicted_.commits;
  if (same && !predictions_.empty()) return predictions_;
  predictions_.clear();
  for (AlgorithmEntry const& entry : algorithms()) {
    if (is_candidate(entry, known)) {
      predictions_.push_back(predict(entry, known, *state_.figures));
    }
  }
  predicted_ = known;
  return predictions_;
}

void Plan::decide(Workload const& known, std::uint64_t step) {
  if (stays(step)) return;
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
  Experience const* const experience = experience_of(best, step);
  state_.observations_before = experience != nullptr ? experience->observations : 0;
  if (experience == nullptr) {
    std::erase_if(state_.experience,
                  [&](Experience const& former) { return former.algorithm == best; });
  }
  state_.algorithm = best;
  state_.steps_with = 0;
}

}  // namespace sparsecomm
