#include "compress/schedule.h"

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

}  // namespace sparsecomm
