// Rings over UCX: short messages that nobody waits for. Only files named ucx* include this.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>

#include "transport/doorbell.h"
#include "transport/process.h"
#include "transport/ucx_link.h"

namespace sparsecomm {

// The link is that of the transport whose doorbell this is. UCX points to what is in here until the
// link is closed.
class UcxDoorbell {
 public:
  UcxDoorbell(int rank, int size, std::uint32_t run);

  // To a peer that is reached.
  void ring(UcxLink& link, int peer, std::uint32_t number);
  // Takes rings of all peers from now on. To be called again before each look at what came.
  void listen(UcxLink& link);
  // None: nothing that ends idle(). Throws PeerInvalid.
  std::optional<Woken> look(std::uint32_t heard);
  // Withdraws what is left to the engine.
  void leave(UcxLink& link) noexcept;

  // From any thread.
  void wake() noexcept;
  // Readable once wake() has been called while this is set.
  int file() const { return bell_.get(); }
  void set_idle(bool idle) { idle_ = idle; }

 private:
  struct Sent {
    RingMessage message;
    void* request = nullptr;  // null: unused
  };
  struct Ear {
    UcxDoorbell* owner = nullptr;
    int peer = 0;
    RingMessage message = {};
    UcxLibrary const* ucx = nullptr;
    void* request = nullptr;
    bool listens = false;

    void hear(ucs_status_t status, std::size_t bytes);
  };

  int const rank_;
  std::uint32_t const run_;
  FileDescriptor bell_;
  std::atomic<bool> idle_ = false, woken_ = false;
  std::deque<Sent> sent_;
  std::deque<Ear> ears_;
  bool deaf_ = true;  // some ears do not listen
  HighestRing rings_;
  std::exception_ptr error_;
};

}  // namespace sparsecomm
