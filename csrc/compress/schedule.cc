#include "compress/schedule.h"

#include <cmath>

namespace sparsecomm {
namespace {

constexpr ThresholdSourceEntry sources[] = {
    {ThresholdSource::exact, "exact"},
    {ThresholdSource::reused, "reused"},
    {ThresholdSource::sampled, "sampled"},
    {ThresholdSource::gaussian, "gaussian"},
};

}  // namespace

std::span<const ThresholdSourceEntry> threshold_sources() { return sources; }

std::string_view name(ThresholdSource source) {
  for (auto const& entry : sources) {
    if (entry.id == source) return entry.name;
  }
  throw InvalidArgument(concat("threshold source code ", int(source), " is unknown"));
}

ThresholdSource find_threshold_source(std::string_view name) {
  std::string known;
  for (auto const& entry : sources) {
    if (entry.name == name) return entry.id;
    known += concat(known.empty() ? "" : ", ", entry.name);
  }
  throw InvalidArgument(concat("threshold source '", name, "' is unknown; choose one of ", known));
}

std::uint64_t entries_at(double density, std::uint64_t extent) {
  auto const wanted = std::llround(density * static_cast<double>(extent));
  return std::clamp<std::uint64_t>(wanted, 1, std::max<std::uint64_t>(1, extent));
}

}  // namespace sparsecomm
