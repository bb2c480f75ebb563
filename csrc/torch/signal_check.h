// Python's signals, whose handlers run in its main thread alone, while that thread waits in here.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <future>
#include <memory>

#include "base/clock.h"

namespace sparsecomm {

// Runs the handlers of signals that have come; what one raises, as that of Ctrl-C does, ends the
// wait.
class SignalCheck final : public Interrupt {
 public:
  // Null on other threads than the main one.
  Interrupt* here() { return ::getpid() == ::gettid() ? this : nullptr; }

 private:
  void check() override {
    pybind11::gil_scoped_acquire const acquire;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  }
};

// The end of a future, for which the main thread can wait without holding up signals.
class FutureEnd {
 public:
  // Made before others add callbacks to the future, so that it waits for none of them.
  explicit FutureEnd(c10::ivalue::Future& future) {
    auto const promise = std::make_shared<std::promise<void>>();
    ended_ = promise->get_future().share();
    future.addCallback([promise](c10::ivalue::Future& /*future*/) { promise->set_value(); },
                       /*uses_future=*/false);
  }

  // Throws what a signal's handler raises; what runs goes on.
  void wait() const {
    SignalCheck signals;
    Interrupt* const interrupt = signals.here();
    if (interrupt == nullptr) return ended_.wait();
    while (ended_.wait_for(Interrupt::period) != std::future_status::ready) {
      interrupt->poll(steady_clock().now());
    }
  }

 private:
  std::shared_future<void> ended_;
};

}  // namespace sparsecomm
