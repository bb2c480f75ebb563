// Ranks on a simulation (simulation.h).
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ranks.h"
#include "simulation.h"
#include "transport/wrapped.h"

namespace sparsecomm::test {

// Takes some time before each message is sent and before each wait for one, in which others go on.
// Goes behind transports that count messages of their own.
class SlowTransport final : public WrappedTransport {
 public:
  SlowTransport(std::unique_ptr<Transport> inner, SeededSimulation& simulation)
      : WrappedTransport(std::move(inner)), simulation_(simulation) {}

  std::size_t wait(Request& request, Deadline const& deadline) override {
    take_time();
    return WrappedTransport::wait(request, deadline);
  }

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    take_time();
    return WrappedTransport::do_isend(peer, tag, bytes);
  }

 private:
  // Mostly none, so that others at the same moment may come first or not.
  void take_time() {
    std::uint64_t const drawn = simulation_.draw();
    if (drawn % 4 != 0) return simulation_.yield();
    simulation_.sleep(std::chrono::nanoseconds(drawn / 4 % 1000000));
  }

  SeededSimulation& simulation_;
};

// As run_ranks().
inline std::vector<std::exception_ptr> simulate_ranks(
    SeededSimulation& simulation, int size, std::function<void(Communicator&)> const& body,
    CommunicatorOptions options = {}, std::optional<RankFault> fault = std::nullopt,
    WrapTransport const& wrap = {}) {
  options.runtime = simulation;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  simulation.run([&] {
    auto transports = make_inproc_transports(size, simulation);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      auto& transport = transports[static_cast<std::size_t>(rank)];
      transport = std::make_unique<SlowTransport>(std::move(transport), simulation);
      if (fault && fault->rank == rank) transport = make_faulty(std::move(transport), fault->fault);
      if (wrap) transport = wrap(std::move(transport));
      threads.push_back(simulation.start("a rank", [&, rank] {
        try {
          Communicator communicator(std::move(transports[static_cast<std::size_t>(rank)]), options);
          body(communicator);
        } catch (...) {
          errors[static_cast<std::size_t>(rank)] = std::current_exception();
        }
      }));
    }
    for (std::thread& thread : threads) simulation.join(thread);
  });
  return errors;
}

}  // namespace sparsecomm::test
