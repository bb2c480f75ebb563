// The stages of an operation as ranges that torch.profiler shows.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <array>
#include <optional>
#include <string>

#include "engine/observer.h"

namespace sparsecomm {

// A range "sparsecomm: NAME", in it "sparsecomm::agree", "sparsecomm::select" and so on, in the
// thread that runs the operation. A profiler sees the threads that it was started in, and those
// they hand their state to: so the thread that submits an operation hands it on. Where nobody
// profiles, an operation costs two looks at that.
class ProfilerLabels final : public StageObserver {
 public:
  explicit ProfilerLabels(std::string const& name) : whole_("sparsecomm: " + name) {}

  // By the thread that submits the next operation, while none runs.
  void follow_this_thread();

  void begin(Stage stage) noexcept override;
  void end(Stage stage) noexcept override;

 private:
  std::string whole_;
  bool seen_ = false;  // by somebody, this operation
  std::optional<at::ThreadLocalState> caller_;
  std::optional<at::ThreadLocalStateGuard> guard_;
  std::array<std::optional<at::RecordFunction>, 5> ranges_;  // [stage]
};

}  // namespace sparsecomm
