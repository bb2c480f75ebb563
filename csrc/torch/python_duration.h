// Python's timedelta as a duration that can be computed with.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>

// After Python's headers.
#include <datetime.h>

#include "base/clock.h"

namespace sparsecomm {

// An argument of a bound function; a timedelta of a century or more, timedelta.max say, stands for
// "never", which is longest_duration.
struct PythonDuration {
  Duration value{};
};

inline double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

// For torch's own timeouts, of which zero would be "never".
inline std::chrono::milliseconds to_milliseconds(Duration duration) {
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(duration),
                  std::chrono::milliseconds(1));
}

}  // namespace sparsecomm

namespace pybind11::detail {

template <>
struct type_caster<sparsecomm::PythonDuration> {
  PYBIND11_TYPE_CASTER(sparsecomm::PythonDuration, const_name("datetime.timedelta"));

  bool load(handle source, bool /*convert*/) {
    if (PyDateTimeAPI == nullptr) PyDateTime_IMPORT;
    if (!PyDelta_Check(source.ptr())) return false;
    constexpr int most_days = sparsecomm::longest_duration / std::chrono::hours(24);
    int const days = PyDateTime_DELTA_GET_DAYS(source.ptr());
    value.value = std::chrono::hours(24) * std::clamp(days, -most_days, most_days);
    if (days >= most_days || days < -most_days) return true;
    value.value += std::chrono::seconds(PyDateTime_DELTA_GET_SECONDS(source.ptr()));
    value.value += std::chrono::microseconds(PyDateTime_DELTA_GET_MICROSECONDS(source.ptr()));
    return true;
  }
};

}  // namespace pybind11::detail
