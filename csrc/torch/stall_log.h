// Words of a stall on their way to Python's logging.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "engine/stall.h"

namespace sparsecomm {

// A thread that asks for an interpreter on its way out never returns.
inline bool interpreter_answers() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

// No limit: nobody is told. `log` takes the interpreter itself.
inline StallOptions make_stall_options(std::optional<std::chrono::duration<double>> limit,
                                       std::function<void(std::string const&)> log) {
  StallOptions options;
  if (!limit) return options;
  options.limit = std::chrono::duration_cast<Duration>(*limit);
  options.log = [log = std::move(log)](std::string const& text) {
    if (interpreter_answers()) log(text);
  };
  return options;
}

}  // namespace sparsecomm
