// How the ranks of a transport reach each other before it stands, and after it has broken.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"

namespace sparsecomm {

// Out of band, so that it works whatever happens to the connections: torch's store, or what the
// threads of a test share.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  // Collective, in the same order on every rank: returns every rank's bytes, [rank]. Throws Timeout
  // naming the ranks that did not come, Aborted once interrupted.
  virtual std::vector<std::string> allgather(std::string const& own) = 0;
  // Throws Aborted when whoever asked for the transport no longer wants it; from any thread.
  virtual void check() const = 0;

  // The failure board, as Transport has it.
  virtual void post_failure(FailureReport const& report) noexcept = 0;
  virtual std::vector<std::optional<FailureReport>> failures() noexcept = 0;

  // The stall board, likewise.
  virtual void post_status(std::string_view status) noexcept = 0;
  virtual std::vector<std::string> statuses() noexcept = 0;
};

// The transport asked for cannot be had; every rank throws it with the same text.
class TransportUnavailable : public Error {
 public:
  using Error::Error;
};

// Fails on every rank or on none: each says what went wrong on it, or nothing. Throws
// TransportUnavailable with the same text everywhere where some rank has `problem`.
inline void agree_on_success(Rendezvous& rendezvous, std::string const& problem) {
  std::string text;
  std::vector<std::string> const problems = rendezvous.allgather(problem);
  for (std::size_t rank = 0; rank < problems.size(); ++rank) {
    if (problems[rank].empty()) continue;
    text += concat(text.empty() ? "" : "; ", "rank ", rank, ": ", problems[rank]);
  }
  require<TransportUnavailable>(text.empty(), text);
}

}  // namespace sparsecomm
