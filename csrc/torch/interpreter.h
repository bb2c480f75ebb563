// Python's lock, as seen by code that may run with or without it.
#pragma once

#include <cxxabi.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <utility>

#include "engine/communicator.h"

namespace sparsecomm {

inline bool interpreter_answers() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

// Calls `call` with the interpreter held, if it still answers. A thread that asks for one on its
// way out is ended by Python before its 3.14, and to unwind C++ would end the process with an
// error: such a thread stops here.
template <class Call>
void with_interpreter(Call&& call) {
  if (!interpreter_answers()) return;
  try {
    pybind11::gil_scoped_acquire const acquire;
    call();
  } catch (abi::__forced_unwind const&) {
    for (;;) ::pause();
  }
}

// Keeps a function that may hold Python objects; once the interpreter is gone it is left to the
// process.
template <class Function>
std::shared_ptr<Function const> drop_with_interpreter(Function function) {
  return {new Function(std::move(function)),
          [](Function const* kept) { with_interpreter([&] { delete kept; }); }};
}

// Threads that end here may still want the interpreter, to drop a Python object say: a caller who
// holds it and waits for them lets go of it.
class InterpreterRelease {
 public:
  InterpreterRelease() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) state_ = PyEval_SaveThread();
  }
  ~InterpreterRelease() {
    if (state_ == nullptr) return;
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind const&) {
      for (;;) ::pause();  // see with_interpreter()
    }
  }
  InterpreterRelease(InterpreterRelease const&) = delete;
  InterpreterRelease& operator=(InterpreterRelease const&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// Runs what waits for threads to end: here, without the interpreter. Python's garbage collector may
// ask for that on one of those threads, which cannot wait for itself (`own_thread`): then another
// thread does it, for which Python waits as it ends.
inline void run_off_own_threads(bool own_thread, std::function<void()> const& end) {
  if (!own_thread) {
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

inline void close_communicator(std::shared_ptr<Communicator> const& communicator) {
  if (communicator == nullptr) return;
  run_off_own_threads(communicator->on_own_thread(), [communicator] { communicator->close(); });
}

}  // namespace sparsecomm
