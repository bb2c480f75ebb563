#include "failure_board.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "transport/failure_report.h"

namespace sparsecomm {
namespace {

std::string board_key(int rank) { return concat("failure/", rank); }

}  // namespace

struct FailureBoard::Shared {
  c10::intrusive_ptr<c10d::Store> store;
  std::mutex mutex;  // guards what follows
  std::vector<std::optional<FailureReport>> reports;
  bool closed = false;

  // Reads until every rank has reported or nobody asks any more.
  void read() {
    auto const size = static_cast<int>(reports.size());
    std::vector<bool> known(size, false);
    for (;;) {
      for (int rank = 0; rank < size; ++rank) {
        if (known[rank] || !store->check({board_key(rank)})) continue;
        auto const bytes = store->get(board_key(rank));
        auto report =
            parse_report({reinterpret_cast<char const*>(bytes.data()), bytes.size()}, size);
        known[rank] = true;
        std::lock_guard const lock(mutex);
        reports[rank] = std::move(report);
      }
      {
        std::lock_guard const lock(mutex);
        if (closed || std::ranges::all_of(known, std::identity())) return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
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
