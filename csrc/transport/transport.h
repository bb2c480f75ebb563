// Point-to-point messages between the ranks of one communicator. One thread uses a transport at a
// time (the communicator's progress thread).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "sparse/reduction.h"
#include "transport/board.h"
#include "transport/doorbell.h"

namespace sparsecomm {

// Distinguishes messages between the same two ranks. Below tag_limit: what is above, and below 2^31
// for every engine's sake, is for the transports.
using Tag = std::uint32_t;
inline constexpr Tag tag_limit = 0x7fffff80;

// What Interrupted says after interrupt() or abort().
inline constexpr char const* aborted_here = "this rank's transport was aborted";

// In place of a peer that is waited for; anybody: for whoever may need this rank.
inline constexpr int nobody = -1, everybody = -2, a_service = -3, anybody = -4;

// A posted send or receive. Trivially copyable; owned by the transport, released by wait().
struct Request {
  std::uint32_t slot = UINT32_MAX;
  int peer = nobody;
};

// Counted where messages are posted; [peer].
struct Counters {
  std::vector<std::uint64_t> sent_bytes, sent_messages, received_bytes, received_messages;

  explicit Counters(int size = 0)
      : sent_bytes(size), sent_messages(size), received_bytes(size), received_messages(size) {}
  static std::uint64_t total(std::vector<std::uint64_t> const& per_peer) {
    std::uint64_t sum = 0;
    for (std::uint64_t const n : per_peer) sum += n;
    return sum;
  }
};

// An engine's own allreduce.
class NativeAllreduce {
 public:
  // Replaces `bytes`, elements of `dtype`, by their reduction over all ranks, the same bits on
  // each. What travels is not counted. Throws as Transport::wait() does, against all ranks that it
  // may have waited for; the elements are then of no use.
  virtual void allreduce(std::span<std::byte> bytes, DType dtype, Reduction reduction,
                         Deadline const& deadline) = 0;

 protected:
  ~NativeAllreduce() = default;
};

class Transport {
 public:
  // `run` as run() returns it.
  Transport(int rank, int size, std::uint32_t run = 0)
      : rank_(rank), size_(size), run_(run), counters_(size) {
    require(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " is not one of ", size,
            " ranks");
  }
  virtual ~Transport() = default;
  Transport(Transport const&) = delete;
  Transport& operator=(Transport const&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual std::string_view name() const = 0;
  // Identifies the communicator in its frames (see FrameStamp), the same on all ranks. An engine
  // that connects when it is first used does so here.
  virtual std::uint32_t run() { return run_; }

  // Posts a message to `peer`. `bytes` stays readable until the request has been waited for.
  Request isend(int peer, Tag tag, std::span<const std::byte> bytes) {
    check_peer(peer);
    Request request = do_isend(peer, tag, bytes);
    request.peer = peer;
    counters_.sent_bytes[peer] += bytes.size();
    ++counters_.sent_messages[peer];
    return request;
  }
  // Posts a receive of at most bytes.size() bytes; what arrives fills the front.
  Request irecv(int peer, Tag tag, std::span<std::byte> bytes) {
    check_peer(peer);
    Request request = do_irecv(peer, tag, bytes);
    request.peer = peer;
    return request;
  }
  // Blocks until the request is complete and releases it. Returns how many bytes arrived; an engine
  // that cannot tell returns the size of the buffer. Throws PeerLost when the peer is gone,
  // Timeout when the deadline passes, Interrupted if the transport has been aborted or another
  // rank's report ends the wait; in each case the request is released.
  virtual std::size_t wait(Request& request, Deadline const& deadline) = 0;

  // Wakes a peer that idles, or that next idles without having heard of this number. Numbers are
  // those of agreed rounds: they rise, and all ranks idle with the same one. On the thread that
  // uses the transport; waits for nobody, and is not counted. A peer that is gone hears nothing.
  // Throws Interrupted once aborted.
  void ring(int peer, std::uint32_t number) {
    check_peer(peer);
    do_ring(peer, number);
  }
  // Sleeps until a peer has rung with a number above `heard`, wake() has been called since the last
  // idle(), or the deadline has passed; a ring counts before a call, which it then takes with it.
  // Throws Interrupted as wait() does, PeerInvalid, and PeerLost if any peer is gone, where the
  // engine can tell.
  virtual Woken idle(std::uint32_t heard, Deadline const& deadline) = 0;
  // Ends idle(), or the next one. From any thread.
  virtual void wake() noexcept = 0;

  // Whether wait() and idle() ask Deadline::poll_interrupt() now and then.
  virtual bool interruptible() const { return false; }

  // The engine's own allreduce, which lives as long as the transport; null on all ranks if it has
  // none. Used by one thread at a time with the transport.
  virtual NativeAllreduce* native() { return nullptr; }

  // Ends the wait in progress, if any, and every later call with Interrupted. From any thread;
  // never throws. Peers notice nothing before abort().
  virtual void interrupt() noexcept = 0;
  // Breaks the transport for good: every pending and later operation of this rank throws
  // Interrupted, and peers that wait for this rank learn of it as soon as the engine can tell them.
  // On the thread that uses the transport; never throws.
  virtual void abort() noexcept = 0;

  // Out of band, for when something went wrong.
  virtual Board& board() = 0;

  // Whom the thread that uses the transport waits for, and how often it has waited; from any
  // thread. Kept up to date by the channel.
  int awaited() const { return awaited_.load(std::memory_order_relaxed); }
  std::uint64_t waits() const { return waits_.load(std::memory_order_relaxed); }
  void begin_wait(int peer) {
    awaited_.store(peer, std::memory_order_relaxed);
    waits_.store(waits() + 1, std::memory_order_relaxed);
  }
  // The same for what is no rank: awaited() is then a_service, and awaited_service() its name.
  void begin_wait(std::string_view service) {
    {
      std::lock_guard const lock(service_mutex_);
      service_ = service;
    }
    begin_wait(a_service);
  }
  std::string awaited_service() const {
    std::lock_guard const lock(service_mutex_);
    return service_;
  }
  void end_wait() { awaited_.store(nobody, std::memory_order_relaxed); }

  // The receiver of a frame knows its length; engines need not.
  void count_received(int peer, std::size_t bytes) {
    counters_.received_bytes[peer] += bytes;
    ++counters_.received_messages[peer];
  }
  Counters const& counters() const { return counters_; }

 protected:
  virtual Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) = 0;
  virtual Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) = 0;
  virtual void do_ring(int peer, std::uint32_t number) = 0;

 private:
  void check_peer(int peer) const {
    require(peer >= 0 && peer < size_ && peer != rank_, "peer ", peer, " is not another one of ",
            size_, " ranks (this is rank ", rank_, ")");
  }
  int rank_, size_;
  std::uint32_t run_;
  Counters counters_;
  std::atomic<int> awaited_ = nobody;
  std::atomic<std::uint64_t> waits_ = 0;
  mutable std::mutex service_mutex_;  // guards service_
  std::string service_;
};

}  // namespace sparsecomm
