// What an aggregator has done, for those who watch it.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/clock.h"
#include "ina/message.h"

namespace sparsecomm {

// Of one job, or of all since the aggregator was started.
struct InaCounts {
  // Seconds; a round that takes no longer than a bound, and longer than the one before, is counted
  // at its place, the slowest at the last.
  static constexpr std::array<double, 11> round_bounds = {.0001, .0003, .001, .003, .01, .03,
                                                          .1,    .3,    1.,   3.,   10.};

  std::uint64_t operations = 0;                      // that were completed
  std::uint64_t blocks = 0;                          // that arrived for these, of all workers
  std::uint64_t zero_blocks = 0;                     // that did not, as they were zero
  std::uint64_t received_bytes = 0, sent_bytes = 0;  // of messages, without their envelopes
  std::array<std::uint64_t, std::size(refusal_reason_table)> refusals{};  // by their reasons
  std::array<std::uint64_t, round_bounds.size() + 1> rounds{};  // from one update to the next
  double round_seconds = 0;                                     // of all of them

  void add_round(Duration time) {
    double const seconds = std::chrono::duration<double>(time).count();
    std::size_t place = 0;
    while (place < round_bounds.size() && seconds > round_bounds[place]) ++place;
    ++rounds[place];
    round_seconds += seconds;
  }
  std::uint64_t& refused(RefusalReason reason) {
    return refusals[static_cast<std::size_t>(reason) - 1];
  }
};

}  // namespace sparsecomm
