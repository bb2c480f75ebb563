#include "engine/verdict.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <sstream>
#include <vector>

#include "base/error.h"

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

// It was between two operations, or in none of its own doing.
bool waits_for_no_rank(FailureReport const& report) {
  return report.cause == FailureReport::Cause::interrupted && report.suspects.empty();
}

// Ranks that the chains of waits lead to, from those that saw the failure: they lost a connection,
// or waited for a whole deadline.
struct Chains {
  std::set<int> reached, unheard, idle, silent;
};

Chains follow(std::span<const std::optional<FailureReport>> reports) {
  using Cause = FailureReport::Cause;
  Chains chains;
  std::vector<int> open;
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    auto const& report = reports[rank];
    if (!report) continue;
    if (report->cause == Cause::lost || report->cause == Cause::timeout) open.push_back(rank);
  }
  std::set<int> followed(open.begin(), open.end());
  while (!open.empty()) {
    int const waiter = open.back();
    open.pop_back();
    FailureReport const& waiting = *reports[waiter];
    for (int const suspect : waiting.suspects) {
      chains.reached.insert(suspect);
      auto const& report = reports[suspect];
      if (!report) {
        chains.unheard.insert(suspect);
        continue;
      }
      if (waits_for_no_rank(*report)) {
        // Between two operations it keeps others waiting; if it was lost, it left for the alarm.
        if (waiting.cause == Cause::timeout) chains.idle.insert(suspect);
        continue;
      }
      if (message_missing(waiting, waiter, *report, suspect)) chains.silent.insert(suspect);
      if (followed.insert(suspect).second) open.push_back(suspect);
    }
  }
  return chains;
}

}  // namespace

Verdict conclude(std::span<const std::optional<FailureReport>> reports) {
  using Cause = FailureReport::Cause;
  std::set<int> invalid, own;
  std::string evidence;
  bool timed_out = false;
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    if (!reports[rank]) continue;
    FailureReport const& report = *reports[rank];
    timed_out = timed_out || report.cause == Cause::timeout;
    if (report.cause == Cause::invalid) {
      invalid.insert(report.suspects.begin(), report.suspects.end());
      evidence = report.text;
    } else if (report.cause == Cause::own) {
      own.insert(rank);
      if (invalid.empty()) evidence = report.text;
    }
  }
  Chains const chains = follow(reports);
  std::set<int> suspects = chains.reached;
  if (suspects.empty()) {  // the rank that raised the alarm cannot be heard any more
    for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
      if (!reports[rank]) suspects.insert(rank);
    }
    if (suspects.empty()) {
      for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) suspects.insert(rank);
    }
  }
  std::set<int> const& culprits = !invalid.empty()          ? invalid
                                  : !own.empty()            ? own
                                  : !chains.unheard.empty() ? chains.unheard
                                  : !chains.idle.empty()    ? chains.idle
                                  : !chains.silent.empty()  ? chains.silent
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
  verdict.completed = UINT64_MAX;
  for (auto const& report : reports) {
    if (!report) continue;
    bool const stands = report->committing || report->operation == 0;
    verdict.completed = std::min(verdict.completed, report->operation - (stands ? 0 : 1));
  }
  return verdict;
}

std::string serialize_verdict(Verdict const& verdict) {
  std::ostringstream out;
  out << verdict.completed << ' ' << verdict.timed_out << ' ' << verdict.culprits.size();
  for (int const rank : verdict.culprits) out << ' ' << rank;
  out << '\n' << verdict.text;
  return std::move(out).str();
}

std::optional<Verdict> parse_verdict(std::string_view bytes, int size) {
  std::istringstream in{std::string(bytes)};
  Verdict verdict;
  std::size_t culprits = 0;
  in >> verdict.completed >> verdict.timed_out >> culprits;
  if (!in || culprits == 0 || culprits > static_cast<std::size_t>(size)) return std::nullopt;
  verdict.culprits.resize(culprits);
  int former = -1;
  for (int& rank : verdict.culprits) {
    in >> rank;
    if (!in || rank <= former || rank >= size) return std::nullopt;
    former = rank;
  }
  in.get();
  verdict.text.assign(std::istreambuf_iterator<char>(in), {});
  return verdict;
}

bool settled(std::span<const std::optional<FailureReport>> reports) {
  std::set<int> gone;
  for (auto const& report : reports) {
    if (report && report->committing) {
      return std::ranges::all_of(reports, [](auto const& other) { return other.has_value(); });
    }
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
