#include "engine/verdict.h"

#include <algorithm>
#include <set>

namespace sparsecomm {

namespace {

// The suspect had sent more to the waiter than the waiter received.
bool message_missing(FailureReport const& waiting, int waiter, FailureReport const& suspected,
                     int suspect) {
  auto const count = [](std::vector<std::uint64_t> const& counts, int rank) {
    return rank < static_cast<int>(counts.size()) ? counts[rank] : 0;
  };
  return count(suspected.sent, waiter) > count(waiting.received, suspect);
}

}  // namespace

Verdict conclude(std::span<const std::optional<FailureReport>> reports) {
  using Cause = FailureReport::Cause;
  std::uint64_t operation = UINT64_MAX;
  for (auto const& report : reports) {
    if (report) operation = std::min(operation, report->operation);
  }
  auto const in_operation = [&](int rank) {
    return reports[rank] && reports[rank]->operation == operation;
  };

  std::set<int> invalid, own, ends, silent, suspects;
  std::string evidence;
  bool timed_out = false;
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    if (!in_operation(rank)) continue;
    FailureReport const& report = *reports[rank];
    timed_out = timed_out || report.cause == Cause::timeout;
    suspects.insert(report.suspects.begin(), report.suspects.end());
    if (report.cause == Cause::invalid) {
      invalid.insert(report.suspects.begin(), report.suspects.end());
      evidence = report.text;
    } else if (report.cause == Cause::own) {
      own.insert(rank);
      if (invalid.empty()) evidence = report.text;
    }
  }
  for (int waiter = 0; waiter < static_cast<int>(reports.size()); ++waiter) {
    if (!in_operation(waiter)) continue;
    for (int const rank : reports[waiter]->suspects) {
      bool const missing =
          in_operation(rank) && message_missing(*reports[waiter], waiter, *reports[rank], rank);
      if (missing) silent.insert(rank);
      // A connection that broke may have taken a message with it; a whole deadline is time enough
      // for one.
      if (!in_operation(rank) || (missing && reports[waiter]->cause == Cause::timeout))
        ends.insert(rank);
    }
  }

  std::set<int> const& culprits = !invalid.empty()  ? invalid
                                  : !own.empty()    ? own
                                  : !ends.empty()   ? ends
                                  : !silent.empty() ? silent
                                                    : suspects;
  Verdict verdict{{culprits.begin(), culprits.end()}, false, join_ranks(culprits)};
  if (!invalid.empty()) {
    verdict.text += concat(" broke the exchange: ", evidence);
  } else if (!own.empty()) {
    verdict.text += concat(" failed: ", evidence);
  } else if (timed_out) {
    verdict.timed_out = true;
    verdict.text += " did not take part before the deadline";
  } else {
    verdict.text += " left: the connection is gone";
  }
  return verdict;
}

bool settled(std::span<const std::optional<FailureReport>> reports) {
  std::set<int> gone;
  for (auto const& report : reports) {
    // Of several, one is gone; the others may have given up, and be about to report.
    if (report && report->cause == FailureReport::Cause::lost && report->suspects.size() == 1) {
      gone.insert(report->suspects.front());
    }
  }
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    if (!reports[rank] && !gone.contains(rank)) return false;
  }
  return true;
}

}  // namespace sparsecomm
