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

  // Rings a peer, which has been reached.
  void ring(UcxLink& link, int peer, std::uint32_t number);
  // Takes rings of all peers, once this rank rings or idles. To be called now and then, since each
  // ring ends it for its sender.
  void listen(UcxLink& link) {
    if (open_ && deaf_) listen_again(link);
  }
  void open() { open_ = true; }
  // Returns what ends Transport::idle(), if anything has come that does. Throws PeerInvalid.
  std::optional<Woken> look(std::uint32_t heard);
  // Withdraws what is left to the engine.
  void leave(UcxLink& link) noexcept;

  // From any thread.
  void wake() noexcept;
  // While it lives, file() becomes readable when wake() is called.
  class Idle {
   public:
    explicit Idle(UcxDoorbell& doorbell) : doorbell_(doorbell) { doorbell_.idle_ = true; }
    ~Idle() { doorbell_.idle_ = false; }
    Idle(Idle const&) = delete;
    Idle& operator=(Idle const&) = delete;

   private:
    UcxDoorbell& doorbell_;
  };
  int file() const { return bell_.get(); }
  // Makes the file unreadable. To be called after it may have become readable, and before look().
  void drain() noexcept;

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
  void listen_again(UcxLink& link);

  int const rank_;
  std::uint32_t const run_;
  FileDescriptor bell_;
  std::atomic<bool> idle_ = false, woken_ = false;
  std::deque<Sent> sent_;
  std::deque<Ear> ears_;
  bool open_ = false;
  bool deaf_ = true;  // some ears do not listen
  HighestRing rings_;
  std::exception_ptr error_;
};

}  // namespace sparsecomm
