// Ranks bring many operations that have names, each in an order of its own and from several
// threads; some are cancelled, some ranks are late, and some join before others.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "named_sums.h"
#include "ranks.h"

namespace sparsecomm::test {

struct ManyNames {
  int ranks, threads, steps;
  std::size_t names, cached;

  // All ranks have joined after so many steps, some of them after fewer.
  static constexpr int epoch = 5;
  bool takes_part(int rank, int step) const {
    std::mt19937_64 draw(step / epoch * ranks + rank);
    return step % epoch + static_cast<int>(draw() % 3) < epoch;
  }
  int going(int step) const {
    int count = 0;
    for (int rank = 0; rank < ranks; ++rank) count += takes_part(rank, step);
    return count;
  }
};

// Checks that every operation ran on all ranks that had not joined or was cancelled on them, with
// the exact sum, in the same order everywhere.
inline void run_many_names(ManyNames const& many) {
  auto const name_of = [](std::size_t i) { return concat("tensor ", i); };
  std::vector<Log> logs(many.ranks);
  // Of each operation: ranks on which it ran, those on which it was cancelled, and those that had
  // been told that it would be.
  std::vector<std::array<std::atomic<int>, 3>> outcomes(many.names * many.steps);
  CommunicatorOptions options = patient_options();
  options.cached_names = many.cached;
  std::vector<std::vector<int>> lasts(many.ranks);
  auto const run_rank = [&](Communicator& communicator) {
    int const rank = communicator.rank();
    auto const join = [&] {
      auto const joined = std::make_shared<SumJoin>(&logs[rank]);
      communicator.run(joined);
      lasts[rank].push_back(joined->last());
    };
    for (int step = 0; step < many.steps; ++step) {
      bool const ends = (step + 1) % ManyNames::epoch == 0;
      if (!many.takes_part(rank, step)) {
        if (ends) join();
        continue;
      }
      std::vector<std::size_t> order(many.names);
      std::iota(order.begin(), order.end(), 0);
      std::mt19937_64 draw(rank + many.ranks * step);
      std::ranges::shuffle(order, draw);
      if (draw() % 32 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      std::vector<std::shared_ptr<Sum>> sums(many.names);
      std::vector<Communicator::Handle> handles(many.names);
      auto const bring = [&](int thread) {
        for (std::size_t at = thread; at < many.names; at += many.threads) {
          std::size_t const i = order[at];
          sums[i] = std::make_shared<Sum>(name_of(i), i, i % 2 == 0, &logs[rank]);
          handles[i] = communicator.submit(sums[i], {}, name_of(i));
          if (at % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
          bool const cancels = static_cast<int>(i) % many.ranks == rank && at % 3 == 0;
          if (cancels && handles[i].cancel()) ++outcomes[step * many.names + i][2];
        }
      };
      std::vector<std::thread> others;
      for (int thread = 1; thread < many.threads; ++thread) others.emplace_back(bring, thread);
      bring(0);
      for (std::thread& other : others) other.join();
      for (std::size_t i = 0; i < many.names; ++i) {
        auto& [ran, cancelled, told] = outcomes[step * many.names + i];
        try {
          handles[i].wait();
          EXPECT_EQ(sums[i]->sum, i * many.going(step));
          ++ran;
        } catch (Cancelled const&) {
          ++cancelled;
        }
      }
      if (ends) join();
    }
  };
  expect_no_errors(run_ranks(many.ranks, run_rank, options));
  for (Log const& log : logs) EXPECT_EQ(log.names(), logs[0].names());
  for (auto const& last : lasts) EXPECT_EQ(last, lasts[0]);
  int cancelled_in_all = 0;
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    auto const& [ran, cancelled, told] = outcomes[i];
    int const going = many.going(static_cast<int>(i / many.names));
    EXPECT_TRUE((ran == going && cancelled == 0) || (ran == 0 && cancelled == going))
        << ran << " and " << cancelled << " of " << going;
    EXPECT_TRUE(told == 0 || cancelled == going);
    cancelled_in_all += cancelled > 0;
  }
  EXPECT_GT(cancelled_in_all, 0);
}

}  // namespace sparsecomm::test
