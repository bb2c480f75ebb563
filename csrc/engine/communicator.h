// Runs operations one after another, in the order of submission, on one progress thread.
//
// Before an operation moves data all ranks compare what they are about to do (see Proposal). Where
// they differ every rank throws the same Mismatch, nothing has been touched, and the communicator
// stays usable. When a peer is lost or a deadline passes, every surviving rank throws PeerLost or
// Timeout with the same culprits, and the communicator is done: later operations throw Aborted.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "collectives/algorithm.h"
#include "collectives/channel.h"
#include "transport/transport.h"

namespace sparsecomm {

// What a rank is about to do, as "name=value;name=value": ranks must agree on every field.
struct Proposal {
  std::string text;
  bool finite = true;  // no NaN or Inf in what this rank contributes
};

class Operation {
 public:
  virtual ~Operation() = default;
  // Local preparation on the progress thread, before anything is exchanged. An exception here
  // becomes an error on every rank, and the communicator stays usable.
  virtual Proposal prepare() = 0;
  // The exchange. `all_finite`: every rank's proposal was finite.
  virtual void run(Channel& channel, bool all_finite) = 0;
  // Undoes what prepare() and run() did to the caller's data so that nothing is lost; called after
  // a failure.
  virtual void roll_back() noexcept {}
};

struct CommunicatorOptions {
  Duration timeout = std::chrono::minutes(30);  // of one operation, from the moment it starts
  Duration failure_grace =
      std::chrono::seconds(1);  // how long survivors wait for each other's reports
};

class Communicator {
 public:
  // Called on the progress thread when an operation ends; null when it went well. Must not throw.
  using Completion = std::function<void(std::exception_ptr)>;

  class Handle {
   public:
    // Blocks until the operation has ended; throws what it threw.
    void wait() const;
    bool done() const;

   private:
    friend class Communicator;
    struct State;
    std::shared_ptr<State> state_;
  };

  Communicator(std::unique_ptr<Transport> transport, CommunicatorOptions options,
               Clock const& clock = steady_clock());
  // Fails what is queued with Aborted; an operation in progress is broken off.
  ~Communicator();
  Communicator(Communicator const&) = delete;
  Communicator& operator=(Communicator const&) = delete;

  Handle submit(std::shared_ptr<Operation> operation, Completion completion = {});

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  std::string_view transport_name() const { return transport_->name(); }
  Clock const& clock() const { return clock_; }
  // As of the last completed operation.
  Counters counters() const;

 private:
  struct Item {
    std::shared_ptr<Operation> operation;
    std::shared_ptr<Handle::State> state;
    Completion completion;
  };
  void progress();
  void execute(Operation& operation);
  bool agree(Channel& channel, Operation& operation);
  [[noreturn]] void fail(std::exception_ptr error);

  std::unique_ptr<Transport> transport_;
  CommunicatorOptions options_;
  Clock const& clock_;
  FrameAllgather gather_;                          // progress thread only
  std::atomic<std::uint64_t> next_operation_ = 0;  // written by the progress thread
  std::string broken_;        // progress thread only: why, once the transport has failed
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Item> queue_;
  bool closing_ = false;
  Counters counters_;
  std::thread thread_;  // last, so that it starts when all else is ready
};

// The agreement before each operation: one Bruck allgather of fingerprints.
Cost agreement_cost(int ranks);

}  // namespace sparsecomm
