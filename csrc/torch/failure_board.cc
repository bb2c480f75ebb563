#include "failure_board.h"

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "transport/failure_report.h"

namespace sparsecomm {
namespace {

std::string board_key(int rank) { return concat("failure/", rank); }
std::string status_key(int rank) { return concat("status/", rank); }

}  // namespace

struct FailureBoard::Shared {
  c10::intrusive_ptr<c10d::Store> store;
  std::mutex mutex;  // guards what follows
  std::vector<std::optional<FailureReport>> reports;
  bool closed = false;
  bool asking = false;
  std::vector<std::string> answers;

  // Reads until every rank has reported or nobody asks any more.
  void read() {
    ReportReader reader(static_cast<int>(reports.size()));
    for (;;) {
      reader.look([&](int rank) -> std::optional<std::string> {
        if (!store->check({board_key(rank)})) return std::nullopt;
        return store->get_to_str(board_key(rank));
      });
      {
        std::lock_guard const lock(mutex);
        reports = reader.reports();
        if (closed || reader.complete()) return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void ask() {
    std::vector<std::string> found(reports.size());
    try {
      auto const own = store->clone();
      for (std::size_t rank = 0; rank < found.size(); ++rank) {
        std::string const key = status_key(static_cast<int>(rank));
        if (own->check({key})) found[rank] = own->get_to_str(key);
      }
    } catch (std::exception const&) {
      // The board is gone: what has been read is what there is.
    }
    std::lock_guard const lock(mutex);
    answers = std::move(found);
    asking = false;
  }
};

FailureBoard::FailureBoard(c10::intrusive_ptr<c10d::Store> store, int size)
    : shared_(std::make_shared<Shared>()) {
  shared_->store = std::move(store);
  shared_->reports.resize(size);
}

FailureBoard::~FailureBoard() {
  std::lock_guard const lock(shared_->mutex);
  shared_->closed = true;
}

void FailureBoard::post(int rank, FailureReport const& report) noexcept {
  try {
    shared_->store->set(board_key(rank), serialize_report(report));
  } catch (std::exception const&) {
    // The board is gone, most likely with the rank that served it: each survivor judges by itself.
  }
}

void FailureBoard::post_status(int rank, std::string_view status) noexcept {
  try {
    shared_->store->set(status_key(rank), std::string(status));
  } catch (std::exception const&) {
    // As above.
  }
}

std::vector<std::string> FailureBoard::statuses() noexcept {
  std::vector<std::string> answers(shared_->reports.size());
  std::lock_guard const lock(shared_->mutex);
  if (shared_->asking) return answers;  // in vain so far
  if (!shared_->answers.empty()) answers = std::exchange(shared_->answers, {});
  try {
    std::thread([shared = shared_] { shared->ask(); }).detach();
    shared_->asking = true;
  } catch (std::exception const&) {
    // No thread to be had.
  }
  return answers;
}

std::vector<std::optional<FailureReport>> FailureBoard::reports() noexcept {
  if (!std::exchange(reading_, true)) {
    try {
      std::thread([shared = shared_] {
        try {
          shared->read();
        } catch (std::exception const&) {
          // As above.
        }
      }).detach();
    } catch (std::exception const&) {
      // No thread to be had: as above.
    }
  }
  std::lock_guard const lock(shared_->mutex);
  return shared_->reports;
}

}  // namespace sparsecomm
