// Ranks bring many operations that have names, each in an order of its own and from several
// threads; some are cancelled, and some ranks are late.
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
};

// Checks that every operation ran on all ranks or was cancelled on all, with the exact sum, in the
// same order everywhere.
inline void run_many_names(ManyNames const& many) {
  auto const name_of = [](std::size_t i) { return concat("tensor ", i); };
  std::vector<Log> logs(many.ranks);
  // Of each operation: ranks on which it ran, those on which it was cancelled, and those that had
  // been told that it would be.
  std::vector<std::array<std::atomic<int>, 3>> outcomes(many.names * many.steps);
  CommunicatorOptions options = patient_options();
  options.cached_names = many.cached;
  auto const run_rank = [&](Communicator& communicator) {
    int const rank = communicator.rank();
    for (int step = 0; step < many.steps; ++step) {
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
          EXPECT_EQ(sums[i]->sum, i * many.ranks);
          ++ran;
        } catch (Cancelled const&) {
          ++cancelled;
        }
      }
    }
  };
  expect_no_errors(run_ranks(many.ranks, run_rank, options));
  for (Log const& log : logs) EXPECT_EQ(log.names(), logs[0].names());
  int cancelled_in_all = 0;
  for (auto const& [ran, cancelled, told] : outcomes) {
    EXPECT_TRUE((ran == many.ranks && cancelled == 0) || (ran == 0 && cancelled == many.ranks))
        << ran << " and " << cancelled;
    EXPECT_TRUE(told == 0 || cancelled == many.ranks);
    cancelled_in_all += cancelled == many.ranks;
  }
  EXPECT_GT(cancelled_in_all, 0);
}

}  // namespace sparsecomm::test
