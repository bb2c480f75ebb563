// Steps of an exchange in which a rank fails, and what the others have to say then.
#pragma once

#include <string>
#include <vector>

#include "engine/gradient_exchange.h"
#include "gradients.h"
#include "services.h"
#include "step_log.h"

namespace sparsecomm::test {

struct Survivor {
  std::string error;
  std::vector<int> culprits;  // as the error names them
  StepLog log;
  bool aborted_later = false;
};

inline ExchangeOptions failure_options(std::string const& algorithm) {
  ExchangeOptions options;
  options.algorithm = algorithm;
  options.density = 0.05;
  options.average = false;
  return options;
}

// That the rank sends.
inline std::uint64_t messages_of_two_steps(std::string const& algorithm, int ranks,
                                           std::size_t numel, int rank) {
  std::uint64_t messages = 0;
  auto const body = [&](Communicator& communicator) {
    auto const exchange = std::make_shared<GradientExchange<float>>(
        "test", numel, failure_options(algorithm), communicator);
    std::vector<float> residual(numel, 0.0f);
    for (int step = 0; step < 2; ++step) {
      auto const input = patterns[0].make(communicator.rank(), ranks, numel, step);
      std::vector<float> gradient(input.begin(), input.end());
      exchange->bind({{gradient, residual}});
      communicator.submit(exchange).wait();
    }
    if (communicator.rank() == rank)
      messages = Counters::total(communicator.counters().sent_messages);
  };
  expect_no_errors(run_ranks(ranks, body, patient_options(), {}, services_for(algorithm)));
  return messages;
}

// Three steps, or as many as there are without an error. A rank that has its result when another
// one fails may complete the operation at hand, and fails in the next one. `batch`: an open
// one takes the round away that makes a step stand on all ranks or on none.
inline Survivor run_until_failure(Communicator& communicator, std::string const& algorithm,
                                  std::size_t numel, Batch const& batch = batch_of_one) {
  auto const exchange = std::make_shared<GradientExchange<float>>(
      "test", numel, failure_options(algorithm), communicator);
  std::vector<float> residual(numel, 0.0f);
  Survivor survivor;
  for (int step = 0; step < 3; ++step) {
    auto const input = patterns[0].make(communicator.rank(), communicator.size(), numel, step);
    std::vector<float> gradient(input.begin(), input.end());
    LoggedStep& log = survivor.log.emplace_back();
    log.input = gradient;
    log.residual_before = residual;
    exchange->bind({{gradient, residual}}, {}, {}, batch);
    auto const handle = communicator.submit(exchange);
    try {
      handle.wait();
      log.applied = true;
    } catch (Error const& error) {
      survivor.error = error.what();
      auto const* const peer_error = dynamic_cast<PeerError const*>(&error);
      if (peer_error) survivor.culprits = peer_error->ranks();
    }
    log.output = gradient;
    log.residual_after = residual;
    if (log.applied) continue;
    try {
      communicator.submit(exchange).wait();
    } catch (Aborted const&) {
      survivor.aborted_later = true;
    }
    return survivor;
  }
  return survivor;
}

inline std::string find_violation(std::vector<Survivor> const& ranks, int culprit,
                                  std::string const& algorithm) {
  std::vector<StepLog> logs;
  Demands demands;
  for (Survivor const& rank : ranks) {
    demands.survived.push_back(static_cast<int>(logs.size()) != culprit);
    logs.push_back(rank.log);
  }
  demands.whole_entries = algorithm != "gtopk";
  return find_violation(logs, demands);
}

inline void expect_accused(Survivor const& survivor, int culprit) {
  EXPECT_EQ(survivor.culprits, std::vector{culprit}) << "it says: '" << survivor.error << "'";
  EXPECT_TRUE(survivor.aborted_later);
}

}  // namespace sparsecomm::test
