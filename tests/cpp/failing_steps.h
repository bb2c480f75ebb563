// Steps of an exchange in which a rank fails, and what the others have to say then.
#pragma once

#include <string>
#include <vector>

#include "engine/gradient_exchange.h"
#include "gradients.h"
#include "reducing_transport.h"

namespace sparsecomm::test {

struct Survivor {
  std::string error;
  std::vector<int> culprits;  // as the error names them
  bool conserved = true;
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
  expect_no_errors(run_ranks(ranks, body, {}, {}, wrap_for(algorithm)));
  return messages;
}

// Three steps, or as many as there are without an error. A rank that needs nothing more from the
// culprit may complete the operation at hand, so each survivor must fail in that operation or in
// the next one.
inline Survivor run_until_failure(Communicator& communicator, std::string const& algorithm,
                                  std::size_t numel) {
  auto const exchange = std::make_shared<GradientExchange<float>>(
      "test", numel, failure_options(algorithm), communicator);
  std::vector<float> residual(numel, 0.0f);
  Survivor survivor;
  for (int step = 0; step < 3; ++step) {
    auto const input = patterns[0].make(communicator.rank(), communicator.size(), numel, step);
    std::vector<float> gradient(input.begin(), input.end());
    auto const before = residual;
    exchange->bind({{gradient, residual}});
    auto const handle = communicator.submit(exchange);
    try {
      handle.wait();
    } catch (Error const& error) {
      survivor.error = error.what();
      auto const* const peer_error = dynamic_cast<PeerError const*>(&error);
      if (peer_error) survivor.culprits = peer_error->ranks();
      for (std::size_t i = 0; i < numel; ++i) {
        survivor.conserved = survivor.conserved &&
                             gradient[i] + residual[i] == before[i] + static_cast<float>(input[i]);
      }
      try {
        communicator.submit(exchange).wait();
      } catch (Aborted const&) {
        survivor.aborted_later = true;
      }
      return survivor;
    }
  }
  return survivor;
}

inline void expect_accused(Survivor const& survivor, int culprit) {
  EXPECT_EQ(survivor.culprits, std::vector{culprit}) << "it says: '" << survivor.error << "'";
  EXPECT_TRUE(survivor.conserved) << "gradient mass is lost";
  EXPECT_TRUE(survivor.aborted_later);
}

}  // namespace sparsecomm::test
