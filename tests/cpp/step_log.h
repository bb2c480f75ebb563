// What every rank did in every step, and a checker of it, in the manner of Jepsen: from the logs
// alone, knowing nothing of algorithms, messages and faults.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"

namespace sparsecomm::test {

struct LoggedStep {
  bool applied = false;
  std::vector<float> input, residual_before;
  std::vector<float> output, residual_after;  // output: what the gradient holds afterwards
};
using StepLog = std::vector<LoggedStep>;  // of one rank

struct Demands {
  std::vector<bool> survived;  // [rank]
  // Each entry that a rank contributes is all of what it has at that position; not so where values
  // are rounded, or where a rank keeps what it cut from the sums of others.
  bool whole_entries = true;
};

inline std::size_t applied_steps(StepLog const& log) {
  std::size_t count = 0;
  for (LoggedStep const& step : log) count += step.applied ? 1 : 0;
  return count;
}

// Returns the first violation, or nothing. Sums must be exact; results are sums, not averages.
//
// 1. Survivors have applied the same number of steps, and none after one that they did not apply.
// 2. All that have applied a step have the same bits.
// 3. A rank that has not applied a step still has its gradient and residual.
// 4. If all have applied a step, their gradients and residuals before add up to the result and the
//    residuals after. If a rank failed in it, only what that rank had at a position may be missing.
//
// A result that only ranks have that failed is nobody's.
inline std::string find_violation(std::vector<StepLog> const& logs, Demands const& demands) {
  int const ranks = static_cast<int>(logs.size());
  std::size_t steps = 0;
  int first = -1;
  for (int rank = 0; rank < ranks; ++rank) {
    StepLog const& log = logs[rank];
    steps = std::max(steps, log.size());
    if (!demands.survived[rank]) continue;
    for (std::size_t step = 0; step < applied_steps(log); ++step) {
      if (!log[step].applied) return concat("rank ", rank, " applied a step after step ", step);
    }
    if (first < 0) first = rank;
    std::size_t const of_first = applied_steps(logs[first]);
    if (applied_steps(log) != of_first) {
      return concat("rank ", rank, " applied ", applied_steps(log), " steps, rank ", first, " ",
                    of_first);
    }
  }
  std::size_t const standing = first < 0 ? 0 : applied_steps(logs[first]);
  for (std::size_t step = 0; step < steps; ++step) {
    LoggedStep const* applied = nullptr;
    std::vector<double> missing;  // of the result, once what the ranks gave is taken off
    std::vector<int> lost;
    for (int rank = 0; rank < ranks; ++rank) {
      if (step >= logs[rank].size()) {
        lost.push_back(rank);
        continue;
      }
      LoggedStep const& at = logs[rank][step];
      std::size_t const numel = at.input.size();
      if (!at.applied || step >= standing) {
        if (!demands.survived[rank]) lost.push_back(rank);
        for (std::size_t i = 0; i < numel && demands.survived[rank]; ++i) {
          float const has = at.output[i] + at.residual_after[i];
          float const had = at.input[i] + at.residual_before[i];
          if (has != had) {
            return concat("rank ", rank, " had ", had, " at ", i, " in step ", step, ", has ", has);
          }
        }
        continue;
      }
      if (applied == nullptr) {
        applied = &at;
        missing.assign(at.output.begin(), at.output.end());
      } else if (at.output != applied->output) {
        return concat("rank ", rank, " has another result of step ", step);
      }
      for (std::size_t i = 0; i < numel; ++i) {
        missing[i] -= at.input[i] + at.residual_before[i] - at.residual_after[i];
      }
    }
    if (applied == nullptr) continue;
    if (lost.size() > 1 || (!lost.empty() && !demands.whole_entries)) continue;
    for (std::size_t i = 0; i < missing.size(); ++i) {
      if (missing[i] == 0) continue;
      double has = 0;
      if (!lost.empty() && step < logs[lost[0]].size()) {
        LoggedStep const& at = logs[lost[0]][step];
        has = at.input[i] + at.residual_before[i];
      }
      if (missing[i] != has) {
        return concat(missing[i], " at ", i, " in step ", step, " is nowhere; lost ranks had ",
                      has);
      }
    }
  }
  return {};
}

}  // namespace sparsecomm::test
