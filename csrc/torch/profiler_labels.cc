#include "profiler_labels.h"

#include <exception>

namespace sparsecomm {
namespace {

char const* label(Stage stage) {
  switch (stage) {
    case Stage::whole:
      return "sparsecomm";
    case Stage::agree:
      return "sparsecomm::agree";
    case Stage::select:
      return "sparsecomm::select";
    case Stage::exchange:
      return "sparsecomm::exchange";
    case Stage::apply:
      return "sparsecomm::apply";
  }
  return "sparsecomm::unknown";
}

bool somebody_profiles() { return at::hasCallbacks() && at::isRecordFunctionEnabled(); }

}  // namespace

void ProfilerLabels::follow_this_thread() {
  caller_.reset();
  if (somebody_profiles()) caller_.emplace();
}

void ProfilerLabels::begin(Stage stage) noexcept {
  try {
    if (stage == Stage::whole) {
      if (caller_) guard_.emplace(*caller_);
      seen_ = somebody_profiles();
    }
    if (!seen_) return;
    auto& range = ranges_.at(static_cast<std::size_t>(stage));
    range.emplace(at::RecordScope::USER_SCOPE);
    range->before(stage == Stage::whole ? whole_.c_str() : label(stage));
  } catch (std::exception const&) {
    // The trace lacks a range.
  }
}

void ProfilerLabels::end(Stage stage) noexcept {
  if (seen_) ranges_[static_cast<std::size_t>(stage)].reset();
  // Of the caller nothing is let go, for there may be another part of the whole.
  if (stage == Stage::whole) guard_.reset();
}

}  // namespace sparsecomm
