// Error types of the core. Every message prints its operands and says what to do.
#pragma once

#include <cstddef>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sparsecomm {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A caller's mistake: an argument outside its documented range.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// What every rank raises alike: the operation is rolled back, and the communicator stays usable.
class AgreedError : public Error {
 public:
  using Error::Error;
};

// The ranks of a communicator asked for different operations.
class Mismatch : public AgreedError {
 public:
  using AgreedError::AgreedError;
};

// Bytes that arrived are not a valid frame; the message names the field.
class MalformedFrame : public Error {
 public:
  using Error::Error;
};

// Work that was queued on a communicator when it was closed or had already failed.
class Aborted : public Error {
 public:
  using Error::Error;
};

// An operation that a rank cancelled before it began.
class Cancelled : public AgreedError {
 public:
  using AgreedError::AgreedError;
};

// An error that accuses ranks. `ranks()` is sorted, and not empty but for Interrupted.
class PeerError : public Error {
 public:
  PeerError(std::string const& message, std::vector<int> ranks)
      : Error(message), ranks_(std::move(ranks)) {}
  std::vector<int> const& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

// The connection to a peer is gone.
class PeerLost : public PeerError {
 public:
  using PeerError::PeerError;
};

// Another rank's failure report, or an abort on this rank, ended the wait for these ranks, if any.
class Interrupted : public PeerError {
 public:
  using PeerError::PeerError;
};

// What a peer sent is not what the operation expects: first-hand evidence against that peer.
class PeerInvalid : public PeerError {
 public:
  using PeerError::PeerError;
};

// The operation's deadline passed while waiting for these ranks.
class Timeout : public PeerError {
 public:
  using PeerError::PeerError;
};

// Concatenates operands into a message: concat("k = ", k, " exceeds ", n).
template <class... Parts>
std::string concat(Parts const&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

// "rank 3", "ranks 0, 2".
template <class Ranks>
std::string join_ranks(Ranks const& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  char const* separator = " ";
  for (int const rank : ranks) {
    text += concat(separator, rank);
    separator = ", ";
  }
  return text;
}

// What the exception says.
inline std::string what_of(std::exception_ptr const& error) {
  try {
    std::rethrow_exception(error);
  } catch (std::exception const& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

// Throws E with the concatenated operands unless `holds`.
template <class E = InvalidArgument, class... Parts>
void require(bool holds, Parts const&... parts) {
  if (!holds) [[unlikely]] {
    throw E(concat(parts...));
  }
}

// Runs `body`; what it throws becomes the error if there is none yet.
template <class Body>
void keep_first_error(std::exception_ptr& error, Body&& body) {
  try {
    body();
  } catch (...) {
    if (!error) error = std::current_exception();
  }
}

}  // namespace sparsecomm
