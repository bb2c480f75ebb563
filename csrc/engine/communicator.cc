#include "engine/communicator.h"

#include <cstring>
#include <functional>
#include <map>

#include "engine/verdict.h"

namespace sparsecomm {
namespace {

struct Fingerprint {
  std::uint64_t hash;
  std::uint32_t finite;
  std::uint32_t failed;
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
  bool done = false;
  std::exception_ptr error;
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

Communicator::Communicator(std::unique_ptr<Transport> transport, CommunicatorOptions options,
                           Clock const& clock)
    : transport_(std::move(transport)),
      options_(options),
      clock_(clock),
      counters_(transport_->size()),
      thread_([this] { progress(); }) {}

Communicator::~Communicator() {
  bool busy = false;
  {
    std::lock_guard const lock(mutex_);
    closing_ = true;
    busy = !queue_.empty();
  }
  changed_.notify_all();
  if (busy) {
    // Before the connections close, so that peers know why.
    transport_->post_failure({next_operation_, FailureReport::Cause::own, {}, closed_by_its_owner});
    transport_->abort();
  }
  thread_.join();
  transport_.reset();  // before the buffers that its requests may still point to
}

Communicator::Handle Communicator::submit(std::shared_ptr<Operation> operation,
                                          Completion completion) {
  Handle handle;
  handle.state_ = std::make_shared<Handle::State>();
  {
    std::lock_guard const lock(mutex_);
    queue_.push_back({std::move(operation), handle.state_, std::move(completion)});
  }
  changed_.notify_all();
  return handle;
}

Counters Communicator::counters() const {
  std::lock_guard const lock(mutex_);
  return counters_;
}

void Communicator::progress() {
  for (;;) {
    Item item;
    bool closing = false;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      item = queue_.front();  // stays in the queue while it runs, so that the destructor sees it
      closing = closing_;
    }
    std::exception_ptr error;
    try {
      require<Aborted>(!closing, "the communicator was closed before this operation ran");
      execute(*item.operation);
    } catch (...) {
      error = std::current_exception();
    }
    {
      std::lock_guard const lock(mutex_);
      counters_ = transport_->counters();
      queue_.pop_front();
    }
    if (item.completion) item.completion(error);
    {
      std::lock_guard const lock(item.state->mutex);
      item.state->error = error;
      item.state->done = true;
    }
    item.state->changed.notify_all();
  }
}

void Communicator::execute(Operation& operation) {
  require<Aborted>(broken_.empty(), "an earlier operation failed (", broken_,
                   "); destroy this communicator and make a new one with the ranks that are left");
  ++next_operation_;
  Channel channel(*transport_, static_cast<std::uint32_t>(next_operation_),
                  Deadline(clock_, options_.timeout));
  try {
    bool const all_finite = agree(channel, operation);
    operation.run(channel, all_finite);
  } catch (Mismatch const&) {
    operation.roll_back();
    throw;
  } catch (...) {
    operation.roll_back();
    fail(std::current_exception());
  }
}

// Returns whether every rank's contribution is finite; throws the same Mismatch on every rank where
// proposals differ or one could not be made. The proposals themselves travel only then.
bool Communicator::agree(Channel& channel, Operation& operation) {
  Proposal proposal;
  bool failed = false;
  try {
    proposal = operation.prepare();
  } catch (...) {
    failed = true;
    proposal.text = what(std::current_exception());
  }
  Fingerprint const own{fnv1a(proposal.text), proposal.finite, failed};
  proposal.text.resize(std::min(proposal.text.size(), max_proposal_bytes));

  std::vector<std::byte> frame(header_bytes + max_proposal_bytes);
  auto const allgather = [&](Phase phase, std::span<const std::byte> payload,
                             std::size_t capacity) {
    std::size_t const length = encode_bytes(channel.operation(), payload, frame);
    return gather_.run(channel, phase, std::span(frame).first(length), header_bytes + capacity);
  };
  auto const frames = allgather(Phase::agree, std::as_bytes(std::span(&own, 1)), sizeof own);
  bool agreed = true;
  bool all_finite = true;
  std::vector<bool> failures;
  for (int rank = 0; rank < channel.size(); ++rank) {
    Fingerprint other{};
    channel.decode_from(rank, [&] {
      require<MalformedFrame>(frames[rank].values.size() == sizeof other, "a fingerprint of ",
                              frames[rank].values.size(), " bytes");
    });
    std::memcpy(&other, frames[rank].values.data(), sizeof other);
    agreed = agreed && other.hash == own.hash && other.failed == 0;
    all_finite = all_finite && other.finite != 0;
    failures.push_back(other.failed != 0);
  }
  if (agreed) return all_finite;

  auto const explained =
      allgather(Phase::explain, std::as_bytes(std::span(proposal.text)), max_proposal_bytes);
  std::vector<std::string> texts;
  std::string message;
  for (int rank = 0; rank < channel.size(); ++rank) {
    auto const bytes = explained[rank].values;
    std::string const text(reinterpret_cast<char const*>(bytes.data()), bytes.size());
    if (failures[rank]) {
      message +=
          concat(message.empty() ? "" : "; ", "rank ", rank, " failed before the exchange: ", text);
    } else {
      texts.push_back(text);
    }
  }
  if (message.empty()) message = concat("ranks disagree: ", differences(texts));
  throw Mismatch(message);
}

void Communicator::fail(std::exception_ptr error) {
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
