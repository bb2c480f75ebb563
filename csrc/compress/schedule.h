// Where a threshold comes from at which step.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/error.h"

namespace sparsecomm {

enum class ThresholdSource : std::uint8_t {
  exact,    // the k-th largest magnitude
  reused,   // the last exact one (Ok-Topk section 3.1.3)
  sampled,  // an estimate made anew: local from a strided sample, global from one histogram
};

struct ThresholdSourceEntry {
  ThresholdSource id;
  std::string_view name;
};

std::span<const ThresholdSourceEntry> threshold_sources();
std::string_view name(ThresholdSource source);
ThresholdSource find_threshold_source(std::string_view name);

// Exact at every step that `period` (tau') divides, and wherever no earlier threshold exists;
// `between` otherwise.
struct ThresholdSchedule {
  ThresholdSource between = ThresholdSource::sampled;
  std::uint64_t period = 32;

  ThresholdSource at(std::uint64_t step, bool have_former) const {
    return step % period == 0 || !have_former ? ThresholdSource::exact : between;
  }
};

}  // namespace sparsecomm
