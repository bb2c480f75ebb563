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

// reports[r] is rank r's, if it made one; at least one is present. To blame are, of the following,
// the first that there are:
//
// 1. ranks whose messages were seen to be invalid;
// 2. ranks that failed by themselves;
// 3. ranks that have not submitted an operation in time, as all know;
// 4. ranks without a report at the ends of the chains of who waited for whom, which begin at ranks
//    that lost a connection or waited for a whole deadline;
// 5. both ends of a connection that was lost before either had reported: ranks report before they
//    close their connections, and such a chain ends there;
// 6. ranks between two operations, at the ends of the chains that begin with a deadline;
// 7. ranks on these of which messages are missing: fewer have arrived than were sent, or they have
//    gone on to a later operation;
// 8. ranks on the other chains of which messages are missing; else all on any, which wait in a
//    circle.
Verdict conclude(std::span<const std::optional<FailureReport>> reports);

// True when no further report is waited for: every rank has made one, or some report says that the
// connection to that rank alone is gone; a rank posts its report before it closes its connections.
// But if a rank has its result, one that only seems gone, as its connection broke, may lack it: its
// report decides.
bool settled(std::span<const std::optional<FailureReport>> reports);

}  // namespace sparsecomm
