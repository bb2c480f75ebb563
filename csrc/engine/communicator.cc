#include "engine/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <tuple>

#include "engine/join_aggregators.h"
#include "engine/link_model.h"
#include "engine/mismatch.h"

namespace sparsecomm {
namespace {

enum class Intent : std::uint32_t { go = 0, failed = 1, cancelled = 2 };

// A proposal on the wire; the payload follows.
struct Fingerprint {
  std::uint64_t key;
  std::uint64_t changing;
  std::uint16_t finite;
  std::uint16_t requests;
  Intent intent;
};
static_assert(sizeof(Fingerprint) == 24);

constexpr std::size_t max_proposal_bytes = 4096;
constexpr char const* waits_for_itself =
    "a blocking call on a thread that the communicator needs to get on: a callback of one of its "
    "operations, or the handler of a log message or of a signal, would wait for itself; start the "
    "operation with async_op=True and wait for it on another thread, or after the handler";

}  // namespace

struct Communicator::Handle::State {
  explicit State(Runtime its_runtime)
      : runtime(its_runtime), changed(its_runtime, "the end of an operation") {}

  Runtime const runtime;
  std::mutex mutex;
  Condition changed;
  bool begun = false;
  bool cancelled = false;
  bool done = false;
  std::exception_ptr error;
  std::shared_ptr<Threads const> threads;

  // Whether it was cancelled before.
  bool begin() {
    std::lock_guard const lock(mutex);
    begun = true;
    return cancelled;
  }
  void end(std::exception_ptr const& result) {
    {
      std::lock_guard const lock(mutex);
      error = result;
      done = true;
    }
    changed.notify_all();
  }
};

void Communicator::Handle::wait() const {
  require_waitable();
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done; });
  if (state_->error) std::rethrow_exception(state_->error);
}

void Communicator::Handle::wait(Interrupt& interrupt) const {
  require_waitable();
  std::unique_lock lock(state_->mutex);
  while (!state_->changed.wait_for(lock, Interrupt::period, [&] { return state_->done; })) {
    lock.unlock();
    interrupt.poll(state_->runtime.clock().now());
    lock.lock();
  }
  if (state_->error) std::rethrow_exception(state_->error);
}

void Communicator::Handle::require_waitable() const {
  require<Error>(done() || !state_->threads->here(), waits_for_itself);
}

void Communicator::require_waitable() const { require<Error>(!on_own_thread(), waits_for_itself); }

bool Communicator::Handle::done() const {
  std::lock_guard const lock(state_->mutex);
  return state_->done;
}

bool Communicator::Handle::cancel() const {
  std::lock_guard const lock(state_->mutex);
  if (state_->begun) return false;
  state_->cancelled = true;
  return true;
}

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
      intents_(transport_->size()),
      counters_(transport_->size() + 1),  // count() appends without allocating
      watch_(options_.stall.log && transport_->size() > 1
                 ? std::make_unique<StallWatch>(*transport_, options_.stall, options_.timeout,
                                                options_.runtime)
                 : nullptr) {
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
      busy = running_ || !queue_.empty();
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
                                          Completion completion) {
  require_own_process();
  Handle handle;
  handle.state_ = std::make_shared<Handle::State>(options_.runtime);
  handle.state_->threads = threads_;
  {
    std::lock_guard const lock(mutex_);
    require<Aborted>(!closing_, "this communicator is closed; make a new one");
    queue_.push_back({std::move(operation), handle.state_, std::move(completion)});
  }
  changed_->notify_all();
  return handle;
}

void Communicator::run(std::shared_ptr<Operation> const& operation, Interrupt* interrupt) {
  require_own_process();
  require_waitable();
  // The transport polls the interrupt as it waits; services need not.
  bool here = interrupt == nullptr || (transport_->interruptible() && interruptibles_->empty());
  if (here) {
    std::lock_guard const lock(mutex_);
    here = !closing_ && !taken_ && queue_.empty();
    if (here) taken_ = running_ = true;
  }
  if (!here) {
    Handle const handle = submit(operation);
    interrupt != nullptr ? wait(handle, *interrupt) : handle.wait();
    return;
  }
  threads_->caller = std::this_thread::get_id();
  std::exception_ptr error;
  try {
    execute(*operation, false, interrupt);
  } catch (...) {
    error = std::current_exception();
  }
  threads_->caller = std::thread::id();
  bool awaited = false;
  {
    std::lock_guard const lock(mutex_);
    count();
    taken_ = running_ = false;
    awaited = closing_ || !queue_.empty();
  }
  if (awaited) changed_->notify_all();
  if (error) std::rethrow_exception(error);
}

// Like the handle's, but ends what it waits for if the caller is interrupted.
void Communicator::wait(Handle const& handle, Interrupt& interrupt) {
  try {
    handle.wait(interrupt);
  } catch (...) {
    if (!interrupt.raised()) throw;
    if (!handle.cancel() && !handle.done()) break_off(interrupted_by_its_caller);
    auto& state = *handle.state_;
    std::unique_lock lock(state.mutex);
    // What has begun uses the caller's memory.
    state.changed.wait(lock, [&] { return state.done || state.cancelled; });
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

Traffic Communicator::traffic() const {
  Traffic traffic = Traffic::of(transport_->counters());
  if (!aggregators_) return traffic;
  traffic.sent_bytes += aggregators_->sent_bytes();
  traffic.received_bytes += aggregators_->received_bytes();
  return traffic;
}

void Communicator::progress() {
  for (;;) {
    Item item;
    bool closing = false;
    {
      std::unique_lock lock(mutex_);
      changed_->wait(lock, [&] { return !taken_ && (closing_ || !queue_.empty()); });
      if (queue_.empty()) return;
      item = std::move(queue_.front());
      queue_.pop_front();
      taken_ = running_ = true;
      closing = closing_;
    }
    std::exception_ptr error;
    try {
      if (closing) item.operation->roll_back();
      require<Aborted>(!closing, "the communicator was closed before this operation ran");
      execute(*item.operation, item.state->begin());
    } catch (...) {
      error = std::current_exception();
    }
    {
      std::lock_guard const lock(mutex_);
      count();
      running_ = false;
    }
    try {
      if (item.completion) item.completion(error);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
    // What these hold may be Python's, and a program may end once it is told.
    item.operation.reset();
    item.completion = nullptr;
    item.state->end(error);
    std::lock_guard const lock(mutex_);
    taken_ = false;
  }
}

class Communicator::InProgress {
 public:
  explicit InProgress(Communicator& communicator) : communicator_(communicator) {
    std::lock_guard const lock(communicator_.mutex_);
    ++communicator_.next_operation_;
    communicator_.progress_ = Progress::exchanging;
  }
  ~InProgress() {
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

// A rank whose operation comes to nothing before it has begun joins all the same: others wait.
void Communicator::execute(Operation& operation, bool cancelled, Interrupt* interrupt) {
  if (joining_ && joining_->due(*aggregators_)) {
    try {
      execute_one(*joining_, false, interrupt);
    } catch (...) {
      operation.roll_back();
      throw;
    }
  }
  execute_one(operation, cancelled, interrupt);
}

void Communicator::execute_one(Operation& operation, bool cancelled, Interrupt* interrupt) {
  if (failure_ || !broken_.empty()) operation.roll_back();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  require<Aborted>(broken_.empty(), "an earlier operation failed (", broken_,
                   "); go on from a checkpoint, or destroy this communicator, hook state or "
                   "optimizer and make a new one on a process group of the ranks that are left");
  ObservedStage const whole(operation.observer(), Stage::whole);
  InProgress const in_progress(*this);
  Channel channel(*transport_, static_cast<std::uint32_t>(next_operation_),
                  Deadline(clock_, options_.timeout, interrupt));
  StallWatch::Operation const watched(watch_.get(), next_operation_);
  try {
    require_no_alarm();
    Agreement agreement = agree(channel, cancelled ? nullptr : &operation);
    if (operation.commits()) agreement.committer = this;
    operation.run(channel, agreement);
    require<Error>(!operation.commits() || committing(), "an operation ended without commit()");
  } catch (Mismatch const&) {
    operation.roll_back();
    throw;
  } catch (AggregatorsUnavailable const&) {
    operation.roll_back();
    throw;
  } catch (Cancelled const&) {
    operation.roll_back();
    throw;
  } catch (...) {
    // What failed after commit() stands on the others.
    bool const committed = committing();
    if (!committed) operation.roll_back();
    if (!broken_.empty()) throw;  // concluded by commit()
    bool const stands = conclude_failure(std::current_exception(), committed, interrupt);
    if (committed && !stands) operation.roll_back();
    throw_failure();
  }
}

// Throws the same Mismatch or Cancelled on every rank where proposals differ, one could not be made
// or a rank cancelled, which has a null operation. The proposals themselves travel only then.
Agreement Communicator::agree(Channel& channel, Operation* operation) {
  Proposal proposal;
  std::string explanation;
  Intent intent = Intent::go;
  try {
    if (operation == nullptr) {
      intent = Intent::cancelled;
    } else {
      Proposal const prepared = operation->prepare();
      require<Error>(prepared.payload.size() <= max_payload_bytes, "a payload of ",
                     prepared.payload.size(), " bytes; there is room for ", max_payload_bytes);
      proposal = prepared;
    }
  } catch (...) {
    intent = Intent::failed;
    explanation = what_of(std::current_exception());
  }
  if (watch_) watch_->propose(proposal.text, proposal.step);
  ObservedStage const agreeing(operation ? operation->observer() : nullptr, Stage::agree);
  Fingerprint const own{.key = proposal.key,
                        .changing = proposal.changing,
                        .finite = proposal.finite,
                        .requests = requests_.exchange(false),
                        .intent = intent};

  auto const allgather = [&](Phase phase, std::span<const std::byte> payload,
                             std::size_t capacity) {
    frame_.resize(header_bytes + max_proposal_bytes);
    std::size_t const length = encode_bytes(channel.stamp(), payload, frame_);
    return gather_.run(channel, phase, std::span(frame_).first(length), header_bytes + capacity);
  };
  std::array<std::byte, sizeof own + max_payload_bytes> fingerprint{};
  std::memcpy(fingerprint.data(), &own, sizeof own);
  std::ranges::copy(proposal.payload, fingerprint.begin() + sizeof own);
  auto const frames =
      allgather(Phase::agree, std::span(fingerprint).first(sizeof own + proposal.payload.size()),
                fingerprint.size());
  auto const payload = std::span(payload_).first(proposal.payload.size());
  std::ranges::fill(payload, std::byte{0});
  Agreement agreement{.payload = payload};
  bool agreed = true;
  bool requested = false;
  for (int rank = 0; rank < channel.size(); ++rank) {
    Fingerprint other{};
    channel.decode_from(rank, [&] {
      auto const bytes = frames[rank].values;
      require<MalformedFrame>(bytes.size() >= sizeof other && bytes.size() <= fingerprint.size(),
                              "a fingerprint of ", bytes.size(), " bytes");
      std::memcpy(&other, bytes.data(), sizeof other);
      require<MalformedFrame>(other.intent <= Intent::cancelled, "an intent of ",
                              static_cast<std::uint32_t>(other.intent));
      bool same = intent == Intent::go && other.intent == Intent::go && other.key == own.key;
      if (same) {
        auto const arrived = bytes.subspan(sizeof other);
        require<MalformedFrame>(arrived.size() == payload.size(), "a payload of ", arrived.size(),
                                " bytes instead of ", payload.size());
        same = operation->merge(payload, arrived);
      }
      agreed = agreed && same && other.changing == own.changing;
    });
    agreement.all_finite = agreement.all_finite && other.finite != 0;
    requested = requested || other.requests != 0;
    intents_[rank] = static_cast<std::uint32_t>(other.intent);
  }
  if (requested) requested_ = true;
  if (agreed) return agreement;

  if (intent == Intent::go) {
    explanation = shorten_values(concat(proposal.text, operation->changing_fields(payload)));
  }
  explanation.resize(std::min(explanation.size(), max_proposal_bytes));
  auto const explained =
      allgather(Phase::explain, std::as_bytes(std::span(explanation)), max_proposal_bytes);
  std::vector<std::string> texts;
  std::vector<int> cancellers;
  std::string message;
  for (int rank = 0; rank < channel.size(); ++rank) {
    auto const bytes = explained[rank].values;
    std::string const text(reinterpret_cast<char const*>(bytes.data()), bytes.size());
    switch (static_cast<Intent>(intents_[rank])) {
      case Intent::go:
        texts.push_back(text);
        break;
      case Intent::failed:
        message += concat(message.empty() ? "" : "; ", "rank ", rank,
                          " failed before the exchange: ", text);
        break;
      case Intent::cancelled:
        cancellers.push_back(rank);
        break;
    }
  }
  if (message.empty() && !cancellers.empty()) {
    throw Cancelled(concat("the operation was cancelled on ", join_ranks(cancellers)));
  }
  if (message.empty()) {
    message = concat("ranks disagree: ", differences(texts),
                     "; give every rank the same, in the same order of calls");
  }
  throw Mismatch(message);
}

Cost agreement_cost(int ranks, std::size_t payload_bytes) {
  return allgather_cost(ranks, header_bytes + sizeof(Fingerprint) + payload_bytes);
}

}  // namespace sparsecomm
