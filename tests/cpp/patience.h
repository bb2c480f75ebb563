// How patient tests are: SPARSECOMM_TEST_PATIENCE, a factor, multiplies their limits.
#pragma once

#include <chrono>
#include <cstdlib>
#include <string>

#include "base/clock.h"

namespace sparsecomm::test {

inline double patience() {
  static double const factor = [] {
    char const* const text = std::getenv("SPARSECOMM_TEST_PATIENCE");
    return text == nullptr ? 1.0 : std::stod(text);
  }();
  return factor;
}

inline Duration patiently(Duration limit) {
  return std::chrono::duration_cast<Duration>(limit * patience());
}

// A limit that nothing comes near to, even on a loaded machine.
inline Duration long_time() { return patiently(std::chrono::seconds(60)); }

inline Deadline soon(Duration allowance = long_time()) { return {steady_clock(), allowance}; }

}  // namespace sparsecomm::test
