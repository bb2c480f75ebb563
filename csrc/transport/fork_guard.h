// Connections that a forked child must not keep open: they break when their last holder closes
// them, so a child of a process that was killed would hide its death from the peers.
#pragma once

#include <cstddef>
#include <map>
#include <utility>

namespace sparsecomm {

// Takes charge of the sockets that an engine watches by one of its epoll sets, and by sets within
// that: a forked child closes those that are in it at the time of the fork.
class ForkGuard {
 public:
  ForkGuard() = default;
  // `event_set` belongs to the engine, and stays open as long as the guard lives.
  explicit ForkGuard(int event_set);
  ForkGuard(ForkGuard&& other) noexcept : event_set_(std::exchange(other.event_set_, -1)) {}
  ForkGuard& operator=(ForkGuard&& other) noexcept {
    std::swap(event_set_, other.event_set_);
    return *this;
  }
  ForkGuard(ForkGuard const&) = delete;
  ForkGuard& operator=(ForkGuard const&) = delete;
  ~ForkGuard();

  // Has programs that are executed, which no handler of a fork precedes, close those that are in
  // the set now.
  void close_on_exec() const noexcept;

 private:
  int event_set_ = -1;
};

// How many sockets each of this process's epoll sets watches, where one of them listens. Looked at
// before and after an engine connects, this tells its sets, if it does not say which they are.
std::map<int, std::size_t> listening_event_sets();

}  // namespace sparsecomm
