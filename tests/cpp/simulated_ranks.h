// Ranks on a simulation (simulation.h).
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ranks.h"
#include "simulated_network.h"
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

// Takes some time before each message is sent to aggregators and before each wait for one.
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

struct NetworkFault {
  enum class Kind : std::uint8_t {
    die,       // see FaultKind
    delay,     // see FaultKind
    truncate,  // see FaultKind
    corrupt,   // see FaultKind
    slow,      // the rank stops for less than the deadline, and then goes on
    stop,      // for longer than the deadline
    cut,       // the connection to the receiver is lost
    split,     // so are all between two parts of the ranks
  };

  static constexpr std::uint64_t kinds = 8;

  NetworkFault(int its_rank, Kind its_kind, std::uint64_t its_message)
      : rank(its_rank), kind(its_kind), message(its_message) {}
  NetworkFault(RankFault const& fault)  // NOLINT: the same
      : rank(fault.rank), kind(static_cast<Kind>(fault.fault.kind)), message(fault.fault.message) {}

  int rank = 1;
  Kind kind = Kind::die;
  std::uint64_t message = 0;  // which of the rank's sends, counted from 0
  int* receiver = nullptr;    // if not null, gets the peer to which a connection is cut
};
static_assert(int(NetworkFault::Kind::corrupt) == int(FaultKind::corrupt));

inline std::string_view name(NetworkFault::Kind kind) {
  constexpr std::string_view names[] = {"die",  "delay", "truncate", "corrupt",
                                        "slow", "stop",  "cut",      "split"};
  return names[static_cast<std::size_t>(kind)];
}

// Those that are the network's.
class InterruptedTransport final : public WrappedTransport {
 public:
  InterruptedTransport(std::unique_ptr<NetworkTransport> inner, NetworkFault fault,
                       Duration timeout)
      : WrappedTransport(std::move(inner)),
        network_(static_cast<NetworkTransport&>(WrappedTransport::inner())),
        fault_(fault),
        timeout_(timeout) {}

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    if (sent_++ == fault_.message) {
      if (fault_.kind == NetworkFault::Kind::cut) {
        network_.cut(peer);
        if (fault_.receiver != nullptr) *fault_.receiver = peer;
      } else if (fault_.kind == NetworkFault::Kind::split) {
        network_.split();
      } else {
        network_.stop(fault_.kind == NetworkFault::Kind::slow ? timeout_ / 4 : 2 * timeout_);
      }
    }
    return WrappedTransport::do_isend(peer, tag, bytes);
  }

 private:
  NetworkTransport& network_;
  NetworkFault const fault_;
  Duration const timeout_;
  std::uint64_t sent_ = 0;
};

inline std::unique_ptr<Transport> make_faulty(std::unique_ptr<NetworkTransport> inner,
                                              NetworkFault const& fault, Duration timeout) {
  if (fault.kind > NetworkFault::Kind::corrupt) {
    return std::make_unique<InterruptedTransport>(std::move(inner), fault, timeout);
  }
  return make_faulty(std::move(inner), Fault{static_cast<FaultKind>(fault.kind), fault.message});
}

// As run_ranks(), with the options' own deadlines, which take no time to pass.
inline std::vector<std::exception_ptr> simulate_ranks(
    SeededSimulation& simulation, int size, std::function<void(Communicator&)> const& body,
    CommunicatorOptions options = {}, std::optional<NetworkFault> fault = std::nullopt,
    Surroundings const& around = {}) {
  options.runtime = simulation;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  auto const run_rank = [&](int rank, std::unique_ptr<NetworkTransport> network) {
    std::unique_ptr<Transport> transport =
        fault && fault->rank == rank ? make_faulty(std::move(network), *fault, options.timeout)
                                     : std::move(network);
    if (around.wrap) transport = around.wrap(std::move(transport));
    CommunicatorOptions own = options;
    if (around.equip) around.equip(own, 0, rank, size);
    if (own.aggregators) {
      own.aggregators = std::make_shared<SlowLink>(std::move(own.aggregators), simulation);
    }
    Communicator communicator(std::move(transport), std::move(own));
    body(communicator);
  };
  simulation.run([&] {
    auto transports = make_network_transports(simulation, size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.push_back(simulation.start("a rank", [&, rank] {
        auto const number = static_cast<std::size_t>(rank);
        try {
          run_rank(rank, std::move(transports[number]));
        } catch (...) {
          errors[number] = std::current_exception();
        }
      }));
    }
    for (std::thread& thread : threads) simulation.join(thread);
  });
  return errors;
}

// On simulations of some seeds.
inline void for_seeds(std::function<void(SeededSimulation&)> const& check) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(concat("seed ", seed));
    SeededSimulation simulation(seed);
    check(simulation);
    if (::testing::Test::HasFailure()) return;
  }
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
