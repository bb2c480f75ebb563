#include "transport/thread_board.h"

#include <mutex>
#include <new>
#include <utility>

namespace sparsecomm {
namespace {

// An alarm that can be taken away while it rings.
struct Bell {
  std::mutex mutex;  // held while the alarm runs
  std::function<void()> alarm;

  void ring() {
    std::lock_guard const lock(mutex);
    if (alarm) std::exchange(alarm, {})();
  }
};

struct Shared {
  explicit Shared(int size) : reports(size), statuses(size), bells(size) {}

  std::mutex mutex;  // guards what follows
  std::vector<std::optional<FailureReport>> reports;
  std::uint64_t published = 0;  // by different ranks
  std::vector<std::string> statuses;
  std::optional<std::string> decision;
  bool rung = false;

  std::vector<Bell> bells;
};

class ThreadBoard final : public Board {
 public:
  ThreadBoard(int rank, std::shared_ptr<Shared> shared) : rank_(rank), shared_(std::move(shared)) {}

  bool post_failure(FailureReport const& report) noexcept override try {
    {
      std::lock_guard const lock(shared_->mutex);
      auto& kept = shared_->reports[rank_];
      std::uint64_t const number = kept ? kept->number : ++shared_->published;
      kept = report;
      kept->number = number;
      if (std::exchange(shared_->rung, true)) return true;
    }
    for (Bell& bell : shared_->bells) bell.ring();
    return true;
  } catch (std::bad_alloc const&) {
    return false;
  }

  std::vector<std::optional<FailureReport>> failures() override {
    std::lock_guard const lock(shared_->mutex);
    return shared_->reports;
  }

  void on_failure(std::function<void()> const& alarm) override {
    {
      std::lock_guard const lock(shared_->bells[rank_].mutex);
      shared_->bells[rank_].alarm = alarm;
    }
    std::unique_lock lock(shared_->mutex);
    if (!shared_->rung) return;
    lock.unlock();
    shared_->bells[rank_].ring();
  }

  std::string decide(std::string const& proposal) override {
    std::lock_guard const lock(shared_->mutex);
    if (!shared_->decision) shared_->decision = proposal;
    return *shared_->decision;
  }
  std::optional<std::string> decision() override {
    std::lock_guard const lock(shared_->mutex);
    return shared_->decision;
  }

  void post_status(std::string_view status) noexcept override try {
    std::lock_guard const lock(shared_->mutex);
    shared_->statuses[rank_] = status;
  } catch (std::bad_alloc const&) {
    // The former status stands.
  }
  std::vector<std::string> statuses() override {
    std::lock_guard const lock(shared_->mutex);
    return shared_->statuses;
  }

 private:
  int rank_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace

std::vector<std::shared_ptr<Board>> make_thread_boards(int size) {
  auto const shared = std::make_shared<Shared>(size);
  std::vector<std::shared_ptr<Board>> boards;
  boards.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    boards.push_back(std::make_shared<ThreadBoard>(rank, shared));
  }
  return boards;
}

}  // namespace sparsecomm
