// Operations with names, which ranks submit in any order.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/communicator.h"
#include "engine/gradient_exchange.h"
#include "engine/names_of_ranks.h"
#include "engine/payload.h"
#include "engine/response_cache.h"
#include "engine/standings.h"
#include "many_names.h"
#include "named_sums.h"
#include "ranks.h"
#include "transport/wrapped.h"

namespace sparsecomm::test {
namespace {

CommunicatorOptions cached(std::size_t names = 1024) {
  CommunicatorOptions options = patient_options();
  options.cached_names = names;
  return options;
}

std::string name_of(std::size_t i) { return concat("tensor ", i); }

TEST(ResponseCacheTest, GivesNumbersAndTakesThoseOfTheLeastRecentlyUsed) {
  ResponseCache cache(2);
  auto const any = [](ResponseCache::Id) { return true; };
  EXPECT_EQ(cache.add("a", any), 0u);
  EXPECT_EQ(cache.add("b", any), 1u);
  cache.set_agreed(1, ResponseCache::Proposed{.key = 7});
  cache.use(0);
  EXPECT_EQ(cache.add("c", any), 1u);
  EXPECT_FALSE(cache.agreed(1)) << "what b had";
  EXPECT_FALSE(cache.find("b"));
  EXPECT_EQ(cache.find("c"), 1u);
  EXPECT_EQ(cache.add("d", [](ResponseCache::Id id) { return id != 0; }), 1u);
  EXPECT_EQ(cache.add("e", [](ResponseCache::Id) { return false; }), 2u) << "all are in use";
  EXPECT_EQ(cache.size(), 3u);
  EXPECT_EQ(cache.find("a"), 0u);
  EXPECT_THROW(ResponseCache(0), InvalidArgument);
}

TEST(StandingsTest, MeetAsTheyShall) {
  constexpr Standing all[] = {Standing::mixed, Standing::absent, Standing::changed,
                              Standing::ready};
  auto const expected = [](std::vector<Standing> const& standings) {
    auto const every = [&](auto... wanted) {
      return std::ranges::all_of(standings, [&](Standing one) { return ((one == wanted) || ...); });
    };
    if (every(Standing::absent)) return Standing::absent;
    if (every(Standing::ready)) return Standing::ready;
    if (every(Standing::ready, Standing::changed)) return Standing::changed;
    return Standing::mixed;
  };
  for (int i = 0; i < 8; ++i) {
    int const ranks = std::array{1, 2, 3, 5}[i / 2];
    bool const with_riders = i % 2 == 1;
    auto const transports = make_inproc_transports(ranks);
    expect_no_errors(on_threads(ranks, [&](int rank) {
      Channel channel(*transports[rank], 1, Deadline(steady_clock(), long_time()));
      auto const standing_on = [&](int one, std::size_t operation) {
        return all[(operation >> (2 * (one % 3))) % 4];
      };
      Standings standings;
      standings.reset(70);
      for (std::size_t i = 0; i < 70; ++i) standings.set(i, standing_on(rank, i));
      standings.set(AllFlag::has_unnamed, true);
      standings.set(AllFlag::completes, rank == 0);
      standings.set(AnyFlag::late, rank == 0);
      standings.set_batches(rank == ranks - 1 ? 0xfffffff5 : 7);
      standings.set_steps(260);
      if (with_riders) {
        std::vector<std::byte> const own(rank, std::byte(rank));
        std::vector<std::span<const std::byte>> arrived;
        standings.allreduce_with(channel, own, ranks - 1, arrived);
        ASSERT_EQ(arrived.size(), static_cast<std::size_t>(ranks));
        for (int one = 0; one < ranks; ++one) {
          std::vector<std::byte> const sent(one, std::byte(one));
          EXPECT_TRUE(std::ranges::equal(arrived[one], sent)) << one;
        }
      } else {
        standings.allreduce(channel);
      }
      std::set<std::size_t> mixed;
      for (std::size_t i = 0; i < 70; ++i) {
        std::vector<Standing> each;
        for (int one = 0; one < ranks; ++one) each.push_back(standing_on(one, i));
        EXPECT_EQ(standings.of(i), expected(each)) << i << " of " << ranks;
        if (expected(each) == Standing::mixed) mixed.insert(i);
      }
      std::set<std::size_t> found;
      standings.for_each_mixed([&](std::size_t i) { found.insert(i); });
      EXPECT_EQ(found, mixed);
      EXPECT_TRUE(standings.holds(AllFlag::has_unnamed));
      EXPECT_EQ(standings.holds(AllFlag::completes), ranks == 1);
      EXPECT_TRUE(standings.holds(AnyFlag::late));
      EXPECT_FALSE(standings.holds(AnyFlag::has_new));
      EXPECT_EQ(standings.batches_agree(), ranks == 1);
      EXPECT_TRUE(standings.steps_agree());
      standings.reset(0);
      standings.set_batches(1 << 20);
      standings.set_steps(rank);
      standings.allreduce(channel);
      EXPECT_TRUE(standings.batches_agree());
      EXPECT_EQ(standings.steps_agree(), ranks == 1);
    }));
  }
}

// Submits `names` of them in an order of the rank's own, each step, and waits for all.
TEST(CachedTest, RunsWhatAllRanksBringInOneOrderWhateverTheirs) {
  constexpr std::size_t names = 20;
  for (int const ranks : {1, 2, 3, 5}) {
    std::vector<Log> logs(ranks);
    expect_no_errors(run_ranks(
        ranks,
        [&](Communicator& communicator) {
          int const rank = communicator.rank();
          std::mt19937_64 draw(rank);
          for (std::size_t step = 0; step < 5; ++step) {
            std::vector<std::size_t> order(names);
            std::iota(order.begin(), order.end(), 0);
            std::ranges::shuffle(order, draw);
            std::map<std::size_t, std::shared_ptr<Sum>> sums;
            std::vector<Communicator::Handle> handles;
            for (std::size_t const i : order) {
              sums[i] = std::make_shared<Sum>(name_of(i), i + rank, i % 2 == 0, &logs[rank]);
              handles.push_back(communicator.submit(sums[i], {}, name_of(i)));
            }
            for (auto const& handle : handles) handle.wait();
            for (auto const& [i, sum] : sums) {
              EXPECT_EQ(sum->sum, i * ranks + ranks * (ranks - 1) / 2);
            }
          }
        },
        cached()));
    for (Log const& log : logs) EXPECT_EQ(log.names(), logs[0].names());
    EXPECT_EQ(logs[0].names().size(), 5 * names);
  }
}

// A payload goes with the standings if the last round ran but one; here some ranks then have more.
TEST(CachedTest, APayloadThatNotAllRanksHaveSentWithTheirStandingsIsSentAlone) {
  constexpr int ranks = 3;
  expect_no_errors(run_ranks(
      ranks,
      [&](Communicator& communicator) {
        auto const submit = [&](std::string const& name, std::uint64_t number) {
          auto const sum = std::make_shared<Sum>(name, number, /*by_payload=*/true);
          return std::pair(sum, communicator.submit(sum, {}, name));
        };
        auto const expect = [&](auto const& submitted, std::uint64_t number) {
          submitted.second.wait();
          EXPECT_EQ(submitted.first->sum, ranks * number);
        };
        for (std::uint64_t step = 1; step < 30; ++step) {
          for (int i = 0; i < 3; ++i) expect(submit("x", step + i), step + i);
          auto const gate = std::make_shared<Gate>();
          Communicator::Handle const held = communicator.submit(gate);
          gate->await();
          auto const late = static_cast<int>(step) % ranks;
          if (communicator.rank() == late) {
            auto const y = submit("y", 7 * step), x = submit("x", step);
            gate->open();
            expect(x, step);
            expect(y, 7 * step);
          } else {
            auto const x = submit("x", step);
            gate->open();
            expect(x, step);
            expect(submit("y", 7 * step), 7 * step);
          }
          held.wait();
        }
      },
      cached()));
}

TEST(CachedTest, WhatHasAHigherPriorityRunsFirst) {
  constexpr std::array priorities{0, -3, 7, 0, 100};
  constexpr int ranks = 3, steps = 4;
  std::vector<Log> logs(ranks);
  expect_no_errors(run_ranks(
      ranks,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        auto const submit = [&](std::size_t i, int priority) {
          auto const sum = std::make_shared<Sum>(name_of(i), i, i % 2 == 0, &logs[rank]);
          return communicator.submit(sum, {}, name_of(i), priority);
        };
        for (int step = 0; step < steps; ++step) {
          auto const gate = std::make_shared<Gate>();
          std::vector<Communicator::Handle> handles{communicator.submit(gate)};
          gate->await();
          for (std::size_t i = 0; i < priorities.size(); ++i) {
            std::size_t const which = (i + rank) % priorities.size();
            handles.push_back(submit(which, priorities[which]));
          }
          gate->open();
          for (auto const& handle : handles) handle.wait();
        }
        try {
          submit(2, rank == 1 ? 8 : 7).wait();
          ADD_FAILURE() << "they agreed";
        } catch (Mismatch const& error) {
          EXPECT_NE(std::string(error.what()).find("priority: 7 on ranks 0, 2 but 8 on rank 1"),
                    std::string::npos)
              << error.what();
        }
        submit(2, 8).wait();
      },
      cached()));
  for (Log const& log : logs) EXPECT_EQ(log.names(), logs[0].names());
  auto const names = logs[0].names();
  for (int step = 1; step < steps; ++step) {
    std::vector<std::string> const ran(names.begin() + 5 * step, names.begin() + 5 * step + 5);
    std::vector<std::string> expected;
    for (std::size_t const i : {4, 2, 0, 3, 1}) expected.push_back("operation=" + name_of(i));
    // Those of the same priority in the order of their numbers.
    if (ran[2] == expected[3]) std::swap(expected[2], expected[3]);
    EXPECT_EQ(ran, expected);
  }
}

// Submits all of them at once, and waits for them. Returns what their agreement and they sent.
template <class Make>
Traffic submit_together(Communicator& communicator, std::size_t names, Make const& make) {
  auto const gate = std::make_shared<Gate>();
  std::vector<Communicator::Handle> handles{communicator.submit(gate)};
  gate->await();
  for (std::size_t i = 0; i < names; ++i) {
    handles.push_back(communicator.submit(make(i), {}, name_of(i)));
  }
  gate->open();
  for (auto const& handle : handles) handle.wait();
  Traffic const after = Traffic::of(communicator.counters());
  return {.sent_bytes = after.sent_bytes - gate->before.sent_bytes,
          .messages = after.messages - gate->before.messages};
}

TEST(CachedTest, ASteadyStepTakesOneRound) {
  for (int const ranks : {2, 3, 4, 7, 8}) {
    std::uint64_t const rounds = std::bit_width(static_cast<unsigned>(ranks - 1));
    for (std::size_t const names : {1, 5, 10, 161}) {
      expect_no_errors(run_ranks(
          ranks,
          [&](Communicator& communicator) {
            auto const quiet = [](std::size_t i) { return std::make_shared<Quiet>(name_of(i)); };
            submit_together(communicator, names, quiet);
            Traffic const sent = submit_together(communicator, names, quiet);
            EXPECT_EQ(sent.messages, rounds) << names << " on " << ranks;
            EXPECT_LE(sent.sent_bytes, rounds * (64 + names / 4.0)) << names << " on " << ranks;
            // Payloads take as many messages more, all of them together.
            auto const telling = [](std::size_t i) {
              return std::make_shared<Sum>(name_of(i), i, true, nullptr, false);
            };
            submit_together(communicator, names, telling);
            EXPECT_EQ(submit_together(communicator, names, telling).messages, 2 * rounds);
          },
          cached()));
    }
  }
}

// Each error on every rank, and what is submitted after it runs.
TEST(CachedTest, DifferentProposalsOfAName) {
  std::vector<std::string> messages(3);
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        auto const run = [&](std::string const& text, std::string const& name) {
          auto const sum = std::make_shared<Sum>(text, 1, true);
          communicator.run(sum, nullptr, name);
          return sum->sum;
        };
        for (int step = 0; step < 3; ++step) {
          EXPECT_EQ(run("sum;numel=5", "a"), 3u);
          EXPECT_EQ(run("sum;numel=6", "b"), 3u);
          try {
            run(rank == 1 ? "sum;numel=4" : "sum;numel=5", "a");
            ADD_FAILURE() << "they agreed";
          } catch (Mismatch const& error) {
            messages[rank] = error.what();
          }
        }
        EXPECT_EQ(run("sum;numel=5", "a"), 3u);
      },
      cached()));
  EXPECT_NE(messages[0].find("numel: 4 on rank 1 but 5 on ranks 0, 2"), std::string::npos)
      << messages[0];
  EXPECT_EQ(messages, std::vector<std::string>(3, messages[0]));
}

TEST(CachedTest, WithoutANameTheOrderOfSubmissionMustBeTheSame) {
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        for (int step = 0; step < 3; ++step) {
          std::vector<std::string> texts{"a", "b", "c"};
          if (rank == 2) std::swap(texts[0], texts[1]);
          std::vector<Communicator::Handle> handles;
          for (std::string const& text : texts) {
            handles.push_back(communicator.submit(std::make_shared<Sum>(text, 1, step == 1)));
          }
          EXPECT_THROW(handles[0].wait(), Mismatch);
          EXPECT_THROW(handles[1].wait(), Mismatch);
          handles[2].wait();
        }
      },
      cached()));
}

TEST(CachedTest, ANameThatIsPendingIsRefusedUnlessItWasCancelled) {
  expect_no_errors(run_ranks(
      2,
      [&](Communicator& communicator) {
        auto const gate = std::make_shared<Gate>();
        auto const gate_handle = communicator.submit(gate);
        gate->await();
        auto const first = communicator.submit(std::make_shared<Sum>("a", 1, true), {}, "a");
        EXPECT_THROW(communicator.submit(std::make_shared<Sum>("a", 1, true), {}, "a"),
                     InvalidArgument);
        if (communicator.rank() == 0) {
          EXPECT_TRUE(first.cancel());
        }
        std::optional<Communicator::Handle> second;
        auto const sum = std::make_shared<Sum>("a", 1, true);
        if (communicator.rank() == 0) second = communicator.submit(sum, {}, "a");
        gate->open();
        gate_handle.wait();
        EXPECT_THROW(first.wait(), Cancelled);
        if (!second) second = communicator.submit(sum, {}, "a");
        second->wait();
        EXPECT_EQ(sum->sum, 2u);
      },
      cached()));
}

// Of three ranks one brings another name than two others, which have to go on listening.
TEST(CachedTest, WhatSomeRanksDoNotBringWaitsWhileOthersRun) {
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        std::vector<std::shared_ptr<Sum>> early;
        std::vector<Communicator::Handle> handles;
        auto const submit = [&](std::string const& name) {
          early.push_back(std::make_shared<Sum>(name, 1, true));
          handles.push_back(communicator.submit(early.back(), {}, name));
        };
        submit(concat("only ", rank));
        for (std::size_t i = 0; i < 20; ++i) {
          auto const sum = std::make_shared<Sum>(name_of(i), i, i % 2 == 0);
          communicator.run(sum, nullptr, i % 3 == 0 ? "" : name_of(i % 7));
          EXPECT_EQ(sum->sum, 3 * i);
        }
        EXPECT_FALSE(handles[0].done());
        communicator.run(std::make_shared<Sum>("all have looked", 1, false));
        for (int other = 0; other < 3; ++other) {
          if (other != rank) submit(concat("only ", other));
        }
        for (auto const& handle : handles) handle.wait();
        for (auto const& sum : early) EXPECT_EQ(sum->sum, 3u);
      },
      cached()));
}

TEST(CachedTest, MoreNamesThanTheCacheHolds) {
  std::vector<Log> logs(3);
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        Log& log = logs[communicator.rank()];
        for (int step = 0; step < 4; ++step) {
          submit_together(communicator, 10, [&](std::size_t i) {
            return std::make_shared<Sum>(name_of(i), i, i % 2 == 0, &log);
          });
          for (std::size_t i = 0; i < 7; ++i) {
            communicator.run(std::make_shared<Sum>(name_of(i), i, true, &log), nullptr,
                             concat("other ", step, i));
          }
        }
      },
      cached(4)));
  for (Log const& log : logs) EXPECT_EQ(log.names(), logs[0].names());
  EXPECT_EQ(logs[0].names().size(), 4u * 17);
}

TEST(CachedTest, ANameThatARankDoesNotBringEndsWithTheDeadline) {
  CommunicatorOptions options = cached();
  options.timeout = patiently(std::chrono::milliseconds(300));
  auto const errors = run_ranks(
      4,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        communicator.run(std::make_shared<Sum>("first", 1, true), nullptr, "first");
        // Theirs is not late when that of the others is.
        if (rank % 2 == 1) std::this_thread::sleep_for(options.timeout / 2);
        std::vector<Communicator::Handle> handles;
        handles.push_back(
            communicator.submit(std::make_shared<Sum>("x", 1, true), {}, concat("of ", rank % 2)));
        try {
          handles[0].wait();
        } catch (Timeout const& error) {
          EXPECT_EQ(error.ranks(), (std::vector{1, 3})) << error.what();
          throw;
        }
      },
      options);
  for (auto const& error : errors) {
    EXPECT_NE(message_of(error).find("ranks 1, 3 did not take part before the deadline: operation "
                                     "'of 0' was submitted by ranks 0, 2 only"),
              std::string::npos)
        << message_of(error);
  }
}

TEST(CachedTest, ARankWithNothingPendingHearsOfAFailure) {
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        communicator.run(std::make_shared<Sum>("first", 1, true), nullptr, "first");
        // Leaves something pending on rank 0, so that all listen.
        std::optional<Communicator::Handle> left;
        if (rank == 0)
          left = communicator.submit(std::make_shared<Sum>("left", 1, true), {}, "left");
        communicator.run(std::make_shared<Sum>("second", 1, true), nullptr, "second");
        if (rank == 2) return;  // closes its communicator
        if (left) {
          EXPECT_THROW(left->wait(), PeerLost);
        }
        EXPECT_THROW(communicator.run(std::make_shared<Sum>("third", 1, true), nullptr, "third"),
                     Error);
      },
      cached()));
}

TEST(CachedTest, AStallReportNamesTheOperationAndWhoHasNotSubmittedIt) {
  std::string const expected = "('left': sum and 1 other) for rank 2: rank 2 has submitted nothing";
  std::atomic<bool> heard = false, said_by_rank_2 = false;
  CommunicatorOptions options = cached();
  options.timeout = std::chrono::hours(1);
  Surroundings around;
  around.equip = [&](CommunicatorOptions& own, std::uint64_t, int rank, int) {
    own.stall = {.limit = patiently(std::chrono::milliseconds(100)),
                 .log = [&, rank](std::string const& text) {
                   if (text.find("left") == std::string::npos) return;
                   if (rank == 2) said_by_rank_2 = true;
                   if (text.find(expected) != std::string::npos) heard = true;
                 }};
  };
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        communicator.run(std::make_shared<Sum>("first", 1, true), nullptr, "first");
        std::vector<Communicator::Handle> handles;
        auto const submit = [&](std::string const& name) {
          handles.push_back(communicator.submit(std::make_shared<Sum>("sum", 1, true), {}, name));
        };
        if (rank != 2) {
          submit("left");
          submit("right");
        }
        communicator.run(std::make_shared<Sum>("second", 1, true), nullptr, "second");
        while (!heard) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (rank == 2) {
          EXPECT_FALSE(said_by_rank_2) << "it waits for nobody";
          submit("right");
          submit("left");
        }
        for (auto const& handle : handles) handle.wait();
      },
      options, std::nullopt, around));
}

TEST(CachedTest, ManyThreadsBringManyNamesInAnyOrder) {
  run_many_names({.ranks = 4, .threads = 3, .steps = 20, .names = 60, .cached = 30});
}

// One thread runs its operations where it is, and hands its turn over if others come first.
TEST(CachedTest, AThreadThatRunsAndOneThatSubmits) {
  expect_no_errors(run_ranks(
      2,
      [&](Communicator& communicator) {
        std::thread other([&] {
          for (std::uint64_t i = 0; i < 500; ++i) {
            auto const sum = std::make_shared<Sum>("submitted", i, i % 2 == 0);
            communicator.submit(sum, {}, "submitted").wait();
            EXPECT_EQ(sum->sum, 2 * i);
          }
        });
        for (std::uint64_t i = 0; i < 500; ++i) {
          auto const sum = std::make_shared<Sum>("run", i, i % 2 == 0);
          communicator.run(sum, nullptr, i % 3 == 0 ? "" : "run");
          EXPECT_EQ(sum->sum, 2 * i);
        }
        other.join();
      },
      cached()));
}

// A rank is lost while one thread runs and another has submitted: each hears of it.
TEST(CachedTest, AThreadThatRunsAndOneThatSubmitsHearOfAFailure) {
  for (std::uint64_t message = 0; message < 40; message += 3) {
    auto const errors = run_ranks(
        3,
        [&](Communicator& communicator) {
          std::exception_ptr of_other;
          std::thread other([&] {
            try {
              for (;;) {
                communicator.submit(std::make_shared<Sum>("a", 1, true), {}, "a").wait();
              }
            } catch (...) {
              of_other = std::current_exception();
            }
          });
          std::exception_ptr own;
          try {
            for (;;) communicator.run(std::make_shared<Sum>("b", 1, true), nullptr, "b");
          } catch (...) {
            own = std::current_exception();
          }
          other.join();
          EXPECT_TRUE(own && of_other);
        },
        cached(), RankFault{1, {FaultKind::die, message}});
    expect_no_errors(errors);
  }
}

// Its operations are those that have not ended.
class CountedBatch final : public Batch {
 public:
  explicit CountedBatch(std::size_t left) : left_(left) {}
  std::optional<std::size_t> left() const override { return left_; }
  void end() { --left_; }

 private:
  std::atomic<std::size_t> left_;
};

class Part final : public Operation {
 public:
  Part(std::string text, CountedBatch& batch) : text_(std::move(text)), batch_(batch) {}
  Proposal prepare() override { return {.text = text_}; }
  void run(Channel& channel, Agreement const& agreement) override {
    ended = agreement.ends_batch;
    agreement.commit(channel);
    batch_.end();
  }
  Batch const* batch() const override { return &batch_; }

  bool ended = false;

 private:
  std::string text_;
  CountedBatch& batch_;
};

TEST(CachedTest, TheLastOfABatchEndsItAlsoIfAllRunInOneRound) {
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        for (int step = 0; step < 3; ++step) {
          CountedBatch first(3), second(2);
          std::vector<std::shared_ptr<Part>> parts;
          submit_together(communicator, 5, [&](std::size_t i) {
            parts.push_back(std::make_shared<Part>(name_of(i), i < 3 ? first : second));
            return parts.back();
          });
          for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(parts[i]->ended, i == 2 || i == 4) << i;
        }
        // If rank 0 has more to come the batch goes on.
        CountedBatch batch(communicator.rank() == 0 ? 3 : 2);
        std::vector<std::shared_ptr<Part>> parts;
        submit_together(communicator, 2, [&](std::size_t i) {
          parts.push_back(std::make_shared<Part>(name_of(i), batch));
          return parts.back();
        });
        EXPECT_FALSE(parts[0]->ended || parts[1]->ended);
      },
      cached()));
}

TEST(CachedTest, AnExchangeThatIsMadeAnewOnOneRankIsCompared) {
  expect_no_errors(run_ranks(
      2,
      [&](Communicator& communicator) {
        constexpr std::size_t numel = 100;
        std::vector<float> gradient(numel, 1.0f), residual(numel, 0.0f);
        auto const make = [&] {
          return std::make_shared<GradientExchange<float>>("test", numel, ExchangeOptions{},
                                                           communicator);
        };
        auto exchange = make();
        auto const step = [&] {
          exchange->bind({{gradient, residual}});
          communicator.run(exchange);
        };
        for (int i = 0; i < 3; ++i) step();
        if (communicator.rank() == 0) exchange = make();
        EXPECT_THROW(step(), Mismatch);
      },
      cached()));
}

TEST(CachedTest, WhatARoundHasLeftCanBeCancelled) {
  std::barrier all_have_looked(3);
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        auto const submit_left = [&] {
          return communicator.submit(std::make_shared<Sum>("left", 1, true), {}, "left");
        };
        std::optional<Communicator::Handle> left;
        if (rank == 0) left = submit_left();
        communicator.run(std::make_shared<Sum>("next", 1, true), nullptr, "next");
        if (rank == 0) {
          EXPECT_TRUE(left->cancel());
        }
        all_have_looked.arrive_and_wait();
        if (rank != 0) left = submit_left();
        EXPECT_THROW(left->wait(), Cancelled);
        auto const again = submit_left();
        again.wait();
      },
      cached()));
}

class Rings final : public WrappedTransport {
 public:
  Rings(std::unique_ptr<Transport> inner, std::set<int>& distances)
      : WrappedTransport(std::move(inner)), distances_(distances) {}

 protected:
  void do_ring(int peer, std::uint32_t number) override {
    distances_.insert((peer - rank() + size()) % size());
    WrappedTransport::do_ring(peer, number);
  }

 private:
  std::set<int>& distances_;
};

// So that a ring reaches the last of P ranks in log2 P steps.
TEST(CachedTest, AllRanksPassARingOn) {
  constexpr int ranks = 6;
  std::vector<std::set<int>> distances(ranks);
  Surroundings const around([&](std::unique_ptr<Transport> inner) {
    auto& own = distances[static_cast<std::size_t>(inner->rank())];
    return std::make_unique<Rings>(std::move(inner), own);
  });
  expect_no_errors(run_ranks(
      ranks,
      [&](Communicator& communicator) {
        auto const submit = [&](std::string const& name) {
          return communicator.submit(std::make_shared<Sum>(name, 1, true), {}, name);
        };
        std::optional<Communicator::Handle> left;
        if (communicator.rank() == 0) left = submit("left");
        communicator.run(std::make_shared<Sum>("next", 1, true), nullptr, "next");
        if (!left) left = submit("left");
        left->wait();
      },
      cached(), std::nullopt, around));
  for (auto const& own : distances) EXPECT_EQ(own, (std::set{1, 2, 4}));
}

// A round that runs nothing, in which a rank only listens, is not to show it there.
TEST(CachedTest, ARequestIsSeenByAllAfterTheNextOperation) {
  std::barrier all_listen(3);
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        auto const submit = [&](std::string const& name) {
          return communicator.submit(std::make_shared<Sum>(name, 1, true), {}, name);
        };
        for (int step = 0; step < 10; ++step) {
          std::optional<Communicator::Handle> left, other;
          if (rank == 1) left = submit("left");
          submit("before").wait();
          all_listen.arrive_and_wait();
          if (rank == 0) {
            communicator.request();
            other = submit("other");
          }
          if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(10));
          EXPECT_FALSE(communicator.take_requested());
          submit("next").wait();
          EXPECT_TRUE(communicator.take_requested());
          EXPECT_FALSE(communicator.take_requested());
          if (!left) left = submit("left");
          if (!other) other = submit("other");
          left->wait();
          other->wait();
        }
      },
      cached()));
}

// Submits something when it is asked for the time: amid what another thread runs.
class SubmittingClock final : public Clock {
 public:
  TimePoint now() const override {
    if (armed_.exchange(false)) submit();
    return steady_clock().now();
  }
  void arm() { armed_ = true; }

  std::function<void()> submit;

 private:
  mutable std::atomic<bool> armed_ = false;
};

// Runs one operation in this thread, amid which another one is submitted that comes first.
std::pair<std::exception_ptr, std::exception_ptr> run_behind_another(
    std::unique_ptr<Transport> transport) {
  SubmittingClock clock;
  Communicator communicator(std::move(transport), cached(), &clock);
  std::optional<Communicator::Handle> submitted;
  clock.submit = [&] {
    submitted = communicator.submit(std::make_shared<Sum>("a", 1, true), {}, "a");
  };
  std::exception_ptr of_own, of_other;
  keep_first_error(of_own, [&] {
    for (char const* const name : {"a", "b"}) {
      communicator.run(std::make_shared<Sum>(name, 1, true), nullptr, name);
    }
    clock.arm();
    communicator.run(std::make_shared<Sum>("b", 1, true), nullptr, "b");
  });
  if (submitted) keep_first_error(of_other, [&] { submitted->wait(); });
  return {of_own, of_other};
}

TEST(CachedTest, AThreadThatRunsHandsOverWhatComesBeforeItsOwn) {
  auto transports = make_inproc_transports(2);
  expect_no_errors(on_threads(2, [&](int rank) {
    auto const [own, other] = run_behind_another(std::move(transports[rank]));
    EXPECT_EQ(message_of(own), "");
    EXPECT_EQ(message_of(other), "");
  }));
}

TEST(CachedTest, AFailureThenEndsBoth) {
  int failures_of_both = 0;
  for (std::uint64_t message = 0; message < 24; ++message) {
    auto transports = make_inproc_transports(2);
    transports[1] = make_faulty(std::move(transports[1]), {FaultKind::die, message});
    std::pair<std::exception_ptr, std::exception_ptr> ends;
    expect_no_errors(on_threads(2, [&](int rank) {
      auto const own = run_behind_another(std::move(transports[rank]));
      if (rank == 0) ends = own;
    }));
    failures_of_both += ends.first && ends.second;
  }
  EXPECT_GT(failures_of_both, 0);
}

TEST(NamesOfRanksTest, WhatIsNoListIsRefused) {
  std::vector<std::byte> list;
  NamesOfRanks::begin(list, 7);
  NamesOfRanks::append(
      list, {.name = "a", .goes = true, .priority = -3, .key = 5, .description = "first"});
  NamesOfRanks::append(list, {.name = "bc", .late = true});
  NamesOfRanks good;
  good.read(0, list, 7);
  good.read(2, list, 7);
  EXPECT_EQ(good.names().size(), 2u);
  EXPECT_EQ(good.holders("bc").ranks, (std::vector{0, 2}));
  EXPECT_TRUE(good.holders("bc").late);
  EXPECT_FALSE(good.holders("a").late);
  EXPECT_EQ(good.holders("a").description, "first");
  EXPECT_EQ(good.holders("a").priority, -3);
  EXPECT_EQ(good.holders("a").key, 5u);
  EXPECT_FALSE(good.holders("bc").goes);
  std::size_t refused = 0;
  for (std::size_t length = 0; length < list.size(); ++length) {
    try {
      NamesOfRanks().read(0, std::span(list).first(length), 7);
    } catch (MalformedFrame const&) {
      ++refused;
    }
  }
  EXPECT_EQ(refused, list.size() - 2) << "all but those that end with a name, or before the first";
  EXPECT_THROW(NamesOfRanks().read(0, list, 8), MalformedFrame);
  NamesOfRanks::append(list, {.name = "a"});
  EXPECT_THROW(NamesOfRanks().read(0, list, 7), MalformedFrame) << "twice";
  for (std::size_t const byte : {8, 9, 10, 11, 12, 13, 14, 15, 28, 29, 30, 31}) {
    std::vector<std::byte> changed = list;
    changed[byte] = std::byte{0xff};
    EXPECT_THROW(NamesOfRanks().read(0, changed, 7), MalformedFrame) << byte;
  }
}

TEST(CachedTest, NamesThatAreNone) {
  expect_no_errors(run_ranks(
      1,
      [&](Communicator& communicator) {
        auto const run = [&](std::string const& name) {
          communicator.run(std::make_shared<Sum>("a", 1, true), nullptr, name);
        };
        EXPECT_THROW(run("#a"), InvalidArgument);
        EXPECT_THROW(run(std::string(1025, 'a')), InvalidArgument);
        run(std::string(1024, 'a'));
      },
      cached()));
}

}  // namespace
}  // namespace sparsecomm::test
