#include "transport/doorbell.h"

#include <algorithm>
#include <array>
#include <exception>
#include <span>
#include <utility>

#include "base/error.h"
#include "transport/transport.h"
#include "wire/checksum.h"

namespace sparsecomm {
namespace {

std::uint64_t checksum_of(RingMessage const& ring) {
  std::array const words{ring.run, ring.number};
  Checksum checksum;
  checksum.add(std::as_bytes(std::span(words)));
  return checksum.value();
}

}  // namespace

void Doorbell::ring(std::uint32_t number) {
  {
    std::lock_guard const lock(mutex_);
    rings_.add(number);
  }
  changed_.notify_all();
}

void Doorbell::wake() noexcept {
  {
    std::lock_guard const lock(mutex_);
    woken_ = true;
  }
  changed_.notify_all();
}

void Doorbell::interrupt() noexcept {
  {
    std::lock_guard const lock(mutex_);
    interrupted_ = true;
  }
  changed_.notify_all();
}

void Doorbell::lose(int peer) noexcept {
  {
    std::lock_guard const lock(mutex_);
    lost_ = lost_.value_or(peer);
  }
  changed_.notify_all();
}

void Doorbell::fail(std::exception_ptr error) noexcept {
  {
    std::lock_guard const lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  changed_.notify_all();
}

Woken Doorbell::idle(std::uint32_t heard, Deadline const& deadline) {
  std::unique_lock lock(mutex_);
  auto const over = [&] {
    return interrupted_ || error_ || lost_ || woken_ || rings_.above(heard);
  };
  if (!changed_.wait_until(lock, deadline, over)) return Woken::late;
  if (interrupted_) throw Interrupted(aborted_here, {});
  if (error_) std::rethrow_exception(error_);
  bool const woken = std::exchange(woken_, false);
  if (rings_.above(heard)) return Woken::rung;
  if (woken) return Woken::woken;
  throw PeerLost(concat("rank ", *lost_, " is gone"), {*lost_});
}

RingMessage make_ring(std::uint32_t run, std::uint32_t number) {
  RingMessage ring{.run = run, .number = number};
  ring.checksum = checksum_of(ring);
  return ring;
}

std::optional<std::uint32_t> number_of(RingMessage const& ring, std::uint32_t run, int peer) {
  if (ring.checksum != checksum_of(ring)) {
    throw PeerInvalid(concat("rank ", peer, " rang with run ", ring.run, ", number ", ring.number,
                             " and checksum ", ring.checksum, ", which is not theirs"),
                      {peer});
  }
  return ring.run == run ? std::optional(ring.number) : std::nullopt;
}

}  // namespace sparsecomm
