#include "engine/communicator.h"

#include <unistd.h>

#include <tuple>

#include "engine/join_aggregators.h"
#include "engine/link_model.h"

namespace sparsecomm {
namespace {

constexpr char const* waits_for_itself =
    "a blocking call on a thread that the communicator needs to get on: a callback of one of its "
    "operations, or the handler of a log message or of a signal, would wait for itself; start the "
    "operation with async_op=True and wait for it on another thread, or after the handler";

}  // namespace

void Communicator::Handle::wait() const {
  require_waitable();
  ticket_->wait();
}

void Communicator::Handle::wait(Interrupt& interrupt) const {
  require_waitable();
  ticket_->wait(interrupt);
}

void Communicator::Handle::require_waitable() const {
  require<Error>(done() || !threads_->here(), waits_for_itself);
}

void Communicator::require_waitable() const { require<Error>(!on_own_thread(), waits_for_itself); }

bool Communicator::Handle::done() const { return ticket_->done(); }

bool Communicator::Handle::cancel() const { return ticket_->cancel(); }

Communicator::Communicator(std::unique_ptr<Transport> transport, CommunicatorOptions options,
                           Clock const* clock)
    : transport_(std::move(transport)),
      options_(std::move(options)),
      clock_(clock != nullptr ? *clock : options_.runtime.clock()),
      owner_(::getpid()),
      interruptibles_(std::make_unique<Interruptibles>(std::move(options_.interruptibles))),
      joining_(make_joining(options_, transport_->size())),
      aggregators_(make_client(options_, *transport_, *interruptibles_)),
      link_model_(std::make_unique<LinkModel>(clock_, options_.timeout, options_.figures)),
      counters_(transport_->size() + 1),  // count() appends without allocating
      watch_(options_.stall.log && transport_->size() > 1
                 ? std::make_unique<StallWatch>(*transport_, options_.stall, options_.timeout,
                                                options_.runtime)
                 : nullptr),
      comparison_(transport_->size(), watch_.get()),
      timeline_(options_.timeline, transport_->rank(), clock_),
      coordinator_(make_coordinator(comparison_, {.capacity = options_.cached_names,
                                                  .timeout = options_.timeout,
                                                  .fusion_bytes = fusion_bytes(),
                                                  .timeline = timeline_,
                                                  .runtime = options_.runtime})) {
  if (watch_) threads_->watch = watch_->thread();
  try {
    if (size() > 1) transport_->board().on_failure([this] { alarm(); });
    thread_ =
        std::make_unique<std::thread>(options_.runtime.start("progress", [this] { progress(); }));
  } catch (...) {
    transport_->board().on_failure({});
    throw;
  }
  threads_->progress = thread_->get_id();
}

Communicator::~Communicator() {
  if (owner_ != ::getpid()) {
    // Neither the progress thread nor the engine's were copied, but what they hold was, as they
    // held it: it can only be left alone.
    std::ignore = transport_.release();
    std::ignore = changed_.release();
    std::ignore = coordinator_.release();
    std::ignore = watch_.release();
    std::ignore = interruptibles_.release();
    std::ignore = aggregators_.release();
    std::ignore = thread_.release();
    return;
  }
  close();
  watch_.reset();
  transport_.reset();  // before the buffers that its requests may still point to
}

void Communicator::close() {
  if (owner_ != ::getpid()) return;
  std::call_once(closed_, [this] {
    if (watch_) watch_->stop();
    transport_->board().on_failure({});
    bool busy = false;
    {
      std::lock_guard const lock(mutex_);
      closing_ = true;
      busy = running_ || has_turn();
    }
    changed_->notify_all();
    if (busy) break_off(closed_by_its_owner);
    options_.runtime.join(*thread_);
    if (watch_) watch_->join();
  });
}

bool Communicator::closed() const {
  if (owner_ != ::getpid()) return false;  // operations say what is wrong
  std::lock_guard const lock(mutex_);
  return closing_;
}

bool Communicator::Threads::here() const {
  auto const id = std::this_thread::get_id();
  return id == progress || id == watch || id == caller;
}

void Communicator::require_own_process() const {
  require<Error>(owner_ == ::getpid(), "this communicator was made by process ", owner_,
                 ", and process ", ::getpid(),
                 " is a fork of it; make communicators in the process that uses them");
}

Communicator::Handle Communicator::submit(std::shared_ptr<Operation> operation,
                                          Completion completion, std::string name, int priority) {
  require_own_process();
  Handle handle;
  handle.ticket_ = std::make_shared<Ticket>(options_.runtime);
  handle.threads_ = threads_;
  bool idles = false;
  {
    std::lock_guard const lock(mutex_);
    require<Aborted>(!closing_, "this communicator is closed; make a new one");
    idles = coordinator_->add({.operation = std::move(operation),
                               .ticket = handle.ticket_,
                               .completion = std::move(completion),
                               .name = std::move(name),
                               .priority = priority,
                               .submitted = timeline_.submitted()});
  }
  changed_->notify_all();
  if (idles) transport_->wake();
  return handle;
}

void Communicator::run(std::shared_ptr<Operation> const& operation, Interrupt* interrupt,
                       std::string name, int priority) {
  require_own_process();
  require_waitable();
  // The transport polls the interrupt as it waits; services need not.
  bool here = interrupt == nullptr || (transport_->interruptible() && interruptibles_->empty());
  if (here) {
    std::lock_guard const lock(mutex_);
    here = !closing_ && !taken_ && !has_turn();
    if (here) {
      if (!spare_ticket_) spare_ticket_ = std::make_shared<Ticket>(options_.runtime);
      coordinator_->add({.operation = operation,
                         .name = name,
                         .priority = priority,
                         .submitted = timeline_.submitted()});
      taken_ = running_ = true;
    }
  }
  std::optional<Handle> handle;  // of an operation that another thread is to run
  if (!here) {
    handle = submit(operation, {}, std::move(name), priority);
  } else {
    handle = run_here(interrupt);
  }
  if (handle) interrupt != nullptr ? wait(*handle, *interrupt) : handle->wait();
}

// Has the turn, and what the coordinator holds but for what others have added since has no ticket.
std::optional<Communicator::Handle> Communicator::run_here(Interrupt* interrupt) {
  threads_->caller = std::this_thread::get_id();
  std::exception_ptr error;
  std::optional<Handle> handle;
  Scheduled mine;
  try {
    if (turn(mine, interrupt, true) != Turn::taken) {
      handle.emplace();
      handle->ticket_ = std::exchange(spare_ticket_, nullptr);
      handle->threads_ = threads_;
      coordinator_->add_ticket(handle->ticket_);
    }
  } catch (...) {
    error = std::current_exception();
  }
  threads_->caller = std::thread::id();
  bool awaited = false;
  {
    std::lock_guard const lock(mutex_);
    count();
    taken_ = running_ = false;
    awaited = closing_ || has_turn();
  }
  if (awaited) changed_->notify_all();
  if (error) std::rethrow_exception(error);
  return handle;
}

// Like the handle's, but ends what it waits for if the caller is interrupted.
void Communicator::wait(Handle const& handle, Interrupt& interrupt) {
  try {
    handle.wait(interrupt);
  } catch (...) {
    if (!interrupt.raised()) throw;
    if (!handle.cancel() && !handle.done()) break_off(interrupted_by_its_caller);
    handle.ticket_->wait_until_unused();
    throw;
  }
}

std::string Communicator::missing(AlgorithmEntry const& entry) const {
  if (size() == 1) return {};
  std::string const why = services().missing(entry.needs, transport_name());
  return why.empty() ? why : concat("algorithm '", entry.name, "' cannot run here: ", why);
}

Counters Communicator::counters() const {
  std::lock_guard const lock(mutex_);
  return counters_;
}

// After an operation, with the lock held.
void Communicator::count() {
  counters_ = transport_->counters();
  if (!aggregators_) return;
  counters_.sent_bytes.push_back(aggregators_->sent_bytes());
  counters_.received_bytes.push_back(aggregators_->received_bytes());
}

Figures const& Communicator::figures(Channel& channel) {
  return link_model_->figures(channel, services());
}

Figures const* Communicator::known_figures() const { return link_model_->known(); }

Traffic Communicator::traffic_before() const {
  std::lock_guard const lock(mutex_);
  return Traffic::of(counters_);
}

Traffic Communicator::traffic() const {
  Traffic traffic = Traffic::of(transport_->counters());
  if (!aggregators_) return traffic;
  traffic.sent_bytes += aggregators_->sent_bytes();
  traffic.received_bytes += aggregators_->received_bytes();
  return traffic;
}

// Whether there is anything to do for a thread that takes the turn; with the lock held.
bool Communicator::has_turn() const {
  return !coordinator_->empty() || (coordinator_->listens() && broken_.empty());
}

void Communicator::progress() {
  for (;;) {
    bool closing = false;
    {
      std::unique_lock lock(mutex_);
      changed_->wait(lock, [&] { return !taken_ && (closing_ || has_turn()); });
      if (closing_ && coordinator_->empty()) return;
      taken_ = running_ = true;
      closing = closing_;
    }
    Scheduled next;
    std::exception_ptr error;
    try {
      if (closing) discard(next);
      require<Aborted>(!closing, "the communicator was closed before this operation ran");
      turn(next, nullptr, false);
    } catch (...) {
      error = std::current_exception();
      // Nobody hears of it from a stand-in, but from the Join that is behind it.
      if (next.pending.stands_in && !broken_.empty()) failure_ = error;
    }
    {
      std::lock_guard const lock(mutex_);
      count();
      running_ = false;
    }
    Pending& pending = next.pending;
    if (pending.completion) keep_first_error(error, [&] { pending.completion(error); });
    // What these hold may be Python's, and a program may end once it is told.
    pending.operation.reset();
    pending.completion = nullptr;
    if (pending.ticket) pending.ticket->end(error);
    std::lock_guard const lock(mutex_);
    taken_ = false;
  }
}

class Communicator::InProgress {
 public:
  // Goes on with one that was left open.
  explicit InProgress(Communicator& communicator) : communicator_(communicator) {
    std::lock_guard const lock(communicator_.mutex_);
    if (std::exchange(communicator_.open_, false)) return;
    ++communicator_.next_operation_;
    communicator_.progress_ = Progress::exchanging;
  }
  ~InProgress() {
    if (communicator_.open_) return;
    FailureReport idle;
    {
      std::lock_guard const lock(communicator_.mutex_);
      communicator_.progress_ = Progress::none;
      if (!communicator_.alarmed_ || std::exchange(communicator_.reported_, true)) return;
      idle = communicator_.report_now(FailureReport::Cause::interrupted);
    }
    communicator_.transport_->board().post_failure(idle);
  }
  InProgress(InProgress const&) = delete;
  InProgress& operator=(InProgress const&) = delete;

 private:
  Communicator& communicator_;
};

void Communicator::require_usable() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  require<Aborted>(broken_.empty(), "an earlier operation failed (", broken_,
                   "); go on from a checkpoint, or destroy this communicator, hook state or "
                   "optimizer and make a new one on a process group of the ranks that are left");
}

// Takes what is next, if anything is, which will not run, and rolls it back.
void Communicator::discard(Scheduled& next) {
  if (!next.pending.operation && !coordinator_->empty()) next.pending = coordinator_->take();
  if (next.pending.operation) next.pending.operation->roll_back();
}

// Runs what is next, and throws what becomes of it, after taking it in any case. A rank whose
// operation comes to nothing before it has begun joins the aggregators all the same: others wait.
Turn Communicator::turn(Scheduled& next, Interrupt* interrupt, bool callers) {
  Operation* first = nullptr;
  try {
    require_usable();
    if (joining_ && !open_ && joining_->due(*aggregators_)) first = joining_.get();
  } catch (...) {
    discard(next);
    throw;
  }
  return execute(next, interrupt, callers, first);
}

// Runs what the coordinator hands over; see Coordinator::round().
Turn Communicator::execute(Scheduled& next, Interrupt* interrupt, bool callers, Operation* first) {
  struct EndOfTurn {
    Communicator& communicator;
    Scheduled& scheduled;
    bool failed = true;
    Traffic before = {};
    ~EndOfTurn() {
      Timeline& timeline = communicator.timeline_;
      if (timeline.runs()) timeline.end_run(failed, before, communicator.traffic());
      scheduled.whole.end();
    }
  } end_of_turn{*this, next};
  InProgress const in_progress(*this);
  Channel channel(*transport_, static_cast<std::uint32_t>(next_operation_),
                  Deadline(clock_, options_.timeout, interrupt));
  StallWatch::Operation const watched(watch_.get(), next_operation_);
  try {
    require_no_alarm();
    Turn const taken = coordinator_->round(channel, next, callers, first);
    open_ = taken == Turn::others;
    if (taken != Turn::taken) return taken;
    if (timeline_.runs()) end_of_turn.before = traffic();
    if (next.error) std::rethrow_exception(next.error);
    bool const commits = next.agreement.ends_batch && size() > 1;
    if (commits) next.agreement.committer = this;
    next.pending.operation->run(channel, next.agreement);
    require<Error>(!commits || committing(), "an operation ended without commit()");
    end_of_turn.failed = false;
    return taken;
  } catch (AgreedError const&) {
    discard(next);
    throw;
  } catch (...) {
    // What failed after commit() stands on the others.
    bool const committed = committing();
    if (!committed) discard(next);
    if (!broken_.empty()) throw;  // concluded by commit()
    bool const stands = conclude_failure(std::current_exception(), committed, interrupt);
    if (committed && !stands) discard(next);
    // Without an operation that has failed here the next one throws it.
    if (!next.pending.operation) return Turn::nothing;
    throw_failure();
  }
}

}  // namespace sparsecomm
