// Ranks that have run out of data join while others go on.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/communicator.h"
#include "named_sums.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

// The sum of `number` on all ranks that have not joined.
std::uint64_t sum_of(Communicator& communicator, std::string const& name, std::uint64_t number,
                     bool by_payload, int priority = 0) {
  auto const sum =
      std::make_shared<Sum>(name.empty() ? "sum" : name, number, by_payload, nullptr, !by_payload);
  communicator.run(sum, nullptr, name, priority);
  return sum->sum;
}

int join(Communicator& communicator) {
  auto const joined = std::make_shared<SumJoin>();
  communicator.run(joined);
  return joined->last();
}

template <class Error, class Body>
std::string expect_throws(Body const& body) {
  try {
    body();
  } catch (Error const& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// The ranks that are accused by what it throws.
template <class Body>
std::vector<int> culprits_of(Body const& body) {
  try {
    body();
  } catch (PeerError const& error) {
    return error.ranks();
  }
  return {};
}

// A rank joins after so many steps.
int steps_of(int rank) { return 3 + (rank * 5) % 7; }

TEST(JoinTest, OthersGoOnAndAllEndTogether) {
  for (int const ranks : {1, 2, 3, 5, 8}) {
    int most = 0;
    for (int rank = 0; rank < ranks; ++rank) most = std::max(most, steps_of(rank));
    std::vector<std::array<int, 2>> lasts(ranks);
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      int const rank = communicator.rank();
      for (int epoch = 0; epoch < 2; ++epoch) {
        for (int step = 0; step < steps_of(rank); ++step) {
          std::uint64_t expected = 0;
          for (int other = 0; other < ranks; ++other) {
            if (step < steps_of(other)) expected += static_cast<std::uint64_t>(other + step);
          }
          auto const number = static_cast<std::uint64_t>(rank + step);
          EXPECT_EQ(sum_of(communicator, "payload", number, true), expected);
          EXPECT_EQ(sum_of(communicator, "messages", number, false, 7), expected);
          EXPECT_EQ(sum_of(communicator, "", number, true), expected);
          EXPECT_EQ(sum_of(communicator, "", number, false), expected);
          EXPECT_EQ(sum_of(communicator, concat("new in ", step), number, true, -step), expected);
        }
        lasts[rank][epoch] = join(communicator);
      }
    }));
    for (auto const& last : lasts) {
      EXPECT_EQ(last, lasts[0]);
      EXPECT_EQ(steps_of(last[0]), most);
      EXPECT_EQ(steps_of(last[1]), most);
    }
  }
}

// Operations that are pending on a rank when it joins run first.
TEST(JoinTest, TakesPartOnceNothingElseIsPending) {
  constexpr int ranks = 3;
  std::vector<Log> logs(ranks);
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    int const rank = communicator.rank();
    std::vector<std::shared_ptr<Sum>> sums;
    std::vector<Communicator::Handle> handles;
    int const first = rank == 0 ? 3 : 0;  // of the names that it brings
    for (int i = first; i < 6; ++i) {
      sums.push_back(std::make_shared<Sum>(concat("tensor ", i), 1, i % 2 == 0, &logs[rank]));
      handles.push_back(communicator.submit(sums.back(), {}, concat("tensor ", i)));
    }
    auto const joined = std::make_shared<SumJoin>(&logs[rank]);
    communicator.run(joined);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      EXPECT_TRUE(handles[i].done());
      EXPECT_EQ(sums[i]->sum, first + static_cast<int>(i) < 3 ? 2u : 3u);
    }
  }));
  for (Log const& log : logs) {
    EXPECT_EQ(log.names(), logs[0].names());
    EXPECT_EQ(log.names().size(), 6u);
  }
}

// Nothing runs between the two, and in the second one all ranks join in one round.
TEST(JoinTest, TheLastOfAnEarlierJoinIsForgotten) {
  constexpr int ranks = 3;
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    if (communicator.rank() == 0) {
      EXPECT_EQ(sum_of(communicator, "a", 5, true), 5u);
    }
    EXPECT_EQ(join(communicator), 0);
    EXPECT_EQ(join(communicator), ranks - 1);
  }));
}

// Counts the messages of a rank for an operation that has a payload and sends nothing else.
TEST(JoinTest, ARoundTakesThreeMoreAllgathers) {
  for (int const ranks : {2, 4, 5, 8}) {
    auto const rounds = std::bit_width(static_cast<unsigned>(ranks - 1));
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      int const rank = communicator.rank();
      auto const messages = [&] { return Counters::total(communicator.counters().sent_messages); };
      for (int i = 0; i < 5; ++i) sum_of(communicator, "a", 1, true);
      auto before = messages();
      sum_of(communicator, "a", 1, true);
      EXPECT_EQ(messages() - before, 1u * rounds) << "the payload goes with the standings";
      if (rank > 0) {
        for (int i = 0; i < 5; ++i) sum_of(communicator, "a", 1, true);
        before = messages();
        sum_of(communicator, "a", 1, true);
        // As before, and once more without those of ranks that have joined, names, and payloads.
        EXPECT_EQ(messages() - before, 5u * rounds);
      }
      join(communicator);
    }));
  }
}

TEST(JoinTest, MakesStandInsOfWhatAllOthersBring) {
  expect_no_errors(run_ranks(3, [&](Communicator& communicator) {
    int const rank = communicator.rank();
    if (rank == 0) {
      auto const joined = std::make_shared<SumJoin>();
      communicator.run(joined);
      EXPECT_EQ(joined->made, 6);
      return;
    }
    auto const x = std::make_shared<Sum>("x", 1, true, nullptr, false);
    Communicator::Handle handle;
    if (rank == 1) handle = communicator.submit(x, {}, "x");
    for (int i = 0; i < 5; ++i) EXPECT_EQ(sum_of(communicator, "a", 1, true), 2u);
    if (rank == 2) handle = communicator.submit(x, {}, "x");
    handle.wait();
    EXPECT_EQ(x->sum, 2u);
    join(communicator);
  }));
}

TEST(JoinTest, EndsIfTheCommunicatorIsClosed) {
  std::barrier together(2);
  auto const errors = run_ranks(2, [&](Communicator& communicator) {
    sum_of(communicator, "a", 1, true);
    together.arrive_and_wait();
    if (communicator.rank() == 1) return;
    auto const joining = communicator.submit(std::make_shared<SumJoin>());
    communicator.close();
    EXPECT_THROW(joining.wait(), Error);
    EXPECT_THROW(join(communicator), Aborted);
  });
  expect_no_errors(errors);
}

TEST(JoinTest, NothingElseIsTakenUntilItHasEnded) {
  std::barrier submitted(2);
  expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 0) {
      auto const handle = communicator.submit(std::make_shared<SumJoin>());
      auto const run = [&](std::string const& name) { sum_of(communicator, name, 1, true); };
      EXPECT_THROW(run("a"), InvalidArgument);
      EXPECT_THROW(run(""), InvalidArgument);
      EXPECT_THROW(communicator.submit(std::make_shared<SumJoin>()), InvalidArgument);
      submitted.arrive_and_wait();
      handle.wait();
    } else {
      submitted.arrive_and_wait();
      EXPECT_EQ(sum_of(communicator, "a", 7, true), 7u);
      join(communicator);
    }
    EXPECT_EQ(sum_of(communicator, "a", 7, true), 14u);
  }));
}

TEST(JoinTest, WhatNoneStandsInForFailsOnAllRanks) {
  constexpr int ranks = 3;
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    if (communicator.rank() != 1) {
      for (std::string const name : {"a", "", "b"}) {
        auto const text = expect_throws<Mismatch>(
            [&] { communicator.run(std::make_shared<Quiet>("quiet"), nullptr, name); });
        EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
        EXPECT_NE(text.find("no sum is"), std::string::npos) << text;
      }
      EXPECT_EQ(sum_of(communicator, "a", 7, true), 14u);
    }
    join(communicator);
    communicator.run(std::make_shared<Quiet>("quiet"), nullptr, "a");
  }));
}

TEST(JoinTest, RanksThatDisagreeAndThoseThatFailOrCancel) {
  constexpr int ranks = 4;
  class Failing final : public Operation {
   public:
    Proposal prepare() override { throw InvalidArgument("out of paper"); }
    void run(Channel& /*channel*/, Agreement const& /*agreement*/) override {}
  };
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    int const rank = communicator.rank();
    if (rank != 2) {
      for (std::string const name : {"x", ""}) {
        auto const text = expect_throws<Mismatch>([&] {
          communicator.run(std::make_shared<Sum>(concat("sum of ", rank == 3), 1, true), nullptr,
                           name);
        });
        EXPECT_NE(text.find("sum of 1 on rank 3"), std::string::npos) << text;
        auto const others = expect_throws<Mismatch>(
            [&] { communicator.run(std::make_shared<Failing>(), nullptr, name); });
        EXPECT_NE(others.find("rank 3 failed before the exchange"), std::string::npos) << others;
        EXPECT_EQ(others.find("rank 2"), std::string::npos) << others;
      }
      auto const handle = communicator.submit(std::make_shared<Sum>("y", 1, true), {}, "y");
      if (rank == 0) handle.cancel();
      try {
        handle.wait();
      } catch (Cancelled const&) {
      }
      EXPECT_EQ(sum_of(communicator, "y", 1, true), 3u);
    }
    join(communicator);
    EXPECT_EQ(sum_of(communicator, "y", 1, true), 4u);
  }));
}

// On all ranks, as any operation.
TEST(JoinTest, CanBeCancelled) {
  std::barrier cancelled(2);
  expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
    auto const gate = std::make_shared<Gate>();
    auto const holding = communicator.submit(gate);
    gate->await();
    if (communicator.rank() == 0) {
      auto const handle = communicator.submit(std::make_shared<SumJoin>());
      EXPECT_TRUE(handle.cancel());
      gate->open();
      EXPECT_EQ(sum_of(communicator, "a", 1, true), 2u);
      cancelled.arrive_and_wait();
      EXPECT_THROW(handle.wait(), Cancelled);
    } else {
      gate->open();
      EXPECT_EQ(sum_of(communicator, "a", 1, true), 2u);
      cancelled.arrive_and_wait();
      EXPECT_THROW(join(communicator), Cancelled);
    }
    EXPECT_EQ(sum_of(communicator, "a", 1, true), 2u);
    join(communicator);
  }));
}

// An operation that is cancelled on a rank that joins stays pending until all have brought it.
TEST(JoinTest, DoesNotWaitForWhatWasCancelled) {
  std::barrier together(2);
  expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
    auto const submit = [&] {
      return communicator.submit(std::make_shared<Sum>("x", 1, true), {}, "x");
    };
    auto const gate = std::make_shared<Gate>();
    auto const holding = communicator.submit(gate);
    gate->await();
    if (communicator.rank() == 0) {
      auto const handle = submit();
      EXPECT_TRUE(handle.cancel());
      auto const joining = communicator.submit(std::make_shared<SumJoin>());
      gate->open();
      together.arrive_and_wait();
      joining.wait();
      EXPECT_FALSE(handle.done());
      together.arrive_and_wait();
      auto const again = std::make_shared<SumJoin>();
      communicator.run(again);
      EXPECT_TRUE(handle.done());
      EXPECT_THROW(handle.wait(), Cancelled);
    } else {
      gate->open();
      together.arrive_and_wait();
      join(communicator);
      together.arrive_and_wait();
      EXPECT_THROW(submit().wait(), Cancelled);
      EXPECT_EQ(sum_of(communicator, "x", 1, true), 1u);
      join(communicator);
    }
    EXPECT_EQ(sum_of(communicator, "x", 1, true), 2u);
  }));
}

// Stands in for gates, too.
class GateJoin final : public Join {
 public:
  explicit GateJoin(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}
  Pending stand_in(std::string_view description) override {
    if (description == "operation=gate") return {.operation = gate_};
    return sums_.stand_in(description);
  }

 private:
  std::shared_ptr<Gate> gate_;
  SumJoin sums_;
};

// A join that is cancelled while stand-ins of its round still run.
TEST(JoinTest, StandInsDoNotTakeTheNamesOfTheirRank) {
  std::barrier together(2);
  expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
    auto const first = std::make_shared<Gate>();
    auto const held = communicator.submit(first, {}, "first");
    first->await();
    auto const gate = std::make_shared<Gate>();
    auto const submit = [&] {
      auto const sum = std::make_shared<Sum>("y", 1, true, nullptr, false);
      return std::pair(sum, communicator.submit(sum, {}, "y"));
    };
    if (communicator.rank() == 0) {
      auto const joining = communicator.submit(std::make_shared<GateJoin>(gate));
      first->open();
      gate->await();
      EXPECT_TRUE(joining.cancel());
      auto const y = submit();
      gate->open();
      together.arrive_and_wait();
      y.second.wait();
      EXPECT_EQ(y.first->sum, 2u);
      EXPECT_THROW(joining.wait(), Cancelled);
    } else {
      auto const holding = communicator.submit(gate, {}, "x");
      auto const y = submit();
      first->open();
      gate->await();
      gate->open();
      y.second.wait();
      EXPECT_EQ(y.first->sum, 1u);
      together.arrive_and_wait();
      auto const again = submit();
      again.second.wait();
      EXPECT_EQ(again.first->sum, 2u);
      EXPECT_THROW(join(communicator), Cancelled);
    }
  }));
}

CommunicatorOptions short_deadline() {
  CommunicatorOptions options = patient_options();
  options.timeout = patiently(std::chrono::milliseconds(800));
  return options;
}

// Whether the others wait for it in a round, or idle after one that has left their joins pending.
TEST(JoinTest, ARankThatDoesNothingMoreEndsWithTheDeadline) {
  constexpr int ranks = 3;
  for (bool const idle : {false, true}) {
    std::barrier ended(ranks);
    std::vector<std::vector<int>> culprits(ranks);
    expect_no_errors(run_ranks(
        ranks,
        [&](Communicator& communicator) {
          int const rank = communicator.rank();
          sum_of(communicator, "a", 1, true);
          if (rank == 1) {
            if (idle) sum_of(communicator, "b", 1, true);
          } else {
            culprits[rank] = culprits_of([&] { join(communicator); });
            EXPECT_THROW(join(communicator), Aborted);
          }
          ended.arrive_and_wait();
        },
        short_deadline()));
    EXPECT_EQ(culprits[0], std::vector{1}) << idle;
    EXPECT_EQ(culprits[2], std::vector{1}) << idle;
  }
}

// It is the one that has neither joined nor brought it.
TEST(JoinTest, WhoeverLacksANameIsNamed) {
  constexpr int ranks = 4;
  std::barrier ended(ranks);
  std::vector<std::vector<int>> culprits(ranks);
  expect_no_errors(run_ranks(
      ranks,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        sum_of(communicator, "a", 1, true);
        if (rank == 0) {
          culprits[rank] = culprits_of([&] { join(communicator); });
        } else if (rank == 3) {
          sum_of(communicator, "a", 1, true);  // a round that leaves the other name pending
        } else {
          auto const lacking =
              communicator.submit(std::make_shared<Sum>("b", 1, true, nullptr, false), {}, "b");
          sum_of(communicator, "a", 1, true);
          culprits[rank] = culprits_of([&] { lacking.wait(); });
        }
        ended.arrive_and_wait();
      },
      short_deadline()));
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(culprits[rank], std::vector{3});
}

TEST(JoinTest, IsNotLateWhileOthersGoOn) {
  auto const options = short_deadline();
  expect_no_errors(run_ranks(
      2,
      [&](Communicator& communicator) {
        if (communicator.rank() == 1) {
          auto const end = std::chrono::steady_clock::now() + 2 * options.timeout;
          while (std::chrono::steady_clock::now() < end) {
            EXPECT_EQ(sum_of(communicator, "a", 3, false), 3u);
            std::this_thread::sleep_for(options.timeout / 4);
          }
        }
        EXPECT_EQ(join(communicator), 1);
      },
      options));
}

}  // namespace
}  // namespace sparsecomm::test
