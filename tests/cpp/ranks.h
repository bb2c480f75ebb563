// Runs one function on every rank of an inproc communicator, a thread each.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/communicator.h"
#include "patience.h"
#include "transport/fault.h"
#include "transport/inproc.h"

namespace sparsecomm::test {

struct RankFault {
  int rank;
  Fault fault;
};

// What takes half as long as the deadline has waited for it, and should not have. The grace is
// short because some failures take all of it: a rank that dies amid the commit round may seem to be
// alive.
inline CommunicatorOptions patient_options() {
  return {.timeout = long_time(), .failure_grace = patiently(std::chrono::milliseconds(500))};
}

// A message that never comes is noticed by the deadline alone, which is short for that.
inline CommunicatorOptions options_for(FaultKind kind) {
  CommunicatorOptions options = patient_options();
  if (kind == FaultKind::delay) options.timeout = patiently(std::chrono::milliseconds(800));
  return options;
}

using WrapTransport = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

// What ranks have beside plain transports.
struct Surroundings {
  Surroundings() = default;
  template <class Wrap>
    requires std::is_invocable_v<Wrap&, std::unique_ptr<Transport>>
  Surroundings(Wrap before) : wrap(std::move(before)) {}  // NOLINT: what most tests need

  WrapTransport wrap;  // goes before every rank's transport, faults included
  // Of each rank; `run` is another one in each call of run_ranks().
  std::function<void(CommunicatorOptions&, std::uint64_t run, int rank, int size)> equip;
};

// errors[r] is what body(r) threw on its thread, null when it returned.
inline std::vector<std::exception_ptr> on_threads(int size,
                                                  std::function<void(int rank)> const& body) {
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline std::vector<std::exception_ptr> run_ranks(
    std::vector<std::unique_ptr<Transport>> transports,
    std::function<void(Communicator&)> const& body,
    CommunicatorOptions const& options = patient_options(),
    std::optional<RankFault> fault = std::nullopt, Surroundings const& around = {}) {
  if (fault) {
    transports[fault->rank] = make_faulty(std::move(transports[fault->rank]), fault->fault);
  }
  if (around.wrap) {
    for (auto& transport : transports) transport = around.wrap(std::move(transport));
  }
  int const size = static_cast<int>(transports.size());
  static std::atomic<std::uint64_t> runs = 0;
  std::uint64_t const run = runs++;
  return on_threads(size, [&](int rank) {
    CommunicatorOptions own = options;
    if (around.equip) around.equip(own, run, rank, size);
    Communicator communicator(std::move(transports[rank]), std::move(own));
    body(communicator);
  });
}

// Over inproc.
inline std::vector<std::exception_ptr> run_ranks(
    int size, std::function<void(Communicator&)> const& body,
    CommunicatorOptions const& options = patient_options(),
    std::optional<RankFault> fault = std::nullopt, Surroundings const& around = {}) {
  return run_ranks(make_inproc_transports(size), body, options, fault, around);
}

inline Counters difference(Counters after, Counters const& before) {
  for (auto const part : {&Counters::sent_bytes, &Counters::sent_messages,
                          &Counters::received_bytes, &Counters::received_messages}) {
    std::ranges::transform(after.*part, before.*part, (after.*part).begin(), std::minus<>());
  }
  return after;
}

inline std::string message_of(std::exception_ptr const& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (std::exception const& exception) {
    return exception.what();
  }
}

inline void expect_no_errors(std::vector<std::exception_ptr> const& errors) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    EXPECT_EQ(message_of(errors[rank]), "") << "on rank " << rank;
  }
}

}  // namespace sparsecomm::test
