// Ranks that are threads of this process, joined by the transport over UCX.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <tuple>

#include "ranks.h"
#include "transport/thread_board.h"
#include "transport/ucx.h"

namespace sparsecomm::test {

// What the threads share.
struct Meeting {
  explicit Meeting(int size) : round(size), boards(make_thread_boards(size)), size(size) {}
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::vector<std::string>> rounds;
  std::vector<std::size_t> round;  // how many each rank has entered
  std::vector<std::shared_ptr<Board>> boards;
  int size;
};

class ThreadRendezvous final : public Rendezvous {
 public:
  ThreadRendezvous(int rank, std::shared_ptr<Meeting> meeting)
      : rank_(rank), meeting_(std::move(meeting)) {}

  std::string decide(std::string const& own, Conclude const& conclude) override {
    return conclude(allgather(own));
  }
  std::vector<std::string> exchange(std::string const& own, std::span<const int> wanted) override {
    std::vector<std::string> const all = allgather(own);
    std::vector<std::string> words;
    for (int const rank : wanted) words.push_back(all[rank]);
    return words;
  }
  std::vector<std::string> allgather(std::string const& own) {
    std::unique_lock lock(meeting_->mutex);
    std::size_t const round = meeting_->round[rank_]++;
    if (meeting_->rounds.size() <= round) meeting_->rounds.resize(round + 1);
    meeting_->rounds[round].resize(meeting_->size);
    meeting_->rounds[round][rank_] = own;
    meeting_->changed.notify_all();
    bool const met = meeting_->changed.wait_for(lock, long_time(), [&] {
      return std::ranges::all_of(meeting_->round, [&](std::size_t n) { return n > round; });
    });
    require<Error>(met, "not all ranks came");
    return meeting_->rounds[round];
  }
  void check() const override {}
  Board& board() override { return *meeting_->boards[rank_]; }

 private:
  int rank_;
  std::shared_ptr<Meeting> meeting_;
};

inline UcxOptions ucx_options_here() {
  UcxOptions options;
#ifdef SPARSECOMM_UCX_WHEEL
  options.alternatives = {SPARSECOMM_UCX_WHEEL};
#endif
  return options;
}

// UCX loads its modules when first used. That is done here before there are other threads: the
// thread sanitizer reads the wrong size of a thread that starts while a module is loaded, and dies.
inline void load_ucx_modules() {
  static bool const loaded = [] {
    auto const alone = std::make_shared<Meeting>(1);
    make_ucx_transport(0, 1, std::make_shared<ThreadRendezvous>(0, alone), ucx_options_here());
    return true;
  }();
  std::ignore = loaded;
}

inline std::vector<std::unique_ptr<Transport>> make_ucx_transports(int size) {
  load_ucx_modules();
  auto const meeting = std::make_shared<Meeting>(size);
  std::vector<std::unique_ptr<Transport>> transports(size);
  expect_no_errors(on_threads(size, [&](int rank) {
    transports[rank] = make_ucx_transport(
        rank, size, std::make_shared<ThreadRendezvous>(rank, meeting), ucx_options_here());
  }));
  return transports;
}

}  // namespace sparsecomm::test
