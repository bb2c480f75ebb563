// What follows from a failure: which ranks caused it, and which operations stand. Concluded from
// the survivors' reports, so that all survivors name the same ranks and end at the same step.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/board.h"

namespace sparsecomm {

struct Verdict {
  std::vector<int> culprits;  // sorted, never empty
  bool timed_out = false;
  std::string text;
  // The last operation that the survivors complete: all that reported have its result, or have
  // completed it already. Later ones are rolled back.
  std::uint64_t completed = 0;
};

std::string serialize_verdict(Verdict const& verdict);
// Null if the bytes are not a verdict on `size` ranks.
std::optional<Verdict> parse_verdict(std::string_view bytes, int size);

// reports[r] is rank r's, if it made one; at least one is present. Looks at the
// reports that name a cause, of the earliest operation among them, and at what their suspects
// report, who may have completed it: their last messages may have been lost when they left in a
// later one. Losing a rank that reported why it left is no cause, unless there is no other: it may
// have been interrupted on behalf of a later operation. A rank whose message was seen to be invalid
// is to blame; else one that failed by itself; else the ends of the chains of who waited for whom:
// suspects that did not report waiting for somebody else, or that claim to have sent what the
// waiting rank's whole deadline was not enough to bring. Where all wait in a circle, those whose
// messages are missing.
Verdict conclude(std::span<const std::optional<FailureReport>> reports);

// True when no further report is waited for: every rank has made one, or some report says that the
// connection to that rank alone is gone; a rank posts its report before it closes its connections.
// But if a rank has its result, one that only seems gone, as its connection broke, may lack it: its
// report decides.
bool settled(std::span<const std::optional<FailureReport>> reports);

}  // namespace sparsecomm
