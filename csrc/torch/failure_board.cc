#include "failure_board.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

namespace sparsecomm {
namespace {

std::string board_key(int rank) { return concat("failure/", rank); }

std::vector<std::uint8_t> serialize(FailureReport const& report) {
  std::ostringstream out;
  out << report.operation << ' ' << int(report.cause) << ' ' << report.suspects.size();
  for (int const rank : report.suspects) out << ' ' << rank;
  for (auto const count : report.sent) out << ' ' << count;
  for (auto const count : report.received) out << ' ' << count;
  out << '\n' << report.text;
  std::string const text = out.str();
  return {text.begin(), text.end()};
}

// Null where the bytes are not a report of one of `size` ranks.
std::optional<FailureReport> parse_report(std::vector<std::uint8_t> const& bytes, int size) {
  std::istringstream in(std::string(bytes.begin(), bytes.end()));
  FailureReport report;
  int cause = -1;
  std::size_t suspects = 0;
  in >> report.operation >> cause >> suspects;
  if (!in || cause < 0 || cause > int(FailureReport::Cause::invalid) ||
      suspects > static_cast<std::size_t>(size)) {
    return std::nullopt;
  }
  report.cause = static_cast<FailureReport::Cause>(cause);
  report.suspects.resize(suspects);
  for (int& rank : report.suspects) {
    in >> rank;
    if (!in || rank < 0 || rank >= size) return std::nullopt;
  }
  report.sent.resize(size);
  report.received.resize(size);
  for (auto* const counts : {&report.sent, &report.received}) {
    for (std::uint64_t& count : *counts) in >> count;
  }
  if (!in) return std::nullopt;
  in.get();
  report.text.assign(std::istreambuf_iterator<char>(in), {});
  return report;
}

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
        auto report = parse_report(store->get(board_key(rank)), size);
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
    shared_->store->set(board_key(rank), serialize(report));
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
