// Steps of an exchange in which a rank fails, on a simulation.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "failing_steps.h"
#include "simulated_ranks.h"

namespace sparsecomm::test {

struct FailingRun {
  std::string algorithm;
  int ranks = 2;
  std::size_t numel = 600;
  RankFault fault{.rank = 1, .fault = {}};
  std::uint64_t seed = 0;
  bool ends_step = true;  // see run_until_failure()
};

inline std::string describe(FailingRun const& run) {
  constexpr char const* kinds[] = {"die", "delay", "truncate", "corrupt"};
  return concat("seed ", run.seed, ": ", run.algorithm, " of ", run.ranks, " ranks, rank ",
                run.fault.rank, " at message ", run.fault.fault.message, ": ",
                kinds[static_cast<std::size_t>(run.fault.fault.kind)]);
}

struct FailingOutcome {
  std::vector<Survivor> survivors;  // [rank], the one at fault included
  Duration time{};                  // until all had come to their ends
  std::uint64_t trace = 0;
};

inline FailingOutcome simulate_failure(FailingRun const& run) {
  SeededSimulation simulation(run.seed);
  FailingOutcome outcome{.survivors = std::vector<Survivor>(static_cast<std::size_t>(run.ranks))};
  TimePoint const begin = simulation.now();
  auto const errors = simulate_ranks(
      simulation, run.ranks,
      [&](Communicator& communicator) {
        outcome.survivors[static_cast<std::size_t>(communicator.rank())] =
            run_until_failure(communicator, run.algorithm, run.numel, run.ends_step);
      },
      {}, run.fault, services_for(run.algorithm, simulation));
  for (std::exception_ptr const& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  outcome.time = simulation.now() - begin;
  outcome.trace = simulation.trace();
  return outcome;
}

// Contracts 1, 2, 5 and 7: the first violation, or nothing.
inline std::string find_violation(FailingRun const& run, FailingOutcome const& outcome) {
  for (int rank = 0; rank < run.ranks; ++rank) {
    if (rank == run.fault.rank) continue;
    Survivor const& survivor = outcome.survivors[static_cast<std::size_t>(rank)];
    if (survivor.culprits != std::vector{run.fault.rank}) {
      return concat("rank ", rank, " does not name rank ", run.fault.rank, " but says: '",
                    survivor.error, "'");
    }
    if (!survivor.aborted_later) {
      return concat("rank ", rank, " goes on with a communicator that has failed");
    }
  }
  // What never comes is missed at the deadline; all else is seen at once.
  CommunicatorOptions const options;
  Duration const deadline =
      run.fault.fault.kind == FaultKind::delay ? options.timeout : Duration::zero();
  if (outcome.time > deadline + options.failure_grace + std::chrono::seconds(1)) {
    return concat("it took ", std::chrono::duration<double>(outcome.time).count(), " s");
  }
  return find_violation(outcome.survivors, run.fault.rank, run.algorithm);
}

}  // namespace sparsecomm::test
