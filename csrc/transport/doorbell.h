// How ranks wake each other where nobody waits for a message: see Transport::ring().
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>

#include "base/clock.h"
#include "base/runtime.h"

namespace sparsecomm {

// Why a transport no longer idles.
enum class Woken : std::uint8_t {
  rung,   // a peer has rung
  woken,  // somebody on this rank has called wake()
  late,   // the deadline has passed
};

// The highest number of the rings that came. Numbers may wrap around: of two, the higher one is
// less than half their range ahead.
class HighestRing {
 public:
  void add(std::uint32_t number) {
    if (!number_ || is_above(number, *number_)) number_ = number;
  }
  // Forgets one that is not: numbers must not come round to it.
  bool above(std::uint32_t heard) {
    if (number_ && !is_above(*number_, heard)) number_.reset();
    return number_.has_value();
  }

 private:
  static bool is_above(std::uint32_t a, std::uint32_t b) {
    return static_cast<std::int32_t>(a - b) > 0;
  }
  std::optional<std::uint32_t> number_;
};

// A rank's own, for transports whose rings are brought by threads.
class Doorbell {
 public:
  explicit Doorbell(Runtime runtime = {}) : changed_(runtime, "a ring") {}

  void ring(std::uint32_t number);
  void wake() noexcept;
  // These end idle(), for good: it throws Interrupted, PeerLost or `error`.
  void interrupt() noexcept;
  void lose(int peer) noexcept;
  void fail(std::exception_ptr error) noexcept;
  Woken idle(std::uint32_t heard, Deadline const& deadline);

 private:
  std::mutex mutex_;  // guards what follows
  Condition changed_;
  HighestRing rings_;
  bool woken_ = false;
  bool interrupted_ = false;
  std::optional<int> lost_;
  std::exception_ptr error_;
};

// A ring as it travels between processes.
struct RingMessage {
  std::uint32_t run = 0, number = 0;
  std::uint64_t checksum = 0;
};
RingMessage make_ring(std::uint32_t run, std::uint32_t number);
// None if it is of another run, as one may be that came late to a communicator that is no more.
// Throws PeerInvalid, naming the peer it came from, where it is damaged.
std::optional<std::uint32_t> number_of(RingMessage const& ring, std::uint32_t run, int peer);

}  // namespace sparsecomm
