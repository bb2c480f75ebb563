// A worker's connections to its aggregators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/clock.h"
#include "ina/message.h"
#include "transport/interruptible.h"

namespace sparsecomm {

struct JobMember;  // ina/host.h

// One thread at a time uses a link, but for interrupt(). Endpoints are numbered from 0 to
// size() - 1. An aggregator runs several operations of a worker at once if they have instances of
// their own, numbered from 0 to most_instances - 1.
class AggregatorLink : public Interruptible {
 public:
  static constexpr std::uint32_t most_instances = 64;

  struct Event {
    enum class Kind : std::uint8_t {
      message,  // from that aggregator, for that instance
      lost,     // the connection to that aggregator, for good; told once
      late,     // the deadline has passed
    };
    Kind kind = Kind::late;
    int aggregator = 0;
    std::uint32_t instance = 0;
    std::span<const std::byte> bytes;  // a whole message, which stays until the next call
  };

  virtual ~AggregatorLink() = default;

  virtual int size() const = 0;
  // As the user gave it, for errors and logs.
  virtual std::string const& address(int aggregator) const = 0;
  // Why the connection is gone, once that has been told or it was closed.
  virtual std::string const& loss(int aggregator) const = 0;

  // Sends, or has next() and flush() send what cannot go at once. The bytes of the message must
  // stay until it has been answered by an update (a refusal may come before the message has gone),
  // all has been flushed, or the aggregator is lost or closed. To one that is gone: does nothing.
  virtual void send(int aggregator, std::uint32_t instance, InaMessage const& message) = 0;
  virtual bool flushed(int aggregator) const = 0;
  // Waits until all has been sent or the aggregator is gone; false: the deadline has passed. Throws
  // as next() does.
  virtual bool flush(int aggregator, Deadline const& deadline) = 0;

  // Waits for the next event. Throws Interrupted after interrupt(), and what the deadline's
  // interrupt throws.
  virtual Event next(Deadline const& deadline) = 0;

  // Ends the connection without an event, and forgets what has not been sent.
  virtual void close(int aggregator, std::string const& why) = 0;
  // Connects to one that is gone, and joins the job there. Throws Error, naming it, if that cannot
  // be, after which it is still gone; and as next().
  virtual void reconnect(int aggregator, JobMember const& member, Deadline const& deadline) = 0;
};

}  // namespace sparsecomm
