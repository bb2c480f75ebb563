// Messages there and back between two ranks, timed.
#pragma once

#include <chrono>
#include <vector>

#include "base/clock.h"

namespace sparsecomm {

// One-way times in seconds of `rounds` messages there and back: the `first` of the two ranks sends
// and then receives, the other the reverse.
template <class Send, class Receive>
std::vector<double> time_ping_pong(bool first, int rounds, Send&& send, Receive&& receive) {
  std::vector<double> seconds;
  seconds.reserve(rounds);
  for (int round = 0; round < rounds; ++round) {
    TimePoint const start = steady_clock().now();
    if (first) {
      send();
      receive();
    } else {
      receive();
      send();
    }
    seconds.push_back(std::chrono::duration<double>(steady_clock().now() - start).count() / 2);
  }
  return seconds;
}

}  // namespace sparsecomm
