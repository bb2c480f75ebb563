// Where the ranks of a communicator tell one another what went wrong, outside of the connections
// that may be broken.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace sparsecomm {

// Published by a rank when an operation fails on it; engine/verdict.h draws the conclusion.
struct FailureReport {
  enum class Cause : std::uint8_t {
    own = 0,   // something on this rank itself: no suspects
    lost = 1,  // the connection to a suspect broke, perhaps because it failed for its own reasons
    timeout = 2,      // the deadline passed while waiting for a suspect
    invalid = 3,      // a suspect's message failed validation: first-hand evidence
    interrupted = 4,  // another rank's report ended the wait for a suspect, if there was one
    absent = 5,       // all ranks know that the suspects did not submit what others did in time
  };
  // The operation that failed; if none was running, the next one.
  std::uint64_t operation = 0;
  Cause cause = Cause::own;
  std::vector<int> suspects{};
  std::string text{};
  // Messages to and from each peer so far: tell a message that was never sent from one that was
  // lost. Empty if there are too many peers.
  std::vector<std::uint64_t> sent{}, received{};
  // The result of the operation is there, and only the word that all ranks have theirs was missing.
  bool committing = false;
  // Its place among all reports, from 1, in the order in which they were first published: given by
  // the board, 0 if it does not know.
  std::uint64_t number = 0;
};

// Works while the transport does not. All calls are for any thread and return within about a
// second, with hundreds of ranks a few; if the board is unreachable, what it would have told is
// missing. They throw nothing but std::bad_alloc, and on_failure() what the start of a thread
// throws.
class Board {
 public:
  virtual ~Board() = default;

  // Publishes this rank's report and raises the alarm on all ranks. False if no rank will ever see
  // it.
  virtual bool post_failure(FailureReport const& report) noexcept = 0;
  // The reports published so far, [rank], this rank's included; with a report come those that were
  // published before it.
  virtual std::vector<std::optional<FailureReport>> failures() = 0;
  // How long it takes at most until failures() has this rank's own report, if the board can be
  // reached.
  virtual Duration patience() const { return Duration::zero(); }
  // Calls `alarm` once, on any thread, when a rank has published a report, or at once if one has.
  // An empty function takes the former one away; when that returns, it does not run and never will.
  // A board without an alarm never calls it.
  virtual void on_failure(std::function<void()> const& /*alarm*/) {}

  // Returns the first proposal that any rank made, and keeps it; `proposal` itself if the board
  // cannot decide.
  virtual std::string decide(std::string const& proposal) { return proposal; }
  // What has been decided, as far as this rank has heard.
  virtual std::optional<std::string> decision() { return std::nullopt; }

  // For ranks that wait for one another. post_status() replaces what this rank says of itself.
  // statuses() asks for what the ranks say, and returns what the last such question has brought,
  // [rank], empty if nothing is known.
  virtual void post_status(std::string_view /*status*/) noexcept {}
  virtual std::vector<std::string> statuses() = 0;
};

}  // namespace sparsecomm
