// Messages between two processes over UCX: over RDMA where there is some, shared memory or TCP. How
// each comes to know the other, and that it is gone, is the owner's affair.
//
// A message is an active message. Its header tells which connection it is for, by a token that the
// receiver has drawn, and holds the first bytes, by which the receiver finds a place for the rest:
// that is copied there, or fetched if UCX has announced it only (rendezvous).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>

#include "transport/message_sink.h"
#include "transport/ucx.h"

namespace sparsecomm {

// Messages to and from one peer. Breaks off what is under way with its end, and then waits, for a
// second at most, until bytes that nobody holds are read no more.
class UcxConnection {
 public:
  virtual ~UcxConnection() = default;

  // Why no more can be sent or received; empty while all is well.
  virtual std::string const& error() const = 0;
  // That is since what the peer has sent is not valid.
  virtual bool malformed() const = 0;
  // The bytes must stay until flushed(), or as long as `memory` is held if there is some.
  virtual void send(std::uint32_t instance, std::span<const std::span<const std::byte>> pieces,
                    std::shared_ptr<void const> memory) = 0;
  // More than most_copied bytes that wait are an error: the other side does not read.
  virtual void send_copy(std::uint32_t instance, std::span<const std::byte> message) = 0;
  static constexpr std::size_t most_copied = std::size_t{1} << 16;
  virtual bool flushed() const = 0;
};

// One thread at a time uses this and its connections. A forked child may do nothing with them but
// destroy them, which touches nothing of the parent's.
class UcxMessages {
 public:
  // Not zero, and not to be guessed.
  static std::uint64_t draw_token() {
    std::random_device device;
    return (std::uint64_t{device()} << 32 | device()) | 1;
  }

  virtual ~UcxMessages() = default;

  // What a peer needs for connect(): at most most_introduction bytes.
  virtual std::string const& introduction() const = 0;
  static constexpr std::size_t most_introduction = 8192;

  // Connects with a peer whose messages name `token`, of draw_token(), and to which messages name
  // `peer_token`. The sink is called within progress(); what it throws is the connection's error.
  // Throws MalformedFrame if `introduction` has been changed on its way (UCX itself checks nothing,
  // so it must be of somebody who is trusted), or Error if the releases differ or there is no way.
  virtual std::unique_ptr<UcxConnection> connect(std::string const& introduction,
                                                 std::uint64_t token, std::uint64_t peer_token,
                                                 MessageSink& sink) = 0;

  // Returns whether anything happened.
  virtual bool progress() = 0;
  // False: there is something to do. Else file() becomes readable when there is.
  virtual bool rest() = 0;
  virtual int file() const = 0;
};

// For about `connections` at once. Throws Error with ucx_problem() or what UCX says.
std::unique_ptr<UcxMessages> make_ucx_messages(UcxOptions const& options, std::size_t connections);

}  // namespace sparsecomm
