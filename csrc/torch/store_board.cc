#include "store_board.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "store_text.h"
#include "transport/failure_report.h"

namespace sparsecomm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// How long a caller waits for the store.
constexpr Duration answering_time = std::chrono::seconds(1);
constexpr Duration answering_time_per_rank = std::chrono::milliseconds(10);
// Between two looks at the store after a failure.
constexpr Duration shortest_look_pause = std::chrono::milliseconds(1);
constexpr Duration longest_look_pause = std::chrono::milliseconds(500);
constexpr Duration reading_time = std::chrono::seconds(30);
// Only these ranks read the reports at once; the others wait that long for what they decide.
constexpr int deciding_ranks = 16;
constexpr Duration deciding_time = std::chrono::seconds(3);
// Between two looks for an alarm, which are all that a board asks of the store while nothing fails.
constexpr Duration alarm_pause = std::chrono::milliseconds(500);
constexpr Duration alarm_pause_per_rank = std::chrono::milliseconds(1);

constexpr char const* decision_key = "decision";
constexpr char const* alarm_key = "alarm";
constexpr char const* count_key = "reports";
std::string report_key(std::int64_t number) { return concat("report/", number); }
std::string status_key(int rank) { return concat("status/", rank); }

struct Task {
  std::function<void(c10d::Store&)> run;
  enum class State : std::uint8_t { queued, begun, done, failed } state = State::queued;
};

struct Shared {
  Shared(StorePtr the_store, int the_rank, int the_size)
      : store(std::move(the_store)),
        rank(the_rank),
        size(the_size),
        reports(static_cast<std::size_t>(the_size)) {}

  Duration patience() const { return answering_time + size * answering_time_per_rank; }

  StorePtr const store;  // only cloned: its lock may be held by a call that never returns
  int const rank, size;
  std::int64_t number = 0;  // of this rank's report; used by the board's thread alone

  std::mutex alarm_mutex;  // held while the alarm runs
  std::function<void()> alarm;

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::vector<std::optional<FailureReport>> reports;
  std::optional<std::string> decision;
  std::vector<std::string> answers;
  std::deque<std::shared_ptr<Task>> tasks;
  std::thread::id thread;  // of the board's own, if it runs
  bool running = false;
  bool stuck = false;  // a caller has lost patience with the task that runs
  bool asking = false;
  bool watching = false;  // for an alarm
  bool posted = false;    // by this rank: no need to look for an alarm
  bool closed = false;
};

using SharedPtr = std::shared_ptr<Shared>;

// What the board's thread does, over a connection of its own.
class Session {
 public:
  explicit Session(SharedPtr shared) : shared_(std::move(shared)), reader_(shared_->size) {}

  // Runs the tasks, and looks at the store in between, until the board is closed.
  void serve() {
    std::unique_lock lock(shared_->mutex);
    shared_->thread = std::this_thread::get_id();
    for (;;) {
      if (!shared_->tasks.empty()) {
        std::shared_ptr<Task> const task = shared_->tasks.front();
        shared_->tasks.pop_front();
        task->state = Task::State::begun;
        lock.unlock();
        bool const done = perform(task->run);
        lock.lock();
        task->state = done ? Task::State::done : Task::State::failed;
        shared_->stuck = false;
        shared_->changed.notify_all();
        continue;
      }
      if (shared_->closed) return;
      auto const wanted = [&] { return shared_->closed || !shared_->tasks.empty(); };
      if (!shared_->watching && !shared_->posted) {
        shared_->changed.wait(lock, [&] { return wanted() || shared_->watching; });
      } else if (over_) {
        shared_->changed.wait(lock, wanted);
      } else if (!shared_->changed.wait_for(lock, pause(), wanted)) {
        bool const posted = shared_->posted;
        lock.unlock();
        perform([&](c10d::Store& store) { look(store, posted); });
        lock.lock();
      }
    }
  }

 private:
  // Over a new connection if the former one broke. False if the store is gone.
  template <class Run>
  bool perform(Run const& run) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        if (!store_) store_ = shared_->store->clone();
        run(*store_);
        return true;
      } catch (std::exception const&) {
        store_.reset();
      }
    }
    return false;
  }

  Duration pause() {
    if (!failing_ && !shared_->posted) {
      return std::max(alarm_pause, shared_->size * alarm_pause_per_rank);
    }
    return std::exchange(pause_, std::min(2 * pause_, longest_look_pause));
  }

  void look(c10d::Store& store, bool posted) {
    if (!failing_) {
      if (!posted && !store.check({alarm_key})) return;
      failing_.emplace(steady_clock(), reading_time);
      decided_.emplace(steady_clock(), deciding_time);
    }
    {
      std::lock_guard const lock(shared_->alarm_mutex);
      if (shared_->alarm) std::exchange(shared_->alarm, {})();
    }
    read(store);
  }

  // Most ranks of many leave the reports to the first ones.
  void read(c10d::Store& store) {
    std::optional<std::string> decision;
    if (store.check({decision_key})) decision = get_text(store, decision_key);
    if (shared_->rank < deciding_ranks || decided_->passed()) {
      reader_.look(store.add(count_key, 0), [&](int number) -> std::optional<std::string> {
        if (!store.check({report_key(number)})) return std::nullopt;
        return get_text(store, report_key(number));
      });
    }
    over_ = decision || failing_->passed();
    std::lock_guard const lock(shared_->mutex);
    shared_->reports = reader_.reports();
    if (decision) shared_->decision = std::move(decision);
  }

  SharedPtr shared_;
  StorePtr store_;
  ReportReader reader_;
  std::optional<Deadline> failing_, decided_;  // since this rank knows of a failure
  Duration pause_ = shortest_look_pause;
  bool over_ = false;  // nothing more is to be read
};

// With the lock held.
void start(SharedPtr const& shared) {
  if (shared->running) return;
  std::thread([shared] { Session(shared).serve(); }).detach();
  shared->running = true;
}

void enqueue(SharedPtr const& shared, std::function<void(c10d::Store&)> run) {
  std::lock_guard const lock(shared->mutex);
  shared->tasks.push_back(std::make_shared<Task>(std::move(run)));
  start(shared);
  shared->changed.notify_all();
}

// Waits for the task, but no longer than callers do. Behind one that is stuck it is dropped at
// once, unless it shall run whenever the store answers. False if it failed or was dropped; true if
// it ran, or may yet.
bool perform(SharedPtr const& shared, std::function<void(c10d::Store&)> run, bool at_last = false) {
  auto const task = std::make_shared<Task>(std::move(run));
  std::unique_lock lock(shared->mutex);
  if (shared->stuck && !at_last) return false;
  shared->tasks.push_back(task);
  start(shared);
  shared->changed.notify_all();
  if (shared->thread == std::this_thread::get_id()) return true;  // the alarm, which nobody awaits
  shared->changed.wait_for(lock, shared->stuck ? Duration::zero() : shared->patience(), [&] {
    return task->state == Task::State::done || task->state == Task::State::failed;
  });
  if (task->state == Task::State::begun || task->state == Task::State::queued) {
    shared->stuck = true;
  }
  return task->state != Task::State::failed;
}

class StoreBoard final : public Board {
 public:
  explicit StoreBoard(SharedPtr shared) : shared_(std::move(shared)) {}

  ~StoreBoard() override {
    on_failure({});
    {
      std::lock_guard const lock(shared_->mutex);
      shared_->closed = true;
    }
    shared_->changed.notify_all();
  }

  bool post_failure(FailureReport const& report) noexcept override {
    try {
      std::string text = concat(shared_->rank, '\n', serialize_report(report));
      return perform(shared_, [shared = shared_, text = std::move(text)](c10d::Store& store) {
        if (shared->number == 0) shared->number = store.add(count_key, 1);
        set_text(store, report_key(shared->number), text);
        set_text(store, alarm_key, "");
        std::lock_guard const lock(shared->mutex);
        shared->posted = true;
      });
    } catch (std::exception const&) {
      return false;  // no memory for the report, or no thread: the others go by what they saw
    }
  }

  std::vector<std::optional<FailureReport>> failures() override {
    std::lock_guard const lock(shared_->mutex);
    return shared_->reports;
  }
  Duration patience() const override {
    bool const others_decide = shared_->size > deciding_ranks;
    return (others_decide ? deciding_time : Duration::zero()) + shared_->patience();
  }

  void on_failure(std::function<void()> const& alarm) override {
    {
      std::lock_guard const lock(shared_->alarm_mutex);
      shared_->alarm = alarm;
      if (!shared_->alarm) return;
    }
    std::lock_guard const lock(shared_->mutex);
    shared_->watching = true;
    start(shared_);
    shared_->changed.notify_all();
  }

  std::string decide(std::string const& proposal) override {
    auto const propose = [shared = shared_, proposal](c10d::Store& store) {
      std::string decision = replace_text(store, decision_key, "", proposal);
      std::lock_guard const lock(shared->mutex);
      shared->decision = std::move(decision);
    };
    // At last: it follows this rank's report, should the store answer again.
    perform(shared_, propose, true);
    std::lock_guard const lock(shared_->mutex);
    return shared_->decision.value_or(proposal);
  }
  std::optional<std::string> decision() override {
    std::lock_guard const lock(shared_->mutex);
    return shared_->decision;
  }

  void post_status(std::string_view status) noexcept override {
    try {
      enqueue(shared_, [shared = shared_, text = std::string(status)](c10d::Store& store) {
        set_text(store, status_key(shared->rank), text);
      });
    } catch (std::exception const&) {
      // No thread to be had: this rank says nothing.
    }
  }

  std::vector<std::string> statuses() override {
    std::vector<std::string> answers(static_cast<std::size_t>(shared_->size));
    {
      std::lock_guard const lock(shared_->mutex);
      if (shared_->asking) return answers;  // a question is still outstanding
      if (!shared_->answers.empty()) answers = std::exchange(shared_->answers, {});
      shared_->asking = true;
    }
    try {
      enqueue(shared_, [shared = shared_](c10d::Store& store) { ask(*shared, store); });
    } catch (std::exception const&) {
      std::lock_guard const lock(shared_->mutex);
      shared_->asking = false;
    }
    return answers;
  }

 private:
  static void ask(Shared& shared, c10d::Store& store) {
    std::vector<std::string> found(static_cast<std::size_t>(shared.size));
    try {
      for (int rank = 0; rank < shared.size; ++rank) {
        std::string const key = status_key(rank);
        if (store.check({key})) found[static_cast<std::size_t>(rank)] = get_text(store, key);
      }
    } catch (std::exception const&) {
      // The board is gone: what has been read is what there is.
    }
    std::lock_guard const lock(shared.mutex);
    shared.answers = std::move(found);
    shared.asking = false;
  }

  SharedPtr shared_;
};

}  // namespace

std::shared_ptr<Board> make_store_board(c10::intrusive_ptr<c10d::Store> store, int rank, int size) {
  return std::make_shared<StoreBoard>(std::make_shared<Shared>(std::move(store), rank, size));
}

}  // namespace sparsecomm
