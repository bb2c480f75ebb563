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

// How directly a report speaks of what failed: the first that any report has is the one to go by.
enum class Directness : std::uint8_t {
  cause,        // it saw the failure, or waited for a rank that made no report
  consequence,  // it lost ranks that reported why they left
  interrupted,  // another rank's report ended its wait
  none,
};

Directness directness(FailureReport const& report,
                      std::span<const std::optional<FailureReport>> reports) {
  if (waits_for_no_rank(report)) return Directness::none;
  if (report.cause == FailureReport::Cause::interrupted) return Directness::interrupted;
  bool const explained = report.cause == FailureReport::Cause::lost &&
                         std::ranges::all_of(report.suspects, [&](int suspect) {
                           return reports[suspect].has_value();
                         });
  return explained ? Directness::consequence : Directness::cause;
}

// [rank]: whether its report counts: it is of the earliest operation of those that speak most
// directly, or a suspect's, and not of a failure of its own.
std::vector<bool> reports_that_count(std::span<const std::optional<FailureReport>> reports) {
  auto most_direct = std::pair(Directness::none, std::uint64_t{0});
  std::vector<std::optional<decltype(most_direct)>> places(reports.size());
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    if (!reports[rank]) continue;
    places[rank] = std::pair(directness(*reports[rank], reports), reports[rank]->operation);
    if (places[rank]->first != Directness::none) most_direct = std::min(most_direct, *places[rank]);
  }
  std::vector<bool> counts(reports.size());
  std::vector<std::size_t> added;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    counts[rank] = places[rank] == most_direct;
    if (counts[rank]) added.push_back(rank);
  }
  while (!added.empty()) {
    FailureReport const& waiting = *reports[added.back()];
    added.pop_back();
    for (int const suspect : waiting.suspects) {
      auto const& report = reports[suspect];
      if (counts[suspect] || !report || report->cause == FailureReport::Cause::own) continue;
      if (waits_for_no_rank(*report)) continue;
      counts[suspect] = true;
      added.push_back(suspect);
    }
  }
  return counts;
}

}  // namespace

Verdict conclude(std::span<const std::optional<FailureReport>> reports) {
  using Cause = FailureReport::Cause;
  std::vector<bool> const counts = reports_that_count(reports);

  std::set<int> invalid, own, ends, silent, suspects;
  std::string evidence;
  bool timed_out = false;
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    if (!counts[rank]) continue;
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
    if (!counts[waiter]) continue;
    for (int const rank : reports[waiter]->suspects) {
      bool const missing =
          counts[rank] && message_missing(*reports[waiter], waiter, *reports[rank], rank);
      if (missing) silent.insert(rank);
      // A rank between two operations keeps others waiting, but if one was lost it left for that
      // reason.
      bool const idle = reports[rank] && waits_for_no_rank(*reports[rank]);
      if (idle && (!timed_out || reports[waiter]->cause == Cause::lost)) continue;
      // A connection that broke may have taken a message with it; a whole deadline is time enough
      // for one.
      if (!counts[rank] || (missing && reports[waiter]->cause == Cause::timeout)) ends.insert(rank);
    }
  }

  if (suspects.empty()) {  // the rank that raised the alarm cannot be heard any more
    for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
      if (!reports[rank]) suspects.insert(rank);
    }
    if (suspects.empty()) {
      for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) suspects.insert(rank);
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
