// Who is to blame when an operation fails: drawn from all survivors' reports, so that all name the
// same ranks.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace sparsecomm {

struct Verdict {
  std::vector<int> culprits;  // sorted, never empty
  bool timed_out = false;
  std::string text;
};

// reports[r] is rank r's, if it made one; at least one is present. The earliest operation that
// failed is looked at, and what its suspects report who had completed it: their last messages may
// have been lost when they left in a later one. A rank whose message was seen to be invalid is to
// blame; else one that failed by itself; else the ends of the chains of who waited for whom:
// suspects that did not report waiting for somebody else, or that claim to have sent what the
// waiting rank's whole deadline was not enough to bring. Where all wait in a circle, those whose
// messages are missing.
Verdict conclude(std::span<const std::optional<FailureReport>> reports);

// True when no further report is waited for: every rank has made one, or some report says that the
// connection to that rank alone is gone; a rank posts its report before it closes its connections.
bool settled(std::span<const std::optional<FailureReport>> reports);

}  // namespace sparsecomm
