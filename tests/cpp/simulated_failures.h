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
  NetworkFault fault{1, NetworkFault::Kind::die, 0};
  std::uint64_t seed = 0;
  Batch const* batch = &batch_of_one;  // see run_until_failure()
};

inline std::string describe(FailingRun const& run) {
  return concat("seed ", run.seed, ": ", run.algorithm, " of ", run.ranks, " ranks, rank ",
                run.fault.rank, " at message ", run.fault.message, ": ", name(run.fault.kind));
}

struct FailingOutcome {
  std::vector<Survivor> survivors;  // [rank], the one at fault included
  Duration time{};                  // until all had come to their ends
  std::uint64_t trace = 0;
  int cut_from = -1;  // the rank to which a connection was cut, if so
};

inline FailingOutcome simulate_failure(FailingRun const& run) {
  SeededSimulation simulation(run.seed);
  FailingOutcome outcome{.survivors = std::vector<Survivor>(static_cast<std::size_t>(run.ranks))};
  TimePoint const begin = simulation.now();
  NetworkFault fault = run.fault;
  fault.receiver = &outcome.cut_from;
  auto const errors = simulate_ranks(
      simulation, run.ranks,
      [&](Communicator& communicator) {
        outcome.survivors[static_cast<std::size_t>(communicator.rank())] =
            run_until_failure(communicator, run.algorithm, run.numel, *run.batch);
      },
      {}, fault, services_for(run.algorithm, simulation));
  for (std::exception_ptr const& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  outcome.time = simulation.now() - begin;
  outcome.trace = simulation.trace();
  return outcome;
}

// Whether the rank says what it should of the fault: the violation, or nothing.
inline std::string find_wrong_name(FailingRun const& run, FailingOutcome const& outcome,
                                   Survivor const& survivor) {
  using Kind = NetworkFault::Kind;
  if (run.fault.kind == Kind::slow) {
    bool const wrong = applied_steps(survivor.log) != 3;
    return wrong ? concat("fails: '", survivor.error, "'") : "";
  }
  if (run.fault.kind == Kind::cut || run.fault.kind == Kind::split) {
    // It is the algorithm's matter whether a connection was still needed.
    if (survivor.error.empty()) return "";
    bool const ends = std::ranges::all_of(survivor.culprits, [&](int named) {
      return named == run.fault.rank || named == outcome.cut_from;
    });
    if (run.fault.kind == Kind::cut && !ends) {
      return concat("names others than the ends: '", survivor.error, "'");
    }
    return survivor.aborted_later ? "" : "goes on with a communicator that has failed";
  }
  if (survivor.culprits != std::vector{run.fault.rank}) {
    return concat("does not name rank ", run.fault.rank, " but says: '", survivor.error, "'");
  }
  return survivor.aborted_later ? "" : "goes on with a communicator that has failed";
}

// Contracts 1, 2, 5 and 7: the first violation, or nothing.
inline std::string find_violation(FailingRun const& run, FailingOutcome const& outcome) {
  using Kind = NetworkFault::Kind;
  bool const all_survive =
      run.fault.kind == Kind::slow || run.fault.kind == Kind::cut || run.fault.kind == Kind::split;
  for (int rank = 0; rank < run.ranks; ++rank) {
    if (rank == run.fault.rank && !all_survive) continue;
    std::string const wrong =
        find_wrong_name(run, outcome, outcome.survivors[static_cast<std::size_t>(rank)]);
    if (!wrong.empty()) return concat("rank ", rank, " ", wrong);
  }
  // What never comes is missed at the deadline; all else is seen at once.
  CommunicatorOptions const options;
  Duration const waited = run.fault.kind == Kind::delay  ? options.timeout
                          : run.fault.kind == Kind::slow ? options.timeout
                          : run.fault.kind == Kind::stop ? 2 * options.timeout
                                                         : Duration::zero();
  if (outcome.time > waited + options.failure_grace + std::chrono::seconds(2)) {
    return concat("it took ", std::chrono::duration<double>(outcome.time).count(), " s");
  }
  int const lost = all_survive ? -1 : run.fault.rank;
  return find_violation(outcome.survivors, lost, run.algorithm);
}

}  // namespace sparsecomm::test
