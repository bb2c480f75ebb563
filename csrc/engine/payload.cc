#include "engine/payload.h"

#include <algorithm>
#include <cmath>

#include "base/shortest.h"

namespace sparsecomm {
namespace {

void check_entries(std::uint64_t entries, std::uint64_t extent) {
  require<MalformedFrame>(entries <= extent, "a contribution of ", entries,
                          " entries to a vector of ", extent);
}

}  // namespace

bool LossScale::merge(LossScale const& other) {
  require<MalformedFrame>(std::isfinite(other.value) && other.value >= 0, "a loss scale of ",
                          other.value);
  if (value == 0) value = other.value;
  return other.value == 0 || other.value == value;
}

std::string LossScale::field(LossScale const& others) const {
  double const shown = value > 0 ? value : others.value;
  return shown > 0 ? concat(";loss_scale=", Shortest{shown}) : std::string();
}

bool EntryCounts::merge(EntryCounts const& other, std::uint64_t extent) {
  check_entries(other.most, extent);
  require<MalformedFrame>(other.most == other.total, "a contribution of ", other.most, " and of ",
                          other.total, " entries");
  require<MalformedFrame>(other.most_blocks <= extent, "a contribution of ", other.most_blocks,
                          " blocks to a vector of ", extent);
  most = std::max(most, other.most);
  most_blocks = std::max(most_blocks, other.most_blocks);
  total += other.total;
  return true;
}

bool StepPayload::merge(StepPayload const& other, std::uint64_t extent) {
  require<MalformedFrame>(std::isfinite(other.previous_seconds) && other.previous_seconds >= 0,
                          "a previous step of ", other.previous_seconds, " s");
  check_entries(other.previous_entries, extent);
  previous_seconds = std::max(previous_seconds, other.previous_seconds);
  previous_entries = std::max(previous_entries, other.previous_entries);
  return loss_scale.merge(other.loss_scale);
}

bool SharingPayload::merge(SharingPayload const& other, std::uint64_t extent) {
  return step.merge(other.step, extent) && counts.merge(other.counts, extent);
}

}  // namespace sparsecomm
