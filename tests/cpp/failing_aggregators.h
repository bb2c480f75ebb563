// Allreduces through aggregators, in which one or a rank fails, on a simulation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aggregated_steps.h"
#include "faulty_link.h"
#include "ina/inproc_link.h"
#include "simulated_ranks.h"

namespace sparsecomm::test {

// What a rank has seen.
struct Witness {
  int applied = 0;
  std::string problem;  // of what it has got; empty: none
  std::string error;
  std::vector<int> accused;
  bool aborted_later = false;
  std::vector<std::string> log;
  std::vector<AggregatorLoss> lost;
  std::vector<std::vector<int>> messages;  // [step][aggregator]
};

class FailingAggregators {
 public:
  static constexpr int streams = 2, steps = 4;
  // Three rounds of each stream.
  static constexpr int messages_of_a_step = streams * 3 * 2;

  struct Shape {
    int ranks, aggregators;
  };

  FailingAggregators(Shape its_shape, LinkFault const& fault, std::uint64_t seed)
      : shape(its_shape),
        simulation(seed),
        hub(shape.aggregators, memory, std::chrono::minutes(10), vote_policy, simulation),
        links(std::size_t(shape.ranks)),
        witnesses(std::size_t(shape.ranks)) {
    scene.fault = fault;
    scene.kill = [this](int aggregator) { hub.kill(aggregator); };
    scene.restart = [this](int aggregator) { hub.restart(aggregator); };
    scene.stop = [this](int aggregator) { hub.stop(aggregator); };
  }

  // Returns what was thrown on a rank, by each.
  std::vector<std::exception_ptr> run(CommunicatorOptions const& options, bool integers) {
    std::size_t const numel =
        std::size_t(shape.aggregators) * streams * 5 * (small_messages().block_bytes / 4) - 3;
    auto const body = [&](Communicator& communicator) {
      if (integers) return reduce<std::int32_t>(communicator, numel);
      reduce<float>(communicator, numel);
    };
    TimePoint const begin = simulation.now();
    auto errors = simulate_ranks(simulation, shape.ranks, body, options, {}, surroundings());
    time = simulation.now() - begin;
    return errors;
  }

  std::string address() const { return concat("inproc:", scene.fault.aggregator); }

  Shape shape;
  SeededSimulation simulation;
  InprocAggregators hub;
  std::uint64_t job = 0;
  int retry = steps;  // none within these steps
  FaultScene scene;
  std::vector<std::shared_ptr<FaultyLink>> links;
  std::vector<Witness> witnesses;
  Duration time{};

 private:
  static constexpr std::size_t memory = std::size_t{16} << 20;

  Surroundings surroundings() {
    Surroundings around;
    around.equip = [this](CommunicatorOptions& options, std::uint64_t /*run*/, int rank, int size) {
      auto const link = hub.connect({.job = {job, 0},
                                     .workers = static_cast<std::uint16_t>(size),
                                     .worker = static_cast<std::uint16_t>(rank)});
      options.aggregators = links[rank] = std::make_shared<FaultyLink>(link, scene, rank);
      options.aggregator_streams = streams;
      options.aggregator_retry = retry;
      options.log_aggregator = [this, rank](std::string const& line) {
        witnesses[rank].log.push_back(line);
      };
    };
    return around;
  }

  template <class T>
  void reduce(Communicator& communicator, std::size_t numel) {
    int const rank = communicator.rank();
    Witness& witness = witnesses[rank];
    auto const note = [&](bool holds, auto const&... text) {
      if (!holds && witness.problem.empty()) witness.problem = concat(text...);
    };
    auto const operation = std::make_shared<AggregatedSum<T>>(communicator, small_messages());
    for (int step = 0; step < steps; ++step) {
      auto const input = aggregated_input<T>(rank, communicator.size(), step, numel);
      auto data = input;
      operation->bind(data);
      links[rank]->begin();
      try {
        communicator.run(operation);
        note(data == aggregated_sum<T>(communicator.size(), step, numel), "a wrong sum in step ",
             step);
        ++witness.applied;
      } catch (Aborted const&) {
        witness.aborted_later = true;
      } catch (Error const& error) {
        note(witness.error.empty(), "after '", witness.error, "': ", error.what());
        witness.error = error.what();
        auto const* const peer_error = dynamic_cast<PeerError const*>(&error);
        if (peer_error) witness.accused = peer_error->ranks();
        note(data == input, "data that has changed in step ", step, ", which has failed");
      }
      for (int i = 0; i < links[rank]->size(); ++i) {
        witness.messages.resize(std::size_t(step) + 1);
        witness.messages.back().push_back(links[rank]->messages(i));
      }
    }
    witness.lost = communicator.lost_aggregators();
  }
};

inline std::string describe(FailingAggregators::Shape shape, LinkFault const& fault) {
  return concat(shape.ranks, " ranks, ", shape.aggregators, " aggregators, ", name(fault.kind),
                " of aggregator ", fault.aggregator, " in operation ", fault.operation,
                " at message ", fault.message, ", byte ", fault.byte, ", of rank ", fault.rank);
}

// That all ranks have the sums, or name the rank that is gone: the first violation, or nothing.
inline std::string find_violation(FailingAggregators const& run) {
  LinkFault const& fault = run.scene.fault;
  bool const of_rank = fault.kind == LinkFault::Kind::die && run.scene.met.load() > 0;
  for (int rank = 0; rank < run.shape.ranks; ++rank) {
    if (of_rank && rank == fault.rank) continue;
    Witness const& witness = run.witnesses[std::size_t(rank)];
    auto const violation = [&](auto const&... text) { return concat("rank ", rank, " ", text...); };
    if (!witness.problem.empty()) return violation("has ", witness.problem);
    if (of_rank) {
      bool const was_last = fault.operation + 1 == FailingAggregators::steps;
      bool const named = witness.accused == std::vector{fault.rank};
      if (named && (witness.aborted_later || was_last)) continue;
      return violation("does not name rank ", fault.rank, ", and says: '", witness.error, "'");
    }
    if (witness.applied != FailingAggregators::steps) {
      return violation("fails: '", witness.error, "'");
    }
    for (AggregatorLoss const& loss : witness.lost) {
      if (loss.address != run.address()) {
        return violation("has lost ", loss.address, " too: ", loss.why);
      }
    }
    bool const alike = std::ranges::equal(witness.lost, run.witnesses[0].lost, {},
                                          &AggregatorLoss::address, &AggregatorLoss::address);
    if (!alike && !(of_rank && fault.rank == 0)) {
      return violation("uses other aggregators than rank 0");
    }
  }
  bool const waits = fault.kind == LinkFault::Kind::silent;
  // Each attempt to take a silent one again may be followed by another wait for it.
  Duration const patience = waits ? 3 * InaClient::default_patience : Duration::zero();
  if (run.time > patience + std::chrono::seconds(2)) {
    return concat("it took ", std::chrono::duration<double>(run.time).count(), " s");
  }
  return "";
}

}  // namespace sparsecomm::test
