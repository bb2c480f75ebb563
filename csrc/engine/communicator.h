// Runs operations one after another, in the order of submission, on one progress thread.
//
// A blocking call that finds the communicator idle runs in the caller's thread instead, which saves
// two switches between threads.
//
// Before an operation moves data all ranks compare what they are about to do (see Proposal). Where
// they differ every rank throws the same Mismatch, nothing has been touched, and the communicator
// stays usable. When a peer is lost or a deadline passes, every surviving rank throws PeerLost or
// Timeout with the same culprits, and the communicator is done: later operations throw Aborted.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/executor.h"
#include "collectives/algorithm.h"
#include "collectives/channel.h"
#include "engine/calibration.h"
#include "engine/observer.h"
#include "engine/planner.h"
#include "engine/stall.h"
#include "transport/transport.h"

namespace sparsecomm {

// What a rank is about to do, as "name=value;name=value": ranks must agree on every field.
struct Proposal {
  std::string text;
  bool finite = true;         // no NaN or Inf in what this rank contributes
  std::uint64_t entries = 0;  // that this rank contributes; ranks may differ in it
  // What this rank found in the former operation of this kind, for a plan; 0: nothing.
  double former_seconds = 0;
  std::uint64_t former_entries = 0;
  // Neither number of entries is larger on any rank; part of the text in some form.
  std::uint64_t extent = 0;
};

// What all ranks' proposals come to.
struct Agreement {
  bool all_finite = true;
  std::uint64_t most_entries = 0;  // of any rank
  std::uint64_t total_entries = 0;
  double former_seconds = 0;  // the most of any rank, here and below
  std::uint64_t former_entries = 0;
};

class Operation {
 public:
  virtual ~Operation() = default;
  // Local preparation on the progress thread, before anything is exchanged. An exception here
  // becomes an error on every rank, and the communicator stays usable.
  virtual Proposal prepare() = 0;
  virtual void run(Channel& channel, Agreement const& agreement) = 0;
  // Undoes what prepare() and run() did to the caller's data so that nothing is lost; called after
  // a failure.
  virtual void roll_back() noexcept {}
  // Of stages that the communicator knows: Stage::whole and Stage::agree; others are the
  // operation's own. Null: nobody looks.
  virtual StageObserver* observer() { return nullptr; }
};

struct CommunicatorOptions {
  Duration timeout = std::chrono::minutes(30);  // of one operation, from the moment it starts
  Duration failure_grace =
      std::chrono::seconds(1);          // how long survivors wait for each other's reports
  std::optional<Figures> figures = {};  // the same on all ranks; measured on first use if absent
  // Told when an operation waits for other ranks without any progress for longer than the limit,
  // and by whom; nobody: no watch is kept.
  StallOptions stall = {};
  // Where operations' loops over N run.
  std::shared_ptr<Executor const> executor = std::make_shared<InlineExecutor>();
};

class Communicator {
 public:
  // Called on the progress thread when an operation ends; null when it went well. What it throws
  // then, Handle::wait() throws too.
  using Completion = std::function<void(std::exception_ptr)>;

  class Handle {
   public:
    // Blocks until the operation has ended; throws what it threw.
    void wait() const;
    bool done() const;
    // Keeps an operation that has not begun from running: every rank, also those that did not
    // cancel, gets Cancelled. False where it had begun, and then it runs to its end.
    bool cancel() const;

   private:
    friend class Communicator;
    struct State;
    std::shared_ptr<State> state_;
  };

  Communicator(std::unique_ptr<Transport> transport, CommunicatorOptions options,
               Clock const& clock = steady_clock());
  // Fails what is queued with Aborted; an operation in progress is broken off. A forked child
  // cannot use its parent's communicator: operations throw there, and destroying it does nothing.
  ~Communicator();
  Communicator(Communicator const&) = delete;
  Communicator& operator=(Communicator const&) = delete;

  Handle submit(std::shared_ptr<Operation> operation, Completion completion = {});
  // The same as submit(operation).wait(), but in this thread where nothing else is going on.
  void run(std::shared_ptr<Operation> const& operation);

  // Whether this is a thread that the communicator would wait for as it ends.
  bool on_own_thread() const;

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  std::string_view transport_name() const { return transport_->name(); }
  Transport const& transport() const { return *transport_; }
  Clock const& clock() const { return clock_; }
  Executor const& executor() const { return *options_.executor; }
  // As of the last completed operation.
  Counters counters() const;
  // For an operation that runs, on all ranks alike: the figures of this transport and processor.
  // Measures them when first called, see calibrate(), for which the operation gets more time.
  Figures const& figures(Channel& channel);

 private:
  struct Item {
    std::shared_ptr<Operation> operation;
    std::shared_ptr<Handle::State> state;
    Completion completion;
  };
  void progress();
  void execute(Operation& operation, bool cancelled);
  Agreement agree(Channel& channel, Operation& operation, bool cancelled);
  [[noreturn]] void fail(std::exception_ptr error);
  void require_own_process() const;

  std::unique_ptr<Transport> transport_;
  CommunicatorOptions options_;
  Clock const& clock_;
  pid_t owner_;
  // Of the thread that runs an operation.
  FrameAllgather gather_;
  std::vector<std::byte> frame_;
  CalibrationBuffers probes_;
  std::vector<std::uint32_t> intents_;  // [rank], as they came in the fingerprints
  std::atomic<std::uint64_t> next_operation_ = 0;
  std::string broken_;  // why, once the transport has failed

  mutable std::mutex mutex_;  // guards what follows
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::deque<Item> queue_;
  bool taken_ = false;    // a thread has an operation to run and to report on
  bool running_ = false;  // it is still running
  bool closing_ = false;
  Counters counters_;
  std::unique_ptr<StallWatch> watch_;  // null where nobody is to be told
  std::thread thread_;                 // last, so that it starts when all else is ready
};

// Measures the communicator's figures, where no operation has needed them yet.
class Calibration final : public Operation {
 public:
  explicit Calibration(Communicator& communicator) : communicator_(communicator) {}
  Proposal prepare() override { return {.text = "operation=calibration"}; }
  void run(Channel& channel, Agreement const& agreement) override;
  Figures const& figures() const { return figures_; }  // once it has ended

 private:
  Communicator& communicator_;
  Figures figures_;
};

// The agreement before each operation: one Bruck allgather of fingerprints.
Cost agreement_cost(int ranks);

}  // namespace sparsecomm
