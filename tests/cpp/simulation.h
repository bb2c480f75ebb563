// Threads of which one runs at a time, the next one chosen by a seed, and time that passes when
// none can run: what happens is a function of the seed.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/runtime.h"

namespace sparsecomm::test {

// Threads wait for each other and never end. Says who waits for what.
class Deadlock : public Error {
 public:
  using Error::Error;
};

class SeededSimulation final : public Simulation {
 public:
  explicit SeededSimulation(std::uint64_t seed) : state_(std::make_shared<State>(seed)) {}

  // Threads that have not ended after as many switches would never do so.
  static constexpr std::uint64_t most_switches = 10'000'000;

  // Runs `body` and all threads that it starts to their ends, on threads of their own. Throws what
  // `body` throws, and Deadlock, after which the threads are left as they are, for good.
  void run(std::function<void()> body) {
    std::exception_ptr error;
    std::thread first = start("the first", [&] {
      try {
        body();
      } catch (...) {
        error = std::current_exception();
      }
    });
    std::unique_lock lock(state_->mutex);
    state_->choose();
    state_->hand_over(lock);
    state_->over.wait(lock, [&] { return state_->left == 0 || !state_->deadlock.empty(); });
    if (!state_->deadlock.empty()) {
      first.detach();
      throw Deadlock(state_->deadlock);
    }
    lock.unlock();
    first.join();
    if (error) std::rethrow_exception(error);
  }

  // Two runs in which this is equal are the same.
  std::uint64_t trace() const { return state_->trace; }
  std::uint64_t switches() const { return state_->switches; }
  // Lets another thread run, or this one.
  void yield() {
    std::unique_lock lock(state_->mutex);
    state_->leave(lock, *self(), Thread::Kind::ready, nullptr, {});
  }
  // Drawn by the seed.
  std::uint64_t draw() { return state_->random(); }

  TimePoint now() const override { return state_->now; }
  void wait(Condition const& condition, std::unique_lock<std::mutex>& held,
            TimePoint until) override {
    std::unique_lock lock(state_->mutex);
    held.unlock();  // no other thread runs yet
    self()->what = condition.what();
    state_->leave(lock, *self(), Thread::Kind::waits, &condition, until);
    lock.unlock();
    held.lock();
  }
  void notify_all(Condition const& condition) noexcept override {
    std::lock_guard const lock(state_->mutex);
    state_->wake(&condition);
  }
  void sleep(Duration time) override {
    std::unique_lock lock(state_->mutex);
    self()->what = "time to pass";
    state_->leave(lock, *self(), Thread::Kind::waits, nullptr, state_->now + time);
  }
  std::thread start(char const* name, std::function<void()> body) override {
    std::lock_guard const lock(state_->mutex);
    auto& thread = *state_->threads.emplace_back(std::make_unique<Thread>());
    thread.name = name;
    ++state_->left;
    std::thread real([state = state_, &thread, body = std::move(body)] {
      self() = &thread;
      {
        std::unique_lock own(state->mutex);
        state->await_turn(own, thread);
      }
      body();
      std::unique_lock own(state->mutex);
      thread.kind = Thread::Kind::ended;
      state->wake(&thread);
      --state->left;
      state->choose();
      state->hand_over(own);
    });
    thread.id = real.get_id();
    return real;
  }
  void join(std::thread& real) override {
    std::unique_lock lock(state_->mutex);
    Thread& thread = state_->thread_of(real.get_id());
    self()->what = "the end of a thread";
    while (thread.kind != Thread::Kind::ended) {
      state_->leave(lock, *self(), Thread::Kind::waits, &thread, TimePoint::max());
    }
    thread.id = {};  // may be another's from now on
    lock.unlock();
    real.join();
  }

 private:
  struct Thread {
    enum class Kind : std::uint8_t { ready, waits, ended };

    char const* name = "";
    std::thread::id id;
    Kind kind = Kind::ready;
    void const* place = nullptr;  // where it waits
    char const* what = "";        // for this
    TimePoint until;
    std::condition_variable turn;
  };

  // Of the threads too, which may outlive the simulation after a deadlock.
  struct State {
    explicit State(std::uint64_t seed) : random(seed) {}

    // The rest with the mutex held.
    void wake(void const* place) noexcept {
      for (auto const& thread : threads) {
        if (thread->kind == Thread::Kind::waits && thread->place == place) {
          thread->kind = Thread::Kind::ready;
        }
      }
    }
    void leave(std::unique_lock<std::mutex>& lock, Thread& thread, Thread::Kind kind,
               void const* place, TimePoint until) {
      thread.kind = kind;
      thread.place = place;
      thread.until = until;
      choose();
      if (running == &thread) return;
      hand_over(lock);
      await_turn(lock, thread);
    }
    // Without the mutex, for which the thread would wait at once.
    void hand_over(std::unique_lock<std::mutex>& lock) {
      Thread* const next = running;
      lock.unlock();
      if (next != nullptr) next->turn.notify_one();
      lock.lock();
    }
    void await_turn(std::unique_lock<std::mutex>& lock, Thread& thread) {
      thread.turn.wait(lock, [&] { return running == &thread; });
    }
    // Chooses a thread that can run, once time has passed if none can at once.
    void choose() {
      running = nullptr;
      if (left == 0) return over.notify_all();
      if (switches == most_switches) {
        deadlock = concat("no end after ", switches, " switches; ", describe());
        return over.notify_all();
      }
      std::vector<Thread*> able = able_threads();
      if (able.empty()) {
        TimePoint next = TimePoint::max();
        for (auto const& thread : threads) {
          if (thread->kind == Thread::Kind::waits) next = std::min(next, thread->until);
        }
        if (next == TimePoint::max()) {
          deadlock = concat("deadlock; ", describe());
          return over.notify_all();
        }
        now = next;
        able = able_threads();
      }
      std::size_t const chosen = able.size() == 1 ? 0 : random() % able.size();
      running = able[chosen];
      running->kind = Thread::Kind::ready;
      ++switches;
      note(number_of(*running));
      note(static_cast<std::uint64_t>(now.time_since_epoch().count()));
    }
    std::vector<Thread*> able_threads() const {
      std::vector<Thread*> able;
      for (auto const& thread : threads) {
        bool const late = thread->kind == Thread::Kind::waits && thread->until <= now;
        if (thread->kind == Thread::Kind::ready || late) able.push_back(thread.get());
      }
      return able;
    }
    std::string describe() const {
      std::string text;
      for (auto const& thread : threads) {
        if (thread->kind == Thread::Kind::ended) continue;
        text += concat(text.empty() ? "" : "; ", "thread ", number_of(*thread), " (", thread->name,
                       ") waits for ", thread->what);
      }
      return text;
    }
    Thread& thread_of(std::thread::id id) {
      for (auto const& thread : threads) {
        if (thread->id == id) return *thread;
      }
      throw Error("a thread that the simulation has not started");
    }
    std::size_t number_of(Thread const& thread) const {
      std::size_t number = 0;
      while (threads[number].get() != &thread) ++number;
      return number;
    }
    void note(std::uint64_t value) { trace = (trace ^ value) * 0x9e3779b97f4a7c15 + 1; }

    std::mutex mutex;
    std::mt19937_64 random;
    std::vector<std::unique_ptr<Thread>> threads;
    Thread* running = nullptr;
    std::size_t left = 0;  // of the threads
    TimePoint now{std::chrono::hours(1)};
    std::uint64_t trace = 0, switches = 0;
    std::string deadlock;
    std::condition_variable over;
  };

  static Thread*& self() {
    thread_local Thread* thread = nullptr;
    return thread;
  }

  std::shared_ptr<State> state_;
};

}  // namespace sparsecomm::test
