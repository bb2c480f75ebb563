// Python's lock, as seen by code that may run with or without it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>

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

}  // namespace sparsecomm
