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

// What the reports say against whom.
struct Evidence {
  std::set<int> invalid, own, absent;
  std::set<int> cut;  // both ends of each connection that was lost before either had reported
  // Ranks that the chains of waits lead to: all of them, those without a report, those between two
  // operations, and those whose messages are missing.
  std::set<int> reached, unheard, idle, silent;
  std::string text;
  bool timed_out = false;
};

// The suspect has not closed the connection: it would have reported first.
bool connection_lost(FailureReport const& waiting, FailureReport const& suspected) {
  return waiting.cause == FailureReport::Cause::lost && waiting.number != 0 &&
         waiting.number < suspected.number;
}

// The chains begin at the ranks that failed so: that lost a connection, or waited for a whole
// deadline.
void follow_chains(std::span<const std::optional<FailureReport>> reports,
                   FailureReport::Cause cause, Evidence& evidence) {
  std::vector<int> open;
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    if (reports[rank] && reports[rank]->cause == cause) open.push_back(rank);
  }
  // Messages that are missing where a deadline has passed say more than others do.
  bool const counts = evidence.silent.empty();
  std::set<int> followed(open.begin(), open.end());
  while (!open.empty()) {
    int const waiter = open.back();
    open.pop_back();
    FailureReport const& waiting = *reports[waiter];
    for (int const suspect : waiting.suspects) {
      evidence.reached.insert(suspect);
      auto const& report = reports[suspect];
      if (!report) {
        evidence.unheard.insert(suspect);
        continue;
      }
      if (connection_lost(waiting, *report)) {
        evidence.cut.insert({waiter, suspect});
        continue;
      }
      if (waits_for_no_rank(*report)) {
        // Between two operations it keeps others waiting; if it was lost, it left for the alarm.
        if (cause == FailureReport::Cause::timeout) evidence.idle.insert(suspect);
        continue;
      }
      // It has sent all it had to, and what it waits for now is another operation's.
      bool const is_ahead =
          cause == FailureReport::Cause::timeout && report->operation > waiting.operation;
      if (is_ahead || (counts && message_missing(waiting, waiter, *report, suspect))) {
        evidence.silent.insert(suspect);
      }
      if (is_ahead) continue;
      if (followed.insert(suspect).second) open.push_back(suspect);
    }
  }
}

Evidence collect(std::span<const std::optional<FailureReport>> reports) {
  using Cause = FailureReport::Cause;
  Evidence evidence;
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    if (!reports[rank]) continue;
    FailureReport const& report = *reports[rank];
    evidence.timed_out = evidence.timed_out || report.cause == Cause::timeout;
    if (report.cause == Cause::invalid) {
      evidence.invalid.insert(report.suspects.begin(), report.suspects.end());
      evidence.text = report.text;
    } else if (report.cause == Cause::own) {
      evidence.own.insert(rank);
      if (evidence.invalid.empty()) evidence.text = report.text;
    } else if (report.cause == Cause::absent) {
      evidence.absent.insert(report.suspects.begin(), report.suspects.end());
      if (evidence.invalid.empty() && evidence.own.empty()) evidence.text = report.text;
    }
  }
  follow_chains(reports, Cause::timeout, evidence);
  follow_chains(reports, Cause::lost, evidence);
  return evidence;
}

// If no report accuses anybody, that of the rank which raised the alarm cannot be heard any more.
std::set<int> those_unheard(std::span<const std::optional<FailureReport>> reports) {
  std::set<int> unheard, all;
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    all.insert(rank);
    if (!reports[rank]) unheard.insert(rank);
  }
  return unheard.empty() ? all : unheard;
}

Verdict blame(std::set<int> const& culprits, bool timed_out, std::string const& text) {
  return {{culprits.begin(), culprits.end()}, timed_out, join_ranks(culprits) + text};
}

Verdict blame(std::span<const std::optional<FailureReport>> reports) {
  Evidence const found = collect(reports);
  if (!found.invalid.empty()) {
    return blame(found.invalid, false, " broke the exchange: " + found.text);
  }
  if (!found.own.empty()) return blame(found.own, false, " failed: " + found.text);
  if (!found.absent.empty()) {
    return blame(found.absent, true, " did not take part before the deadline: " + found.text);
  }
  if (found.unheard.empty() && !found.cut.empty()) {
    return blame(found.cut, false, " lost the connection to each other");
  }
  std::set<int> const& culprits = !found.unheard.empty()   ? found.unheard
                                  : !found.idle.empty()    ? found.idle
                                  : !found.silent.empty()  ? found.silent
                                  : !found.reached.empty() ? found.reached
                                                           : those_unheard(reports);
  return blame(
      culprits, found.timed_out,
      found.timed_out ? " did not take part before the deadline" : " left: the connection is gone");
}

}  // namespace

Verdict conclude(std::span<const std::optional<FailureReport>> reports) {
  Verdict verdict = blame(reports);
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
