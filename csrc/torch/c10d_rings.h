// Rings as messages of a torch process group (gloo), which has no receive that does not block.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "transport/doorbell.h"

namespace sparsecomm {

// Two threads: one waits for the rings of any peer, the other one until those of this rank have
// been taken, which gloo's sends do. No ring that is not the last one to its peer is kept for that.
class C10dRings {
 public:
  // As good as endless, to gloo.
  static constexpr std::chrono::milliseconds endless = std::chrono::hours(24 * 365);

  // What comes goes to the doorbell, which outlives this.
  C10dRings(c10::intrusive_ptr<c10d::Backend> group, std::uint32_t run, Doorbell& doorbell);
  // In a forked child the threads are left alone.
  ~C10dRings();
  C10dRings(C10dRings const&) = delete;
  C10dRings& operator=(C10dRings const&) = delete;

  void ring(int peer, std::uint32_t number);

 private:
  void listen();
  void send();
  // Waits for it, unless this ends; then it returns false.
  bool await(c10::intrusive_ptr<c10d::Work> const& work, c10::intrusive_ptr<c10d::Work>& awaited);

  c10::intrusive_ptr<c10d::Backend> group_;
  std::uint32_t const run_;
  Doorbell& doorbell_;
  pid_t const process_ = ::getpid();
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool ended_ = false;
  std::map<int, std::uint32_t> outgoing_;           // peer -> number
  c10::intrusive_ptr<c10d::Work> received_, sent_;  // that is waited for
  std::thread listener_, sender_;
};

}  // namespace sparsecomm
