// Where the parts of a loop run: in the caller's thread, or in several. Who loops cuts the work
// into parts of a fixed size, whatever the executor, so that no result depends on the number of
// threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

#include "base/never_destroyed.h"

namespace sparsecomm {

// Refers to a callable that outlives the call it is passed to.
template <class Signature>
class FunctionRef;

template <class Result, class... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(F&& f)
      : object_(const_cast<void*>(static_cast<void const*>(std::addressof(f)))),
        call_([](void* object, Arguments... arguments) -> Result {
          return (*static_cast<std::remove_reference_t<F>*>(object))(
              std::forward<Arguments>(arguments)...);
        }) {}

  Result operator()(Arguments... arguments) const {
    return call_(object_, std::forward<Arguments>(arguments)...);
  }

 private:
  void* object_;
  Result (*call_)(void*, Arguments...);
};

class Executor {
 public:
  virtual ~Executor() = default;
  // How many parts may run at the same time, at least 1.
  virtual std::size_t threads() const = 0;
  // Calls part(0) ... part(parts - 1), each once, in any order and in several threads at a time,
  // and returns when all have returned. Parts are threads' work: one that has begun is not
  // suspended until another one ends.
  virtual void parallel(std::size_t parts, FunctionRef<void(std::size_t)> part) const = 0;
};

class InlineExecutor final : public Executor {
 public:
  std::size_t threads() const override { return 1; }
  void parallel(std::size_t parts, FunctionRef<void(std::size_t)> part) const override {
    for (std::size_t i = 0; i < parts; ++i) part(i);
  }
};

inline Executor const& inline_executor() {
  static Executor const* const executor = never_destroyed(InlineExecutor());
  return *executor;
}

// The number of parts of `part_size` that `size` is cut into; the last may be smaller.
constexpr std::size_t part_count(std::size_t size, std::size_t part_size) {
  return size / part_size + (size % part_size != 0);
}

// Calls work(part, worker) for each part; a worker, of which there are at most
// executor.threads(), works on one part at a time.
template <class Work>
void for_each_part(Executor const& executor, std::size_t parts, Work&& work) {
  std::atomic<std::size_t> next = 0;
  executor.parallel(std::min(executor.threads(), parts), [&](std::size_t worker) {
    for (std::size_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      work(part, worker);
    }
  });
}

// For parts whose results are laid one behind another: work(part, worker) as above, then
// claim(part, worker), one part at a time and in their order, then finish(part, worker) while
// others work. None of the three may throw. A part is begun after all before it have been, so who
// waits for its turn waits for threads that run.
template <class Work, class Claim, class Finish>
void for_each_part_in_order(Executor const& executor, std::size_t parts, Work&& work, Claim&& claim,
                            Finish&& finish) {
  std::atomic<std::size_t> turn = 0;
  for_each_part(executor, parts, [&](std::size_t part, std::size_t worker) noexcept {
    work(part, worker);
    for (std::size_t now; (now = turn.load(std::memory_order_acquire)) != part;) {
      turn.wait(now, std::memory_order_acquire);
    }
    claim(part, worker);
    turn.store(part + 1, std::memory_order_release);
    turn.notify_all();
    finish(part, worker);
  });
}

}  // namespace sparsecomm
