// Rings as messages of a torch process group (gloo), which has no receive that does not block.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "transport/doorbell.h"

namespace sparsecomm {

// Two threads: one waits for the rings of any peer, the other one until those of this rank have
// been taken, which gloo's sends do. Of several to one peer the last is kept.
class C10dRings {
 public:
  // As good as endless, to gloo.
  static constexpr std::chrono::milliseconds endless = std::chrono::hours(24 * 365);

  // What comes goes to the doorbell. `posting` is held where a message is posted, since the group
  // counts them without a lock. Both outlive this. Not to be destroyed in a forked child.
  C10dRings(c10::intrusive_ptr<c10d::Backend> group, std::uint32_t run, Doorbell& doorbell,
            std::mutex& posting);
  ~C10dRings();
  C10dRings(C10dRings const&) = delete;
  C10dRings& operator=(C10dRings const&) = delete;

  void ring(int peer, std::uint32_t number);

 private:
  struct Sent;
  using Work = c10::intrusive_ptr<c10d::Work>;

  void listen();
  void send();
  void end() noexcept;
  // Returns whether it is complete; false where an abort has ended the wait for it.
  bool await(Work const& work, Work& awaited);

  c10::intrusive_ptr<c10d::Backend> group_;
  std::uint32_t const run_;
  Doorbell& doorbell_;
  std::mutex& posting_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool ended_ = false;
  std::map<int, std::uint32_t> outgoing_;  // peer -> number
  Work received_, sent_;                   // that are waited for
  std::thread listener_, sender_;
};

}  // namespace sparsecomm
