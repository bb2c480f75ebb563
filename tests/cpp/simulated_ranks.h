// Ranks on a simulation (simulation.h).
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ranks.h"
#include "simulation.h"
#include "transport/wrapped.h"
#include "wrapped_link.h"

namespace sparsecomm::test {

// Lets others go on before what follows. Mostly no time passes, so that others at the same moment
// may come first or not.
inline void take_time(SeededSimulation& simulation) {
  std::uint64_t const drawn = simulation.draw();
  if (drawn % 4 != 0) return simulation.yield();
  simulation.sleep(std::chrono::nanoseconds(drawn / 4 % 1000000));
}

// Takes some time before each message is sent and before each wait for one. Goes behind transports
// that count messages of their own.
class SlowTransport final : public WrappedTransport {
 public:
  SlowTransport(std::unique_ptr<Transport> inner, SeededSimulation& simulation)
      : WrappedTransport(std::move(inner)), simulation_(simulation) {}

  std::size_t wait(Request& request, Deadline const& deadline) override {
    take_time(simulation_);
    return WrappedTransport::wait(request, deadline);
  }

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    take_time(simulation_);
    return WrappedTransport::do_isend(peer, tag, bytes);
  }

 private:
  SeededSimulation& simulation_;
};

// The same of a link to aggregators.
class SlowLink final : public WrappedLink {
 public:
  SlowLink(std::shared_ptr<AggregatorLink> inner, SeededSimulation& simulation)
      : WrappedLink(std::move(inner)), simulation_(simulation) {}

  void send(int aggregator, std::uint32_t instance, InaMessage const& message) override {
    take_time(simulation_);
    WrappedLink::send(aggregator, instance, message);
  }
  Event next(Deadline const& deadline) override {
    take_time(simulation_);
    return WrappedLink::next(deadline);
  }

 private:
  SeededSimulation& simulation_;
};

// As run_ranks(), with the options' own deadlines, which take no time to pass.
inline std::vector<std::exception_ptr> simulate_ranks(
    SeededSimulation& simulation, int size, std::function<void(Communicator&)> const& body,
    CommunicatorOptions options = {}, std::optional<RankFault> fault = std::nullopt,
    Surroundings const& around = {}) {
  options.runtime = simulation;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  simulation.run([&] {
    auto transports = make_inproc_transports(size, simulation);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      auto& transport = transports[static_cast<std::size_t>(rank)];
      transport = std::make_unique<SlowTransport>(std::move(transport), simulation);
      if (fault && fault->rank == rank) transport = make_faulty(std::move(transport), fault->fault);
      if (around.wrap) transport = around.wrap(std::move(transport));
      threads.push_back(simulation.start("a rank", [&, rank] {
        try {
          CommunicatorOptions own = options;
          if (around.equip) around.equip(own, 0, rank, size);
          if (own.aggregators) {
            own.aggregators = std::make_shared<SlowLink>(std::move(own.aggregators), simulation);
          }
          Communicator communicator(std::move(transport), std::move(own));
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

// Counts down to zero, and lets go who waits for that: a std::latch.
class Latch {
 public:
  Latch(Runtime runtime, int count) : count_(count), opened_(runtime, "a latch") {}

  void count_down() {
    {
      std::lock_guard const lock(mutex_);
      --count_;
    }
    opened_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [&] { return count_ <= 0; });
  }
  void arrive_and_wait() {
    count_down();
    wait();
  }

 private:
  std::mutex mutex_;
  int count_;
  Condition opened_;
};

}  // namespace sparsecomm::test
