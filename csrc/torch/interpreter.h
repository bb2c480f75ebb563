// Python's lock, as seen by code that may run with or without it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <optional>

#include "engine/communicator.h"

namespace sparsecomm {

// Threads that end here may still want the interpreter, to drop a Python object say: a caller who
// holds it and waits for them lets go of it.
class InterpreterRelease {
 public:
  InterpreterRelease() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

// Runs what ends `communicator` (or null): here, without the interpreter. Python's garbage
// collector may ask for that on one of the communicator's own threads, which cannot wait for
// itself: then another thread does it, for which Python waits as it ends.
inline void run_off_own_threads(Communicator const* communicator,
                                std::function<void()> const& end) {
  if (communicator == nullptr || !communicator->on_own_thread()) {
    InterpreterRelease const release;
    end();
    return;
  }
  pybind11::gil_scoped_acquire const acquire;
  try {
    pybind11::cpp_function const target([end] {
      InterpreterRelease const release;
      end();
    });
    auto const threading = pybind11::module_::import("threading");
    threading.attr("Thread")(pybind11::arg("target") = target).attr("start")();
  } catch (pybind11::error_already_set const&) {
    // Python ends and starts no more threads: the rest goes with the process.
  }
}

}  // namespace sparsecomm
