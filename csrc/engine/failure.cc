// What a communicator does when an operation fails; see communicator.h.
#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "collectives/patterns.h"
#include "engine/communicator.h"
#include "engine/verdict.h"

namespace sparsecomm {
namespace {

// Reports count messages for each peer up to that many ranks.
constexpr int max_counted_ranks = 64;
// Between two looks at the board.
constexpr Duration first_pause = std::chrono::milliseconds(1);
constexpr Duration longest_pause = std::chrono::milliseconds(32);
constexpr char const* alarm_text = "another rank has reported a failure";

FailureReport report_of(std::exception_ptr const& error, std::uint64_t operation,
                        Counters const& counters, bool committing) {
  using Cause = FailureReport::Cause;
  auto const report = [&](Cause cause, std::vector<int> suspects) {
    FailureReport made{.operation = operation,
                       .cause = cause,
                       .suspects = std::move(suspects),
                       .text = what_of(error),
                       .committing = committing};
    if (counters.sent_messages.size() <= max_counted_ranks) {
      made.sent = counters.sent_messages;
      made.received = counters.received_messages;
    }
    return made;
  };
  try {
    std::rethrow_exception(error);
  } catch (PeerInvalid const& invalid) {
    return report(Cause::invalid, invalid.ranks());
  } catch (NotSubmitted const& absent) {
    return report(Cause::absent, absent.ranks());
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

// Describes this rank as it is; with the lock held.
FailureReport Communicator::report_now(FailureReport::Cause cause) const {
  return {.operation = next_operation_ + (progress_ == Progress::none ? 1 : 0),
          .cause = cause,
          .committing = progress_ == Progress::committing};
}

// Ends what another thread runs.
void Communicator::break_off(char const* why) {
  std::optional<FailureReport> report;
  {
    std::lock_guard const lock(mutex_);
    if (broken_off_ == nullptr) broken_off_ = why;
    if (!reported_) report = report_now(FailureReport::Cause::own);
  }
  // Before the connections close, so that peers know why.
  if (report) {
    report->text = why;
    transport_->board().post_failure(*report);
  }
  interrupt_waits();
}

// From any thread.
void Communicator::interrupt_waits() noexcept {
  transport_->interrupt();
  for (auto const& interruptible : *interruptibles_) interruptible->interrupt();
}

// On a thread of the board's.
void Communicator::alarm() {
  std::optional<FailureReport> idle;
  {
    std::lock_guard const lock(mutex_);
    if (closing_ || std::exchange(alarmed_, true)) return;
    if (progress_ == Progress::none) idle = report_now(FailureReport::Cause::interrupted);
    reported_ = reported_ || idle;
  }
  if (idle) {
    transport_->board().post_failure(*idle);
  } else {
    interrupt_waits();
  }
}

bool Communicator::committing() {
  std::lock_guard const lock(mutex_);
  return progress_ == Progress::committing;
}

void Communicator::require_no_alarm() {
  std::lock_guard const lock(mutex_);
  if (alarmed_) throw Interrupted(alarm_text, {});
}

void Communicator::commit(Channel& channel) {
  {
    std::lock_guard const lock(mutex_);
    require<Error>(progress_ == Progress::exchanging, "an operation calls commit() twice");
    if (alarmed_ || broken_off_ != nullptr) throw Interrupted(alarm_text, {});
    progress_ = Progress::committing;
  }
  try {
    std::array<std::byte, 1> heard{};
    for (int distance = 1, number = 0; distance < size(); distance *= 2, ++number) {
      // Numbered: a message that is cut short is completed by what is left of the former, if the
      // engine does not say how many bytes came.
      std::array const word{static_cast<std::byte>(number)};
      int const source = rank_at(distance, rank(), size());
      round_.run(channel, Phase::confirm, rank_before(distance, rank(), size()), word, source,
                 heard);
      channel.decode_from(source, [&] {
        require<MalformedFrame>(heard == word, "message ", std::to_integer<int>(heard[0]),
                                " of the commit round instead of ", number);
      });
    }
  } catch (...) {
    struct Conclusion {
      Communicator& communicator;
      bool stands = false;
      ~Conclusion() {
        if (stands) return;
        std::lock_guard const lock(communicator.mutex_);
        communicator.progress_ = Progress::exchanging;
      }
    } conclusion{*this};
    conclusion.stands = conclude_failure(std::current_exception(), true, nullptr);
    if (!conclusion.stands) throw_failure();
  }
}

// Agrees with the other survivors on what failed, and leaves in failure_ what this rank shall
// throw. True if the operation stands all the same.
bool Communicator::conclude_failure(std::exception_ptr error, bool committing,
                                    Interrupt const* interrupt) {
  // Peers are not to wait for this rank if it has no memory for a report either; those that wait
  // for aggregators hear of it through them.
  struct AbortAtLast {
    Communicator& communicator;
    ~AbortAtLast() {
      communicator.transport_->abort();
      if (communicator.aggregators_) communicator.aggregators_->leave();
    }
  } const at_last{*this};
  if (watch_) watch_->stop();  // before the others' silence becomes an error
  bool told_to = interrupt != nullptr && interrupt->raised();
  {
    std::lock_guard const lock(mutex_);
    if (closing_ || broken_off_ != nullptr) {
      told_to = true;
      error = std::make_exception_ptr(
          Aborted(broken_off_ != nullptr ? broken_off_ : closed_by_its_owner));
    }
    alarmed_ = reported_ = true;
  }
  FailureReport own = report_of(error, next_operation_, transport_->counters(), committing);
  if (interrupt != nullptr && interrupt->raised()) own.text = interrupted_by_its_caller;
  Board& board = transport_->board();
  bool const posted = board.post_failure(own);
  transport_->abort();
  // What other ranks saw says nothing of a failure that was asked for here.
  bool const alone = !posted || size() == 1 || (told_to && !committing);
  Deadline const grace(clock_, alone ? Duration::zero() : options_.failure_grace);
  Deadline const patience(options_.runtime.clock(), alone ? Duration::zero() : board.patience());
  Verdict verdict;
  for (Duration pause = first_pause;; pause = std::min(2 * pause, longest_pause)) {
    auto decided = board.decision();
    if (!decided) {
      auto reports = board.failures();
      // With this rank's own report come all that were published before it.
      bool const heard = reports[rank()].has_value();
      if (!heard) reports[rank()] = own;
      if (heard ? !settled(reports) && !grace.passed() : !patience.passed()) {
        options_.runtime.sleep(pause);
        continue;
      }
      verdict = conclude(reports);
      // Without the board there is no telling whether another survivor lacks its result.
      if (!heard && size() > 2) verdict.completed = next_operation_ - 1;
      decided = board.decide(serialize_verdict(verdict));
    }
    auto const parsed = parse_verdict(*decided, size());
    if (parsed) verdict = *parsed;
    require<Error>(!verdict.culprits.empty(), "the board holds no verdict but '", *decided, "'");
    break;
  }
  broken_ = concat("operation ", next_operation_, " on rank ", rank(), ": ", verdict.text);
  std::string text = verdict.text;
  bool const stands = verdict.completed >= next_operation_;
  if (stands && !committing) {
    text += concat("; rank ", rank(), " did not answer in time, and the others completed the ",
                   "operation without it: restore it from one of them");
  }
  std::string const seen = concat("; this rank saw: ", what_of(error));
  if (own.cause == FailureReport::Cause::own) {
    failure_ = error;
  } else if (verdict.timed_out) {
    double const seconds = std::chrono::duration<double>(options_.timeout).count();
    failure_ = std::make_exception_ptr(
        Timeout(concat(text, " (", seconds, " s)", seen), verdict.culprits));
  } else {
    failure_ = std::make_exception_ptr(PeerLost(text + seen, verdict.culprits));
  }
  return stands && committing;
}

void Communicator::throw_failure() { std::rethrow_exception(std::exchange(failure_, nullptr)); }

Cost commit_cost(int ranks) {
  double const rounds = bruck_rounds(ranks);
  return {.rounds = rounds, .messages = rounds, .bytes = rounds * (header_bytes + 1)};
}

}  // namespace sparsecomm
