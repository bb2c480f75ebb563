// Where a threshold comes from, and how much is sent, at which step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace sparsecomm {

enum class ThresholdSource : std::uint8_t {
  exact,     // the k-th largest magnitude
  reused,    // the last exact one (Ok-Topk section 3.1.3)
  sampled,   // an estimate made anew: local from a strided sample, global from one histogram
  gaussian,  // made anew, as if entries were normally distributed (Ok-Topk section 5.4); a global
             // one is sampled
};

struct ThresholdSourceEntry {
  ThresholdSource id;
  std::string_view name;
};

std::span<const ThresholdSourceEntry> threshold_sources();
std::string_view name(ThresholdSource source);
ThresholdSource find_threshold_source(std::string_view name);

// Exact at every step that `period` (tau') divides, and wherever no earlier threshold exists;
// `between` otherwise. A local gaussian threshold needs no exact one before it.
struct ThresholdSchedule {
  ThresholdSource between = ThresholdSource::sampled;
  std::uint64_t period = 32;

  ThresholdSource local_at(std::uint64_t step, bool have_former) const {
    if (between == ThresholdSource::gaussian) return between;
    return step % period == 0 || !have_former ? ThresholdSource::exact : between;
  }
  ThresholdSource global_at(std::uint64_t step, bool have_former) const {
    if (step % period == 0 || !have_former) return ThresholdSource::exact;
    return between == ThresholdSource::gaussian ? ThresholdSource::sampled : between;
  }
};

// k: how many of `extent` entries a density asks for, to the nearest, halves up; 1 at least.
std::uint64_t entries_at(double density, std::uint64_t extent);

// What share of a gradient is wanted at which step. Source: Lin et al. 2018, section 3.3.
struct DensityWarmup {
  std::uint64_t dense_steps = 0;  // the first ones, in which everything is sent
  std::uint64_t stage_steps = 1;  // then each of these densities for so many steps
  std::vector<double> stages;

  // `final`: the density afterwards, and the least.
  double at(std::uint64_t step, double final) const {
    if (step < dense_steps) return 1;
    std::uint64_t const stage = (step - dense_steps) / stage_steps;
    return stage < stages.size() ? std::max(stages[stage], final) : final;
  }
};

}  // namespace sparsecomm
