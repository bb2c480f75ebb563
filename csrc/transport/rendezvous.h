// How the ranks of a transport reach each other before it stands, and after it has broken.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "transport/board.h"

namespace sparsecomm {

// Out of band, so that it works whatever happens to the connections: torch's store, or what the
// threads of a test share.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  // What frames of this communicator carry; the same on all ranks, and drawn by one of them.
  virtual std::uint32_t run() const { return 0; }

  // All of these are collective, in the same order on every rank. They throw Timeout naming the
  // ranks that did not come, and what check() throws.

  // Hands every rank what rank 0 concludes from all ranks' words, [rank]; conclude() must not
  // throw.
  using Conclude = std::function<std::string(std::vector<std::string> const& words)>;
  virtual std::string decide(std::string const& own, Conclude const& conclude) = 0;
  // Returns the words of the ranks `wanted`, in their order. Must be followed by a decide().
  virtual std::vector<std::string> exchange(std::string const& own,
                                            std::span<const int> wanted) = 0;

  // Throws when the transport is no longer wanted; from any thread.
  virtual void check() const = 0;

  virtual Board& board() = 0;
};

// The transport asked for cannot be had; every rank throws it with the same text.
class TransportUnavailable : public Error {
 public:
  using Error::Error;
};

// Fails on every rank or on none: each says what went wrong on it, or nothing. Throws
// TransportUnavailable with the same text everywhere where some rank has `problem`.
inline void agree_on_success(Rendezvous& rendezvous, std::string const& problem) {
  std::string const text = rendezvous.decide(problem, [](std::vector<std::string> const& problems) {
    std::string all;
    for (std::size_t rank = 0; rank < problems.size(); ++rank) {
      if (problems[rank].empty()) continue;
      all += concat(all.empty() ? "" : "; ", "rank ", rank, ": ", problems[rank]);
    }
    return all;
  });
  require<TransportUnavailable>(text.empty(), text);
}

}  // namespace sparsecomm
