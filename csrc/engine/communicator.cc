#include "engine/communicator.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <tuple>

#include "engine/verdict.h"

namespace sparsecomm {
namespace {

enum class Intent : std::uint32_t { go = 0, failed = 1, cancelled = 2 };

struct Fingerprint {
  std::uint64_t hash;
  std::uint64_t entries;
  std::uint64_t former_entries;
  double former_seconds;
  std::uint32_t finite;
  Intent intent;
};

constexpr std::size_t max_proposal_bytes = 4096;
constexpr char const* closed_by_its_owner = "it closed its communicator";

std::uint64_t fnv1a(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (char const c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

std::map<std::string, std::string> fields_of(std::string_view text) {
  std::map<std::string, std::string> fields;
  while (!text.empty()) {
    std::string_view const field = text.substr(0, text.find(';'));
    std::size_t const equals = std::min(field.find('='), field.size());
    fields.emplace(field.substr(0, equals), field.substr(std::min(equals + 1, field.size())));
    text.remove_prefix(std::min(field.size() + 1, text.size()));
  }
  return fields;
}

// "numel: 10 on ranks 0, 1 but 12 on rank 2; dtype: ...", each field that differs.
std::string differences(std::span<const std::string> texts) {
  std::map<std::string, std::map<std::string, std::vector<int>>>
      ranks_with;  // field -> value -> ranks
  std::vector<std::map<std::string, std::string>> proposals;
  for (std::string const& text : texts) {
    for (auto const& field : proposals.emplace_back(fields_of(text))) ranks_with[field.first];
  }
  std::string message;
  for (auto& [field, values] : ranks_with) {
    for (int rank = 0; rank < static_cast<int>(proposals.size()); ++rank) {
      auto const found = proposals[rank].find(field);
      values[found == proposals[rank].end() ? "nothing" : found->second].push_back(rank);
    }
    if (values.size() < 2) continue;
    message += concat(message.empty() ? "" : "; ", field, ":");
    char const* separator = " ";
    for (auto const& [value, ranks] : values) {
      message += concat(separator, value, " on ", join_ranks(ranks));
      separator = " but ";
    }
  }
  return message;
}

std::string what(std::exception_ptr const& error) {
  try {
    std::rethrow_exception(error);
  } catch (std::exception const& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

FailureReport report_of(std::exception_ptr const& error, std::uint64_t operation,
                        Counters const& counters) {
  using Cause = FailureReport::Cause;
  auto const report = [&](Cause cause, std::vector<int> suspects) {
    return FailureReport{operation,
                         cause,
                         std::move(suspects),
                         what(error),
                         counters.sent_messages,
                         counters.received_messages};
  };
  try {
    std::rethrow_exception(error);
  } catch (PeerInvalid const& invalid) {
    return report(Cause::invalid, invalid.ranks());
  } catch (Timeout const& timeout) {
    return report(Cause::timeout, timeout.ranks());
  } catch (Interrupted const& interrupted) {
    return report(Cause::interrupted, interrupted.ranks());
  } catch (PeerError const& lost) {
    return report(Cause::lost, lost.ranks());
  } catch (...) {
    return report(Cause::own, {});
  }
}

}  // namespace

struct Communicator::Handle::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool begun = false;
  bool cancelled = false;
  bool done = false;
  std::exception_ptr error;

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
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done; });
  if (state_->error) std::rethrow_exception(state_->error);
}

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
                           Clock const& clock)
    : transport_(std::move(transport)),
      options_(std::move(options)),
      clock_(clock),
      owner_(::getpid()),
      intents_(transport_->size()),
      counters_(transport_->size()),
      watch_(options_.stall.log && transport_->size() > 1
                 ? std::make_unique<StallWatch>(*transport_, options_.stall, options_.timeout)
                 : nullptr),
      thread_([this] { progress(); }) {}

Communicator::~Communicator() {
  if (owner_ != ::getpid()) {
    // Neither the progress thread nor the engine's were copied, but what they hold was, as they
    // held it: it can only be left alone.
    std::ignore = transport_.release();
    std::ignore = changed_.release();
    std::ignore = watch_.release();
    thread_.detach();
    return;
  }
  if (watch_) watch_->stop();
  bool busy = false;
  {
    std::lock_guard const lock(mutex_);
    closing_ = true;
    busy = running_ || !queue_.empty();
  }
  changed_->notify_all();
  if (busy) {
    // Before the connections close, so that peers know why.
    transport_->post_failure({next_operation_, FailureReport::Cause::own, {}, closed_by_its_owner});
    transport_->abort();
  }
  thread_.join();
  watch_.reset();
  transport_.reset();  // before the buffers that its requests may still point to
}

bool Communicator::on_own_thread() const {
  auto const here = std::this_thread::get_id();
  return here == thread_.get_id() || (watch_ && here == watch_->thread());
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
  handle.state_ = std::make_shared<Handle::State>();
  {
    std::lock_guard const lock(mutex_);
    queue_.push_back({std::move(operation), handle.state_, std::move(completion)});
  }
  changed_->notify_all();
  return handle;
}

void Communicator::run(std::shared_ptr<Operation> const& operation) {
  require_own_process();
  {
    std::unique_lock lock(mutex_);
    if (closing_ || taken_ || !queue_.empty()) {
      lock.unlock();
      submit(operation).wait();
      return;
    }
    taken_ = running_ = true;
  }
  std::exception_ptr error;
  try {
    execute(*operation, false);
  } catch (...) {
    error = std::current_exception();
  }
  bool awaited = false;
  {
    std::lock_guard const lock(mutex_);
    counters_ = transport_->counters();
    taken_ = running_ = false;
    awaited = closing_ || !queue_.empty();
  }
  if (awaited) changed_->notify_all();
  if (error) std::rethrow_exception(error);
}

Counters Communicator::counters() const {
  std::lock_guard const lock(mutex_);
  return counters_;
}

Figures const& Communicator::figures(Channel& channel) {
  if (!options_.figures) {
    TimePoint const start = clock_.now();
    Channel measuring(*transport_, channel.operation(),
                      Deadline(clock_, options_.timeout + calibration_allowance));
    options_.figures = calibrate(measuring, clock_, probes_);
    probes_ = {};
    channel.postpone(clock_.now() - start);
  }
  return *options_.figures;
}

void Calibration::run(Channel& channel, Agreement const& /*agreement*/) {
  figures_ = communicator_.figures(channel);
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
      require<Aborted>(!closing, "the communicator was closed before this operation ran");
      execute(*item.operation, item.state->begin());
    } catch (...) {
      error = std::current_exception();
    }
    {
      std::lock_guard const lock(mutex_);
      counters_ = transport_->counters();
      running_ = false;
    }
    try {
      if (item.completion) item.completion(error);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
    item.state->end(error);
    std::lock_guard const lock(mutex_);
    taken_ = false;
  }
}

void Communicator::execute(Operation& operation, bool cancelled) {
  require<Aborted>(broken_.empty(), "an earlier operation failed (", broken_,
                   "); destroy this communicator and make a new one with the ranks that are left");
  ObservedStage const whole(operation.observer(), Stage::whole);
  ++next_operation_;
  Channel channel(*transport_, static_cast<std::uint32_t>(next_operation_),
                  Deadline(clock_, options_.timeout));
  StallWatch::Operation const watched(watch_.get(), next_operation_);
  try {
    Agreement const agreement = agree(channel, operation, cancelled);
    operation.run(channel, agreement);
  } catch (Mismatch const&) {
    operation.roll_back();
    throw;
  } catch (Cancelled const&) {
    operation.roll_back();
    throw;
  } catch (...) {
    operation.roll_back();
    fail(std::current_exception());
  }
}

// Throws the same Mismatch or Cancelled on every rank where proposals differ, one could not be made
// or a rank cancelled. The proposals themselves travel only then.
Agreement Communicator::agree(Channel& channel, Operation& operation, bool cancelled) {
  Proposal proposal;
  Intent intent = Intent::go;
  try {
    if (cancelled) {
      intent = Intent::cancelled;
    } else {
      proposal = operation.prepare();
    }
  } catch (...) {
    intent = Intent::failed;
    proposal.text = what(std::current_exception());
  }
  if (watch_) watch_->propose(proposal.text);
  ObservedStage const agreeing(operation.observer(), Stage::agree);
  Fingerprint const own{fnv1a(proposal.text),    proposal.entries, proposal.former_entries,
                        proposal.former_seconds, proposal.finite,  intent};
  proposal.text.resize(std::min(proposal.text.size(), max_proposal_bytes));

  auto const allgather = [&](Phase phase, std::span<const std::byte> payload,
                             std::size_t capacity) {
    frame_.resize(header_bytes + max_proposal_bytes);
    std::size_t const length = encode_bytes(channel.operation(), payload, frame_);
    return gather_.run(channel, phase, std::span(frame_).first(length), header_bytes + capacity);
  };
  auto const frames = allgather(Phase::agree, std::as_bytes(std::span(&own, 1)), sizeof own);
  Agreement agreement;
  bool agreed = true;
  for (int rank = 0; rank < channel.size(); ++rank) {
    Fingerprint other{};
    channel.decode_from(rank, [&] {
      require<MalformedFrame>(frames[rank].values.size() == sizeof other, "a fingerprint of ",
                              frames[rank].values.size(), " bytes");
      std::memcpy(&other, frames[rank].values.data(), sizeof other);
      require<MalformedFrame>(other.intent <= Intent::cancelled, "an intent of ",
                              static_cast<std::uint32_t>(other.intent));
      require<MalformedFrame>(std::isfinite(other.former_seconds) && other.former_seconds >= 0,
                              "a former time of ", other.former_seconds, " s");
      std::uint64_t const entries = std::max(other.entries, other.former_entries);
      require<MalformedFrame>(other.hash != own.hash || entries <= proposal.extent,
                              "a contribution of ", entries, " entries to a vector of ",
                              proposal.extent);
    });
    agreed = agreed && other.hash == own.hash && other.intent == Intent::go;
    agreement.all_finite = agreement.all_finite && other.finite != 0;
    agreement.most_entries = std::max(agreement.most_entries, other.entries);
    agreement.total_entries += other.entries;
    agreement.former_seconds = std::max(agreement.former_seconds, other.former_seconds);
    agreement.former_entries = std::max(agreement.former_entries, other.former_entries);
    intents_[rank] = static_cast<std::uint32_t>(other.intent);
  }
  if (agreed) return agreement;

  auto const explained =
      allgather(Phase::explain, std::as_bytes(std::span(proposal.text)), max_proposal_bytes);
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
  if (message.empty()) message = concat("ranks disagree: ", differences(texts));
  throw Mismatch(message);
}

void Communicator::fail(std::exception_ptr error) {
  if (watch_) watch_->stop();  // before the others' silence becomes an error
  {
    std::lock_guard const lock(mutex_);
    if (closing_) error = std::make_exception_ptr(Aborted(closed_by_its_owner));
  }
  FailureReport const own = report_of(error, next_operation_, transport_->counters());
  transport_->post_failure(own);
  transport_->abort();
  Deadline const grace(clock_, options_.failure_grace);
  Verdict verdict;
  for (;;) {
    auto reports = transport_->failures();
    if (!reports[rank()]) reports[rank()] = own;  // the board may be gone
    verdict = conclude(reports);
    if (settled(reports) || grace.passed()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  broken_ = concat("operation ", next_operation_, " on rank ", rank(), ": ", verdict.text);
  if (own.cause == FailureReport::Cause::own) std::rethrow_exception(error);
  if (verdict.timed_out) {
    throw Timeout(
        concat(verdict.text, " (", std::chrono::duration<double>(options_.timeout).count(), " s); ",
               "this rank saw: ", what(error)),
        verdict.culprits);
  }
  throw PeerLost(concat(verdict.text, "; this rank saw: ", what(error)), verdict.culprits);
}

Cost agreement_cost(int ranks) { return allgather_cost(ranks, header_bytes + sizeof(Fingerprint)); }

}  // namespace sparsecomm
