// Runs operations one after another, in an order that all ranks agree on, on one progress thread.
//
// A blocking call that finds the communicator idle runs in the caller's thread instead, which saves
// two switches between threads.
//
// Before an operation moves data all ranks agree on what they are about to do (coordinator.cc).
// Where they differ every rank throws the same Mismatch, nothing has been touched, and the
// communicator stays usable. When a peer is lost or a deadline passes, every surviving rank throws
// PeerLost or Timeout with the same culprits, and the communicator is done: later operations throw
// Aborted.
//
// An operation that ends with Agreement::commit() stands on all survivors of a failure or on none:
//
// 1. A rank that has its result, and no other, begins one more round of messages. A rank that gets
//    through it knows that all ranks have theirs.
// 2. A rank on which an operation fails publishes whether it had its result. That raises an alarm,
//    on which every other rank breaks off what it does and publishes the same of itself; between
//    two operations, that it has completed the former.
// 3. If all ranks that published had their result, the operation stands, else nobody can have got
//    through the round, and it is rolled back. The first conclusion that reaches the board holds
//    for all.
//
// If the board cannot be reached, a rank that did not get through the round rolls back.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/executor.h"
#include "base/runtime.h"
#include "collectives/algorithm.h"
#include "collectives/channel.h"
#include "collectives/figures.h"
#include "engine/comparison.h"
#include "engine/coordinator.h"
#include "engine/operation.h"
#include "engine/stall.h"
#include "engine/step_record.h"
#include "engine/ticket.h"
#include "engine/timeline.h"
#include "ina/client.h"
#include "ina/tcp_link.h"
#include "transport/interruptible.h"
#include "transport/transport.h"

namespace sparsecomm {

struct Figures;         // engine/planner.h
class LinkModel;        // engine/link_model.h
class JoinAggregators;  // engine/join_aggregators.h

struct CommunicatorOptions {
  Duration timeout = std::chrono::minutes(30);  // of one operation, from the moment it starts
  Duration failure_grace =
      std::chrono::seconds(1);  // how long survivors wait for each other's reports
  // Figures of link and processor, the same on all ranks; null: measured on first use.
  std::shared_ptr<Figures const> figures = {};
  // Told when an operation waits for other ranks without any progress for longer than the limit,
  // and by whom; nobody: no watch is kept.
  StallOptions stall = {};
  // Waits of operations for services end when those for ranks do.
  Interruptibles interruptibles = {};
  // Of this rank, connected as the worker of that number in a job of as many workers as there are
  // ranks, to the same aggregators on all ranks; null: none.
  std::shared_ptr<AggregatorLink> aggregators = {};
  // Instead of those: joined before the first operation, see JoinAggregators; no addresses: none.
  AggregatorAddresses aggregator_addresses = {};
  int aggregator_streams = InaClient::default_streams;  // see InaClient; the same on all ranks
  Duration aggregator_patience = InaClient::default_patience;
  // Told of each aggregator that is lost, once, by the thread that runs an operation.
  std::function<void(std::string const&)> log_aggregator = {};
  InaPolicy const* aggregator_policy = &vote_policy;
  // Operations between the first loss of an aggregator and the first attempt to use it again; the
  // same on all ranks.
  int aggregator_retry = 64;
  // Where operations' loops over N run.
  std::shared_ptr<Executor const> executor = std::make_shared<InlineExecutor>();
  TimelineOptions timeline = {};
  Runtime runtime = {};  // of the communicator's threads and waits
  // Names of operations that ranks remember, 1 or more, the same on all.
  std::size_t cached_names = 1024;
  // What a rank contributes to operations that are exchanged together, at most; 0: none are. The
  // same on all ranks. See Fusion.
  std::size_t fusion_bytes = std::size_t{1} << 16;
  // The same on all ranks. Numbers of 64 bits, of which messages carry 32, and tags fewer.
  std::uint64_t first_operation = 0;
};

class Communicator final : private Commit {
  // The threads that operations need to get on.
  struct Threads {
    std::atomic<std::thread::id> progress, watch, caller;
    bool here() const;
  };

 public:
  using Completion = sparsecomm::Completion;

  class Handle {
   public:
    // Blocks until the operation has ended; throws what it threw. Throws Error at once on a thread
    // that is needed to run it, such as the one that calls a Completion.
    void wait() const;
    void wait(Interrupt& interrupt) const;  // what it throws ends the wait; what runs goes on
    void require_waitable() const;          // only that
    bool done() const;
    // Keeps an operation that has not begun from running: every rank, also those that did not
    // cancel, gets Cancelled. False where it had begun, or was about to in case all ranks have
    // submitted it: if so it runs to its end, else it is cancelled all the same.
    bool cancel() const;

   private:
    friend class Communicator;
    std::shared_ptr<Ticket> ticket_;
    std::shared_ptr<Threads const> threads_;
  };

  // `clock`: of deadlines and figures; null: the runtime's.
  Communicator(std::unique_ptr<Transport> transport, CommunicatorOptions options,
               Clock const* clock = nullptr);
  // A forked child cannot use its parent's communicator: operations throw there, and destroying it
  // does nothing.
  ~Communicator();
  Communicator(Communicator const&) = delete;
  Communicator& operator=(Communicator const&) = delete;

  // Throws Aborted once the communicator is closed. An operation with a name runs with those of
  // that name on the other ranks, whatever else was submitted before it there; throws
  // InvalidArgument if one is pending already that has not been cancelled.
  // `priority`: which ranks must agree on; of those with a name that are ready together the highest
  // runs first, from the second time on.
  Handle submit(std::shared_ptr<Operation> operation, Completion completion = {},
                std::string name = {}, int priority = 0);
  // The same as submit(operation, {}, name, priority).wait(), but in this thread where nothing else
  // is going on. `interrupt`: what it throws breaks the operation off, or cancels it if it has not
  // begun.
  void run(std::shared_ptr<Operation> const& operation, Interrupt* interrupt = nullptr,
           std::string name = {}, int priority = 0);

  // Fails what is queued with Aborted, breaks off what runs, and ends the threads: no completion
  // runs any more. Not on a thread of its own.
  void close();
  bool closed() const;
  // Whether an operation cannot end before this thread goes on: the communicator's own threads,
  // and one that is in run().
  bool on_own_thread() const { return threads_->here(); }
  // Throws Error on such a thread: waiting there would never end.
  void require_waitable() const;

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  std::string_view transport_name() const { return transport_->name(); }
  Transport const& transport() const { return *transport_; }
  // For algorithms. A transport that connects when it is first used has none before.
  Services services() const {
    return {.native = transport_->native(), .aggregators = aggregators_.get()};
  }
  // Why these ranks cannot run the algorithm, and what to do; empty if they can.
  std::string missing(AlgorithmEntry const& entry) const;
  // Lets every rank know, with the agreement of the next operation, that this one has a request,
  // whatever ranks use that for.
  void request() { comparison_.request(); }
  // Whether any rank has had one since the last call: the same on all, if called after the same
  // operation.
  bool take_requested() { return comparison_.take_requested(); }
  // Operations of this rank belong to a step before which so many were broken off; other ranks'
  // that do not are a Mismatch, whatever their names. Not while any is pending.
  void set_steps_broken_off(std::uint64_t steps) { comparison_.set_steps_broken_off(steps); }
  std::uint64_t steps_broken_off() const { return comparison_.steps_broken_off(); }
  // Another number in each call.
  std::uint64_t draw_number() { return drawn_++; }
  Clock const& clock() const { return clock_; }
  Executor const& executor() const { return *options_.executor; }
  // As of the last completed operation; bytes to and from aggregators stand behind those of ranks.
  Counters counters() const;
  std::vector<AggregatorLoss> lost_aggregators() const {
    return aggregators_ ? aggregators_->lost() : std::vector<AggregatorLoss>{};
  }
  // Of the operation that runs, or is prepared: for its stages.
  StageObserver& timeline() { return timeline_; }
  // For an operation that runs: as of now, and before its agreement.
  Traffic traffic() const;
  Traffic traffic_before() const;
  // The figures of this transport and processor, for an operation that runs.
  Figures const& figures(Channel& channel);
  // The same for an operation that is to run; null if they have not been measured.
  Figures const* known_figures() const;
  // See CommunicatorOptions; less where a message of all ranks' contributions would be too long.
  std::size_t fusion_bytes() const {
    auto const most = std::numeric_limits<std::uint32_t>::max() / (2 * transport_->size());
    return std::min<std::size_t>(options_.fusion_bytes, most);
  }

 private:
  enum class Progress : std::uint8_t { none, exchanging, committing };
  static constexpr char const* closed_by_its_owner = "it closed its communicator";
  static constexpr char const* interrupted_by_its_caller = "its caller was interrupted";
  // While it lives, an operation is in progress.
  class InProgress;

  void progress();
  void count();
  void require_usable();
  bool has_turn() const;
  std::optional<Handle> run_here(Interrupt* interrupt);
  Turn turn(Scheduled& next, Interrupt* interrupt, bool callers);
  void discard(Scheduled& next);
  Turn execute(Scheduled& next, Interrupt* interrupt, bool callers, Operation* first);
  void alarm();
  // Returns if the operation stands; throws what it shall throw if it is rolled back.
  void commit(Channel& channel) override;
  FailureReport report_now(FailureReport::Cause cause) const;
  void require_no_alarm();
  bool committing();
  bool conclude_failure(std::exception_ptr error, bool committing, Interrupt const* interrupt);
  [[noreturn]] void throw_failure();
  void wait(Handle const& handle, Interrupt& interrupt);
  void break_off(char const* why);
  void interrupt_waits() noexcept;
  void require_own_process() const;

  std::unique_ptr<Transport> transport_;
  CommunicatorOptions options_;
  Clock const& clock_;
  pid_t owner_;
  std::unique_ptr<Interruptibles> interruptibles_;
  std::shared_ptr<JoinAggregators> joining_;  // null where there is nothing to join
  std::unique_ptr<InaClient> aggregators_;
  // Of the thread that runs an operation.
  std::unique_ptr<LinkModel> link_model_;
  FigureExchange<std::byte> round_;
  std::atomic<std::uint64_t> next_operation_ = options_.first_operation;
  std::shared_ptr<Ticket> spare_ticket_;  // of the next operation that run() hands over
  bool open_ = false;                     // ranks have agreed on what runs as next_operation_
  std::string broken_;                    // why, once the transport has failed
  std::exception_ptr failure_;  // to be thrown by the operation that failed, or else by the next

  mutable std::mutex mutex_;  // guards what follows
  std::unique_ptr<Condition> changed_ =
      std::make_unique<Condition>(options_.runtime, "an operation to run");
  bool taken_ = false;    // a thread has an operation to run and to report on
  bool running_ = false;  // it is still running
  bool closing_ = false;
  Progress progress_ = Progress::none;
  bool alarmed_ = false;              // a rank has failed
  bool reported_ = false;             // what became of the operation here
  char const* broken_off_ = nullptr;  // why, where another thread has ended what runs
  Counters counters_;
  std::unique_ptr<StallWatch> watch_;  // null where nobody is to be told
  // What is not of the thread that runs an operation guards itself.
  Comparison comparison_;
  Timeline timeline_;
  std::unique_ptr<Coordinator> coordinator_;
  std::shared_ptr<Threads> threads_ = std::make_shared<Threads>();
  std::atomic<std::uint64_t> drawn_ = 0;
  std::once_flag closed_;
  std::unique_ptr<std::thread> thread_;  // last, so that it starts when all else is ready
};

// Agreement::commit(): a dissemination barrier.
Cost commit_cost(int ranks);

}  // namespace sparsecomm
