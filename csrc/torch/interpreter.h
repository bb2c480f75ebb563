// Python's lock, as seen by code that may run with or without it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <thread>

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

// Deletes `owner`, whose `communicator` (or null) ends with it. Python's garbage collector may ask
// for that on one of the communicator's own threads, which cannot wait for itself.
template <class Owner>
void destroy_elsewhere(Owner* owner, Communicator const* communicator) {
  if (communicator != nullptr && communicator->on_own_thread()) {
    std::thread([owner] { delete owner; }).detach();
    return;
  }
  InterpreterRelease const release;
  delete owner;
}

}  // namespace sparsecomm
