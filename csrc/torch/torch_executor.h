// Kernels on torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <memory>

#include "base/error.h"
#include "base/executor.h"

namespace sparsecomm {

// at::parallel_for may be called from any thread: with OpenMP each has a team of its own, as large
// as torch.set_num_threads() said before the thread's first call; where that is smaller than
// `threads`, its threads take over the others' work.
class TorchExecutor final : public Executor {
 public:
  explicit TorchExecutor(std::size_t threads) : threads_(threads) {}

  std::size_t threads() const override { return threads_; }
  void parallel(std::size_t parts, FunctionRef<void(std::size_t)> part) const override {
    at::parallel_for(0, static_cast<std::int64_t>(parts), 1,
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t i = begin; i < end; ++i) part(static_cast<std::size_t>(i));
                     });
  }

 private:
  std::size_t threads_;
};

inline std::shared_ptr<Executor const> make_executor(std::int64_t threads) {
  require(threads >= 1, "threads = ", threads, " is below 1; 1 stays in the communicator's thread");
  if (threads == 1) return std::make_shared<InlineExecutor>();
  return std::make_shared<TorchExecutor>(static_cast<std::size_t>(threads));
}

}  // namespace sparsecomm
