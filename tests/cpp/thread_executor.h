// Executors for tests: with threads of their own, and with none of those they promise.
#pragma once

#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "base/executor.h"

namespace sparsecomm {

class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(std::size_t threads) : threads_(threads) {}
  std::size_t threads() const override { return threads_; }
  void parallel(std::size_t parts, FunctionRef<void(std::size_t)> part) const override {
    std::vector<std::thread> all;
    for (std::size_t i = 1; i < parts; ++i) all.emplace_back([part, i] { part(i); });
    if (parts > 0) part(0);
    for (std::thread& thread : all) thread.join();
  }

 private:
  std::size_t threads_;
};

// Promises threads and has none, and begins at the end.
class ReverseExecutor final : public Executor {
 public:
  std::size_t threads() const override { return 3; }
  void parallel(std::size_t parts, FunctionRef<void(std::size_t)> part) const override {
    while (parts > 0) part(--parts);
  }
};

inline std::vector<std::unique_ptr<Executor>> executors() {
  std::vector<std::unique_ptr<Executor>> all;
  for (std::size_t const threads : {1, 2, 3}) {
    all.push_back(std::make_unique<ThreadExecutor>(threads));
  }
  all.push_back(std::make_unique<ReverseExecutor>());
  return all;
}

}  // namespace sparsecomm
