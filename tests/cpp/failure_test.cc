// Contract 7: whatever goes wrong, every surviving rank says so, in time, and names the culprit.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <limits>
#include <random>

#include "engine/verdict.h"
#include "simulated_failures.h"
#include "transport/failure_report.h"
#include "ucx_ranks.h"

namespace sparsecomm::test {
namespace {

class FailureTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Algorithms, FailureTest, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (auto const& entry : algorithms()) names.emplace_back(entry.name);
                           return names;
                         }()),
                         [](auto const& info) { return info.param; });

constexpr std::size_t numel = 600;
constexpr int culprit = 1;

void check_run(FailingRun const& run) {
  EXPECT_EQ(find_violation(run, simulate_failure(run)), "") << describe(run);
}

// At every message of the culprit. A race between threads cannot show here.
void check_fault_everywhere(std::string const& algorithm, int ranks, NetworkFault::Kind kind) {
  std::uint64_t const messages = messages_of_two_steps(algorithm, ranks, numel, culprit);
  ASSERT_GE(messages, 2u);
  for (std::uint64_t message = 0; message < messages && !::testing::Test::HasFailure(); ++message) {
    check_run({.algorithm = algorithm,
               .ranks = ranks,
               .fault = {culprit, kind, message},
               .seed = message});
  }
}

TEST_P(FailureTest, AnyMessageMayBeTheLast) {
  for (int ranks = 2; ranks <= 6; ++ranks) {
    check_fault_everywhere(GetParam(), ranks, NetworkFault::Kind::die);
  }
}

TEST_P(FailureTest, AnyMessageMayBeCorrupted) {
  for (int const ranks : {2, 3, 5}) {
    check_fault_everywhere(GetParam(), ranks, NetworkFault::Kind::corrupt);
  }
}

TEST_P(FailureTest, AnyMessageMayBeTruncated) {
  for (int const ranks : {2, 3, 5}) {
    check_fault_everywhere(GetParam(), ranks, NetworkFault::Kind::truncate);
  }
}

TEST_P(FailureTest, AnyMessageMayNeverCome) {
  for (int const ranks : {2, 3, 5})
    check_fault_everywhere(GetParam(), ranks, NetworkFault::Kind::delay);
}

TEST_P(FailureTest, ARankMayStopAtAnyMessageForLongOrTooLong) {
  for (int const ranks : {2, 3, 5}) {
    for (auto const kind : {NetworkFault::Kind::slow, NetworkFault::Kind::stop}) {
      check_fault_everywhere(GetParam(), ranks, kind);
    }
  }
}

TEST_P(FailureTest, AConnectionMayBeLostAtAnyMessage) {
  for (int const ranks : {2, 3, 5}) {
    check_fault_everywhere(GetParam(), ranks, NetworkFault::Kind::cut);
  }
}

TEST_P(FailureTest, TheNetworkMaySplitAtAnyMessage) {
  for (int const ranks : {3, 5}) {
    check_fault_everywhere(GetParam(), ranks, NetworkFault::Kind::split);
  }
}

TEST_P(FailureTest, ARunIsAFunctionOfItsSeed) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    FailingRun const run{.algorithm = GetParam(),
                         .ranks = 3,
                         .fault = {culprit, NetworkFault::Kind::die, seed},
                         .seed = seed};
    FailingOutcome const one = simulate_failure(run), two = simulate_failure(run);
    EXPECT_EQ(one.trace, two.trace) << describe(run);
    EXPECT_EQ(one.survivors[0].error, two.survivors[0].error) << describe(run);
  }
}

// The checker finds the split steps that there are without the last round of messages.
TEST(StepLogTest, WithoutTheCommitRoundSurvivorsEndAtDifferentSteps) {
  for (std::string const algorithm : {"topk_a", "dense_rabenseifner"}) {
    std::uint64_t const messages = messages_of_two_steps(algorithm, 3, numel, culprit);
    std::uint64_t seed = 0;
    bool split = false;
    for (; seed < 1000 && !split; ++seed) {
      FailingRun const run{.algorithm = algorithm,
                           .ranks = 3,
                           .fault = {culprit, NetworkFault::Kind::die, seed % messages},
                           .seed = seed,
                           .batch = &open_batch};
      std::string const violation =
          find_violation(simulate_failure(run).survivors, culprit, algorithm);
      split = violation.find("applied") != std::string::npos;
    }
    EXPECT_TRUE(split) << algorithm;
    RecordProperty(algorithm, std::to_string(seed));
  }
}

TEST(StepLogTest, FindsWhatIsLostOrCountedTwice) {
  LoggedStep const zero{true, {1, 2}, {0, 3}, {3, 0}, {0, 5}};
  LoggedStep const one{true, {2, 0}, {0, 1}, {3, 0}, {0, 1}};
  Demands const demands{{true, true}};
  EXPECT_EQ(find_violation(std::vector<StepLog>{{zero}, {one}}, demands), "");
  auto const found = [&](auto change) {
    std::vector<StepLog> logs{{zero}, {one}};
    change(logs);
    return find_violation(logs, demands);
  };
  EXPECT_NE(found([](auto& logs) { logs[1][0].output[1] = 1; }), "");          // other bits
  EXPECT_NE(found([](auto& logs) { logs[1][0].residual_after[1] = 0; }), "");  // lost
  EXPECT_NE(found([](auto& logs) { logs[0][0].residual_after[0] = 1; }), "");  // counted twice
  EXPECT_NE(found([](auto& logs) { logs[1][0].applied = false; }), "");        // a step apart
  // Rank 1 has the step's result, and fails: rank 0 is as it was.
  std::vector<StepLog> logs{{zero}, {one}};
  logs[0][0] = {false, {1, 2}, {0, 3}, {1, 2}, {0, 3}};
  EXPECT_EQ(find_violation(logs, Demands{{true, false}}), "");
}

// On threads of the operating system, one message of each kind.
void check_on_threads(std::string const& algorithm,
                      std::function<std::vector<std::unique_ptr<Transport>>(int)> const& connect) {
  int const ranks = 3;
  std::uint64_t const messages = messages_of_two_steps(algorithm, ranks, numel, culprit);
  std::minstd_rand generator(static_cast<unsigned>(algorithm.size()));
  for (auto const kind :
       {FaultKind::die, FaultKind::corrupt, FaultKind::truncate, FaultKind::delay}) {
    Fault const fault{kind, generator() % messages};
    SCOPED_TRACE(concat("fault ", int(kind), " at message ", fault.message));
    std::vector<Survivor> survivors(ranks);
    auto const body = [&](Communicator& communicator) {
      survivors[communicator.rank()] = run_until_failure(communicator, algorithm, numel);
    };
    expect_no_errors(run_ranks(connect(ranks), body, options_for(kind), RankFault{culprit, fault},
                               services_for(algorithm)));
    for (int const rank : {0, 2}) {
      SCOPED_TRACE(concat("rank ", rank));
      expect_accused(survivors[rank], culprit);
    }
    EXPECT_EQ(find_violation(survivors, culprit, algorithm), "");
  }
}

TEST_P(FailureTest, AMessageMayFailOnThreads) {
  check_on_threads(GetParam(), [](int ranks) { return make_inproc_transports(ranks); });
}

TEST_P(FailureTest, AMessageMayFailOverUcx) {
  if (std::string const problem = ucx_problem(ucx_options_here()); !problem.empty()) {
    GTEST_SKIP() << problem;
  }
  check_on_threads(GetParam(), make_ucx_transports);
}

TEST_P(FailureTest, DisagreementRaisesTheSameTextEverywhereAndLeavesTheCommunicatorUsable) {
  for (int const ranks : {2, 3, 5}) {
    std::vector<std::string> messages(ranks);
    SeededSimulation simulation(static_cast<std::uint64_t>(ranks));
    auto const errors = simulate_ranks(
        simulation, ranks,
        [&](Communicator& communicator) {
          int const rank = communicator.rank();
          ExchangeOptions options;
          options.algorithm = GetParam();
          auto const attempt = [&](std::size_t numel, ExchangeOptions const& own) {
            auto const exchange =
                std::make_shared<GradientExchange<float>>("test", numel, own, communicator);
            std::vector<float> residual(numel, 0.0f);
            std::vector<float> gradient(numel, 1.0f);
            exchange->bind({{gradient, residual}});
            communicator.submit(exchange).wait();
          };
          ExchangeOptions denser = options;
          denser.density = rank == 1 ? 0.5 : 0.25;
          try {
            attempt(rank == 1 ? 120 : 100, denser);
            ADD_FAILURE() << "rank " << rank << " did not notice";
          } catch (Mismatch const& mismatch) {
            messages[rank] = mismatch.what();
          }
          attempt(100, options);
        },
        {}, {}, services_for(GetParam(), simulation));
    expect_no_errors(errors);
    for (std::string const& message : messages) EXPECT_EQ(message, messages[0]);
    EXPECT_NE(messages[0].find("numel: 100 on "), std::string::npos) << messages[0];
    EXPECT_NE(messages[0].find("120 on rank 1"), std::string::npos) << messages[0];
    EXPECT_NE(messages[0].find("density: "), std::string::npos) << messages[0];
  }
}

TEST(CommunicatorTest, ARankThatNeverComesIsNamedByAll) {
  for_seeds([](SeededSimulation& simulation) {
    int const ranks = 4;
    std::vector<std::string> messages(ranks);
    Latch raised(simulation, ranks - 1);
    auto const errors = simulate_ranks(simulation, ranks, [&](Communicator& communicator) {
      if (communicator.rank() == 2) return raised.wait();
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", 10, ExchangeOptions{}, communicator);
      std::vector<float> residual(10), gradient(10, 1.0f);
      exchange->bind({{gradient, residual}});
      try {
        communicator.submit(exchange).wait();
      } catch (Timeout const& timeout) {
        EXPECT_EQ(timeout.ranks(), std::vector{2});
        messages[communicator.rank()] = timeout.what();
      } catch (Error const& error) {
        ADD_FAILURE() << error.what();
      }
      raised.count_down();
    });
    expect_no_errors(errors);
    for (int const rank : {0, 1, 3}) {
      EXPECT_NE(messages[rank].find("rank 2 did not"), std::string::npos) << messages[rank];
    }
  });
}

// Waits for a message that nobody sends.
class Waiting final : public Operation {
 public:
  explicit Waiting(Latch& begun) : begun_(begun) {}
  Proposal prepare() override { return {}; }
  void run(Channel& channel, Agreement const&) override {
    std::vector<std::byte> buffer(100);
    Request request = channel.irecv(1 - channel.rank(), Phase::reduce, buffer);
    begun_.count_down();
    channel.wait(request);
  }

 private:
  Latch& begun_;
};

TEST(CommunicatorTest, ClosingBreaksOffWhatRunsAndAccusesNobodyElse) {
  for_seeds([](SeededSimulation& simulation) {
    std::vector<std::string> messages(2);
    Latch begun(simulation, 2);
    TimePoint const start = simulation.now();
    expect_no_errors(simulate_ranks(simulation, 2, [&](Communicator& communicator) {
      auto const handle = communicator.submit(std::make_shared<Waiting>(begun));
      begun.wait();
      if (communicator.rank() == 0) return;  // and is destroyed
      try {
        handle.wait();
      } catch (Error const& error) {
        messages[1] = error.what();
      }
    }));
    EXPECT_LT(simulation.now() - start, std::chrono::seconds(2));
    EXPECT_NE(messages[1].find("rank 0 failed: it closed its communicator"), std::string::npos)
        << messages[1];
  });
}

// A link to something that never answers.
class Silence final : public Interruptible {
 public:
  explicit Silence(Runtime runtime) : changed_(runtime, "what never answers") {}

  void interrupt() noexcept override {
    {
      std::lock_guard const lock(mutex_);
      interrupted_ = true;
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return interrupted_; });
    throw Interrupted("the link was interrupted", {});
  }

 private:
  std::mutex mutex_;
  Condition changed_;
  bool interrupted_ = false;
};

// Waits for a service; rank 1 fails meanwhile, if told to.
class WaitingBeside final : public Operation {
 public:
  WaitingBeside(std::shared_ptr<Silence> silence, Latch& begun, bool fails)
      : silence_(std::move(silence)), begun_(begun), fails_(fails) {}
  Proposal prepare() override { return {}; }
  void run(Channel& channel, Agreement const&) override {
    begun_.arrive_and_wait();
    if (fails_ && channel.rank() == 1) throw InvalidArgument("no memory, say");
    auto const waiting = channel.waiting_for("silence");
    silence_->wait();
  }

 private:
  std::shared_ptr<Silence> silence_;
  Latch& begun_;
  bool fails_;
};

// Each rank has a link of its own, as over a network. It takes no longer than a failure may.
void run_beside_silence(
    SeededSimulation& simulation, int size,
    std::function<void(Communicator&, std::shared_ptr<Silence> const&)> const& body) {
  std::vector<std::shared_ptr<Silence>> silences;
  for (int rank = 0; rank < size; ++rank) {
    silences.push_back(std::make_shared<Silence>(simulation));
  }
  Surroundings around;
  around.equip = [&](CommunicatorOptions& options, std::uint64_t, int rank, int) {
    options.interruptibles = {silences[std::size_t(rank)]};
  };
  TimePoint const start = simulation.now();
  auto const errors = simulate_ranks(
      simulation, size,
      [&](Communicator& communicator) {
        body(communicator, silences[std::size_t(communicator.rank())]);
      },
      {}, {}, around);
  expect_no_errors(errors);
  EXPECT_LT(simulation.now() - start, std::chrono::seconds(2));
}

TEST(CommunicatorTest, AnAlarmEndsWaitsForServices) {
  for_seeds([](SeededSimulation& simulation) {
    Latch begun(simulation, 3), raised(simulation, 3);
    auto const body = [&](Communicator& communicator, std::shared_ptr<Silence> const& silence) {
      try {
        communicator.run(std::make_shared<WaitingBeside>(silence, begun, true));
        ADD_FAILURE() << "rank " << communicator.rank() << " does not fail";
      } catch (InvalidArgument const& error) {
        EXPECT_EQ(communicator.rank(), 1) << error.what();
      } catch (PeerLost const& error) {
        EXPECT_NE(communicator.rank(), 1);
        EXPECT_EQ(error.ranks(), std::vector{1}) << error.what();
      } catch (Error const& error) {
        ADD_FAILURE() << error.what();
      }
      raised.arrive_and_wait();
    };
    run_beside_silence(simulation, 3, body);
  });
}

// As a handler of Ctrl-C would.
class Raises final : public Interrupt {
 private:
  void check() override { throw Cancelled("the caller is interrupted"); }
};

TEST(CommunicatorTest, AnInterruptOfTheCallerEndsWaitsForServices) {
  for_seeds([](SeededSimulation& simulation) {
    Latch begun(simulation, 1);
    auto const body = [&](Communicator& communicator, std::shared_ptr<Silence> const& silence) {
      Raises interrupt;
      EXPECT_THROW(
          communicator.run(std::make_shared<WaitingBeside>(silence, begun, false), &interrupt),
          Cancelled);
    };
    run_beside_silence(simulation, 1, body);
  });
}

TEST(CommunicatorTest, ClosingEndsWaitsForServices) {
  for_seeds([](SeededSimulation& simulation) {
    Latch begun(simulation, 1);
    auto const body = [&](Communicator& communicator, std::shared_ptr<Silence> const& silence) {
      auto const handle =
          communicator.submit(std::make_shared<WaitingBeside>(silence, begun, false));
      begun.wait();
      communicator.close();
      EXPECT_THROW(handle.wait(), Aborted);
    };
    run_beside_silence(simulation, 1, body);
  });
}

// Says how many entries it contributes, or has contributed, to a vector of 100.
template <class P>
class Claiming final : public Operation {
 public:
  explicit Claiming(P payload) : payload_(payload) {}
  Proposal prepare() override {
    return {.text = "operation=claim;numel=100", .payload = payload_of(payload_)};
  }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return merge_payload<P>(into, other, std::uint64_t{100});
  }
  void run(Channel&, Agreement const&) override {}

 private:
  P payload_;
};

std::shared_ptr<Operation> claim(std::string_view what, std::uint32_t count) {
  if (what == "previous") {
    return std::make_shared<Claiming<StepPayload>>(StepPayload{.previous_entries = count});
  }
  EntryCounts const counts = what == "blocks" ? EntryCounts(100, count) : EntryCounts(count);
  return std::make_shared<Claiming<EntryCounts>>(counts);
}

TEST(CommunicatorTest, ARankThatClaimsMoreEntriesThanThereCanBeIsNamedByAll) {
  for_seeds([](SeededSimulation& simulation) {
    for (std::string_view const what : {"entries", "blocks", "previous"}) {
      constexpr std::uint32_t most = std::numeric_limits<std::uint32_t>::max();
      auto const errors = simulate_ranks(simulation, 3, [&](Communicator& communicator) {
        communicator.run(claim(what, 100));
        communicator.run(claim(what, communicator.rank() == 1 ? most : 100));
      });
      for (std::exception_ptr const& error : errors) {
        EXPECT_EQ(message_of(error).find(concat("rank 1 broke the exchange: rank 1 sent an invalid "
                                                "message: a contribution of ",
                                                most, what == "blocks" ? " blocks" : " entries",
                                                " to a vector of 100")),
                  0u)
            << message_of(error);
      }
    }
  });
}

// Calls commit() as often as told; then rank 1 throws, or the only one, if told.
class Committing final : public Operation {
 public:
  explicit Committing(int times, bool throws = false) : times_(times), throws_(throws) {}
  Proposal prepare() override { return {}; }
  void run(Channel& channel, Agreement const& agreement) override {
    for (int time = 0; time < times_; ++time) agreement.commit(channel);
    int const thrower = std::min(1, channel.size() - 1);
    if (throws_ && channel.rank() == thrower) throw InvalidArgument("no memory, say");
  }
  Batch const* batch() const override { return &batch_of_one; }
  void roll_back() noexcept override { ++rolled_back; }

  std::atomic<int> rolled_back = 0;

 private:
  int times_;
  bool throws_;
};

TEST(CommunicatorTest, AnOperationThatDoesNotCommitOnceAsItSaidFails) {
  for_seeds([](SeededSimulation& simulation) {
    for (int const times : {0, 2}) {
      auto const errors = simulate_ranks(simulation, 2, [&](Communicator& communicator) {
        communicator.run(std::make_shared<Committing>(times));
      });
      for (auto const& error : errors) {
        ASSERT_NE(error, nullptr) << times;
        EXPECT_NE(what_of(error).find("commit()"), std::string::npos) << what_of(error);
      }
    }
  });
}

// The others may have completed it, so its rank must not put the gradient back.
TEST(CommunicatorTest, WhatFailsAfterTheCommitIsNotRolledBack) {
  for_seeds([](SeededSimulation& simulation) {
    std::vector<int> rolled_back(3, -1);
    std::vector<std::string> first(3), second(3);
    expect_no_errors(simulate_ranks(simulation, 3, [&](Communicator& communicator) {
      int const rank = communicator.rank();
      auto const operation = std::make_shared<Committing>(1, true);
      try {
        communicator.run(operation);
      } catch (std::exception const& error) {
        first[rank] = error.what();
      }
      try {
        communicator.run(std::make_shared<Committing>(1));
      } catch (std::exception const& error) {
        second[rank] = error.what();
      }
      rolled_back[rank] = operation->rolled_back;
    }));
    EXPECT_EQ(rolled_back, std::vector<int>(3, 0));
    EXPECT_EQ(first[1], "no memory, say");
    for (int const rank : {0, 2}) {
      std::string const& text = first[rank].empty() ? second[rank] : first[rank];
      EXPECT_EQ(text.find("rank 1 failed"), 0u) << text;
    }
  });
}

// On the rank that cancelled, too, which has prepared nothing: its gradient is kept.
TEST(CommunicatorTest, WhatWasCancelledIsRolledBackOnEveryRank) {
  for_seeds([](SeededSimulation& simulation) {
    std::vector<int> rolled_back(2, -1);
    expect_no_errors(simulate_ranks(simulation, 2, [&](Communicator& communicator) {
      auto const operation = std::make_shared<Committing>(1);
      Latch cancelled(simulation, 1);
      auto const first = communicator.submit(std::make_shared<Committing>(1),
                                             [&](std::exception_ptr) { cancelled.wait(); });
      auto const second = communicator.submit(operation);
      bool const did = communicator.rank() == 0 && second.cancel();
      EXPECT_EQ(did, communicator.rank() == 0);
      cancelled.count_down();
      first.wait();
      EXPECT_THROW(second.wait(), Cancelled);
      rolled_back[communicator.rank()] = operation->rolled_back;
    }));
    EXPECT_EQ(rolled_back, std::vector<int>(2, 1));
  });
}

TEST(CommunicatorTest, ARankThatIsAloneWaitsForNoReport) {
  SeededSimulation simulation(1);
  TimePoint const start = simulation.now();
  auto const errors = simulate_ranks(
      simulation, 1,
      [](Communicator& communicator) { communicator.run(std::make_shared<Committing>(0, true)); },
      {.failure_grace = std::chrono::seconds(10)});
  EXPECT_NE(errors[0], nullptr);
  EXPECT_EQ(simulation.now(), start);
}

class Throwing final : public Operation {
 public:
  explicit Throwing(bool in_prepare) : in_prepare_(in_prepare) {}
  Proposal prepare() override {
    if (in_prepare_) throw InvalidArgument("no memory, say");
    return {};
  }
  void run(Channel& channel, Agreement const&) override {
    if (channel.rank() == 1) throw InvalidArgument("a bug, say");
    std::vector<std::byte> buffer(100);
    Request request = channel.irecv(1, Phase::reduce, buffer);
    channel.wait(request);
  }

 private:
  bool in_prepare_;
};

TEST(CommunicatorTest, ARankThatFailsBeforeTheExchangeFailsAllAndTheCommunicatorGoesOn) {
  for_seeds([](SeededSimulation& simulation) {
    std::vector<std::string> messages(3);
    expect_no_errors(simulate_ranks(simulation, 3, [&](Communicator& communicator) {
      auto const operation = std::make_shared<Throwing>(communicator.rank() == 1);
      try {
        communicator.submit(operation).wait();
      } catch (Mismatch const& error) {
        messages[communicator.rank()] = error.what();
      }
    }));
    for (auto const& message : messages)
      EXPECT_EQ(message, "rank 1 failed before the exchange: no memory, say");
  });
}

// An operation that may wait in prepare(), so that what comes after stays queued.
class Gate final : public Operation {
 public:
  explicit Gate(Latch* open = nullptr) : open_(open) {}
  Proposal prepare() override {
    if (open_ != nullptr) open_->wait();
    return {"gate"};
  }
  void run(Channel&, Agreement const&) override {}

 private:
  Latch* open_;
};

TEST(CommunicatorTest, CancellingOnOneRankCancelsOnAllAndLaterOperationsRun) {
  for_seeds([](SeededSimulation& simulation) {
    for (int const ranks : {1, 2, 3, 5}) {
      Latch queued(simulation, ranks);
      auto const errors = simulate_ranks(simulation, ranks, [&](Communicator& communicator) {
        auto const first = communicator.submit(std::make_shared<Gate>(&queued));
        auto const second = communicator.submit(std::make_shared<Gate>());
        auto const third = communicator.submit(std::make_shared<Gate>());
        if (communicator.rank() == ranks - 1) {
          EXPECT_TRUE(second.cancel());
        }
        queued.count_down();
        first.wait();
        EXPECT_FALSE(first.cancel());
        try {
          second.wait();
          ADD_FAILURE() << "rank " << communicator.rank() << " ran what was cancelled";
        } catch (Cancelled const& cancelled) {
          EXPECT_EQ(std::string(cancelled.what()),
                    concat("the operation was cancelled on rank ", ranks - 1));
        }
        third.wait();
        EXPECT_FALSE(third.cancel());
      });
      expect_no_errors(errors);
    }
  });
}

TEST(CommunicatorTest, BlockingCallsAndQueuedOnesFromSeveralThreadsRunOneAtATime) {
  expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
    for (int round = 0; round < 200; ++round) {
      auto const queued = communicator.submit(std::make_shared<Gate>());
      communicator.run(std::make_shared<Gate>());
      EXPECT_TRUE(queued.done());
      communicator.run(std::make_shared<Gate>());
    }
  }));
}

TEST(CommunicatorTest, WhatACompletionThrowsReachesWhoWaitsAndTheThreadGoesOn) {
  for_seeds([](SeededSimulation& simulation) {
    expect_no_errors(simulate_ranks(simulation, 2, [&](Communicator& communicator) {
      auto const throwing =
          communicator.submit(std::make_shared<Gate>(), [](std::exception_ptr const& error) {
            EXPECT_EQ(error, nullptr);
            throw Error("a device is gone, say");
          });
      EXPECT_THROW(throwing.wait(), Error);
      communicator.submit(std::make_shared<Gate>()).wait();
    }));
  });
}

TEST(CommunicatorTest, ARankThatFailsInTheExchangeIsNamedWithItsReason) {
  for_seeds([](SeededSimulation& simulation) {
    std::vector<std::string> messages(3);
    expect_no_errors(simulate_ranks(simulation, 3, [&](Communicator& communicator) {
      try {
        communicator.submit(std::make_shared<Throwing>(false)).wait();
      } catch (Error const& error) {
        messages[communicator.rank()] = error.what();
      }
    }));
    EXPECT_EQ(messages[1], "a bug, say");
    for (int const rank : {0, 2}) {
      EXPECT_NE(messages[rank].find("rank 1 failed: a bug, say"), std::string::npos)
          << messages[rank];
    }
  });
}

TEST(VerdictTest, TheEndOfTheChainOfWaitersIsToBlame) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(5);
  reports[0] = {7, Cause::lost, {3}, ""};
  reports[1] = {7, Cause::timeout, {0}, ""};
  reports[3] = {7, Cause::timeout, {4}, ""};
  Verdict verdict = conclude(reports);
  EXPECT_EQ(verdict.culprits, std::vector{4});
  EXPECT_TRUE(verdict.timed_out);
  EXPECT_FALSE(settled(reports));          // ranks 2 and 4 may still have something to say
  reports[2] = {8, Cause::lost, {0}, ""};  // had completed operation 7
  EXPECT_FALSE(settled(reports));
  reports[3]->cause = Cause::lost;  // rank 4's connection closed, and it had posted nothing before
  EXPECT_TRUE(settled(reports));
  EXPECT_EQ(conclude(reports).culprits, std::vector{4});
  reports[2] = {7, Cause::invalid, {1}, "bad checksum"};
  verdict = conclude(reports);
  EXPECT_EQ(verdict.culprits, std::vector{1});
  EXPECT_NE(verdict.text.find("bad checksum"), std::string::npos);
}

TEST(VerdictTest, OfSeveralSuspectsThoseThatDoNotReportAreToBlame) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(4);
  reports[0] = {7, Cause::lost, {1, 2, 3}, ""};
  EXPECT_FALSE(settled(reports));  // one of them is gone, the others may be about to say so
  reports[2] = {7, Cause::lost, {0, 1}, ""};
  reports[3] = {7, Cause::lost, {0, 1, 2}, ""};
  EXPECT_FALSE(settled(reports));
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
  reports[2]->suspects = {1};
  EXPECT_TRUE(settled(reports));
}

TEST(VerdictTest, WhomAnInterruptedRankWaitedForIsToBlameIfItDoesNotReport) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(3);
  reports[0] = {7, Cause::timeout, {2}, "", {0, 9, 9}, {0, 9, 9}};
  reports[2] = {7, Cause::interrupted, {1}, "", {9, 9, 0}, {9, 9, 0}};
  EXPECT_FALSE(settled(reports));  // rank 1 has just the time that the others have to report
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
  reports[1] = {7, Cause::own, {}, "a bug, say"};
  EXPECT_TRUE(settled(reports));
  Verdict const verdict = conclude(reports);
  EXPECT_EQ(verdict.culprits, std::vector{1});
  EXPECT_NE(verdict.text.find("a bug, say"), std::string::npos);
  // Rank 1 has failed in the next operation; whom the others waited for in this one is no matter.
  reports[0] = {7, Cause::interrupted, {2}, "", {0, 9, 9}, {0, 9, 9}};
  reports[2]->suspects = {0};
  reports[1]->operation = 8;
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
  reports[1] = {8, Cause::invalid, {3}, "bad checksum"};
  reports.resize(4);
  EXPECT_EQ(conclude(reports).culprits, std::vector{3});
  reports[1].reset();
  EXPECT_FALSE(conclude(reports).culprits.empty());
  auto const parsed = parse_report(serialize_report(*reports[2]), 3);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->cause, Cause::interrupted);
}

// Rank 0 had completed operation 7 and left in the next, for want of rank 1; its last message to
// rank 2 was lost with the connection.
TEST(VerdictTest, WhoHadCompletedTheOperationAndLeftForSomebodyElseIsNotToBlame) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(3);
  reports[0] = {8, Cause::lost, {1}, "", {0, 9, 9}, {0, 9, 9}};
  reports[2] = {7, Cause::lost, {0}, "", {9, 9, 0}, {8, 9, 0}};
  EXPECT_TRUE(settled(reports));
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
  reports[0]->cause = reports[2]->cause = Cause::timeout;
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
  reports[1] = {.operation = 8, .cause = Cause::timeout, .suspects = {0}};
  EXPECT_EQ(conclude(reports).culprits, std::vector{0}) << "a message that never came";
  reports[1].reset();
  reports[0] = {8, Cause::own, {}, "it closed its communicator"};
  EXPECT_EQ(conclude(reports).culprits, std::vector{0});
  reports[0] = {8, Cause::invalid, {1}, "bad checksum"};
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
}

// Rank 1 died in operation 8, and rank 2 saw it. Its alarm ended rank 0's wait for the last word of
// operation 7; ranks 3 and 4 lost rank 0 for that.
TEST(VerdictTest, WhoIsLostInAnEarlierOperationThanTheFailureIsNotToBlame) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(5);
  reports[0] = {7, Cause::interrupted, {4}, "", {0, 9, 9, 9, 9}, {0, 9, 9, 9, 8}};
  reports[2] = {8, Cause::lost, {1}, "", {9, 9, 0, 9, 9}, {9, 9, 0, 9, 9}};
  reports[3] = {7, Cause::lost, {4}, "", {9, 9, 9, 0, 9}, {9, 9, 9, 0, 9}};
  reports[4] = {7, Cause::lost, {0}, "", {9, 9, 9, 9, 0}, {9, 9, 9, 9, 0}};
  EXPECT_TRUE(settled(reports));
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
  // Without rank 2 there are only the three whose waits form a circle.
  reports[1] = reports[2] = {8, Cause::interrupted};
  EXPECT_EQ(conclude(reports).culprits, std::vector{4}) << "its message did not arrive";
}

TEST(VerdictTest, AnOperationStandsIfAllThatReportedHaveItsResult) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(4);
  reports[0] = {.operation = 7, .cause = Cause::lost, .suspects = {1}, .committing = true};
  EXPECT_EQ(conclude(reports).completed, 7u);
  reports[2] = {.operation = 8, .cause = Cause::interrupted};  // between 7 and 8
  EXPECT_EQ(conclude(reports).completed, 7u);
  reports[3] = {.operation = 7, .cause = Cause::lost, .suspects = {1}};
  EXPECT_EQ(conclude(reports).completed, 6u);
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
}

TEST(VerdictTest, ARankThatOnlySeemsGoneIsWaitedForIfAnotherHasItsResult) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(3);
  reports[0] = {.operation = 7, .cause = Cause::lost, .suspects = {1}};
  reports[2] = {.operation = 7, .cause = Cause::interrupted};
  EXPECT_TRUE(settled(reports));
  reports[0]->committing = true;
  EXPECT_FALSE(settled(reports));
  reports[1] = {.operation = 7, .cause = Cause::interrupted};
  EXPECT_TRUE(settled(reports));
}

TEST(VerdictTest, ARankBetweenTwoOperationsIsToBlameForATimeoutAlone) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(3);
  reports[0] = {.operation = 7, .cause = Cause::timeout, .suspects = {1}};
  reports[1] = {.operation = 7, .cause = Cause::interrupted};
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
  reports[0] = {.operation = 7, .cause = Cause::lost, .suspects = {1}};
  reports[2].reset();
  reports[1]->suspects = {};
  reports[0]->suspects = {2};
  EXPECT_EQ(conclude(reports).culprits, std::vector{2});
  // Also if others waited for it, and only for those the deadline came.
  reports[0] = {.operation = 7, .cause = Cause::timeout, .suspects = {1}};
  reports[1] = {.operation = 7, .cause = Cause::interrupted, .suspects = {2}};
  reports[2] = {.operation = 7, .cause = Cause::interrupted};
  EXPECT_EQ(conclude(reports).culprits, std::vector{2});
}

// Rank 0 has waited in operation 7 for a message that the others know nothing of: they wait for one
// another, and for rank 0, in operation 8, and left when it did.
TEST(VerdictTest, AMessageThatNeverCameIsItsSendersMatterAlsoIfAllHaveGoneOn) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(4);
  reports[0] = {7, Cause::timeout, {1}, "", {0, 9, 9, 9}, {0, 8, 9, 9}, true, 1};
  reports[1] = {8, Cause::interrupted, {2}, "", {9, 0, 9, 9}, {9, 0, 8, 9}, false, 3};
  reports[2] = {8, Cause::lost, {3}, "", {9, 9, 0, 9}, {9, 9, 0, 8}, false, 4};
  reports[3] = {8, Cause::lost, {0}, "", {9, 9, 9, 0}, {8, 9, 9, 0}, false, 2};
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
  reports[0]->sent = reports[0]->received = {};  // with many ranks they are not counted
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
}

// Rank 0 lost rank 1, which lives. Rank 2, for which rank 1 waits, had ended and left before.
TEST(VerdictTest, WhoLeftAfterItHadEndedIsNotToBlameForALostConnection) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(3);
  reports[0] = {.operation = 7, .cause = Cause::lost, .suspects = {1}, .number = 1};
  reports[1] = {.operation = 7, .cause = Cause::interrupted, .suspects = {2}, .number = 2};
  EXPECT_EQ(conclude(reports).culprits, (std::vector{0, 1}));
}

// Ranks 0 and 1 cannot hear one another any more. Rank 0 noticed, reported and left, which rank 2
// saw; rank 1 was interrupted.
TEST(VerdictTest, BothEndsOfALostConnectionAreNamed) {
  using Cause = FailureReport::Cause;
  std::vector<std::optional<FailureReport>> reports(4);
  reports[0] = {.operation = 7, .cause = Cause::lost, .suspects = {1}, .number = 1};
  reports[1] = {.operation = 7, .cause = Cause::interrupted, .suspects = {3}, .number = 3};
  reports[2] = {.operation = 7, .cause = Cause::lost, .suspects = {0}, .number = 2};
  reports[3] = {.operation = 7, .cause = Cause::interrupted, .suspects = {2}, .number = 4};
  EXPECT_EQ(conclude(reports).culprits, (std::vector{0, 1}));
  reports[1]->cause = Cause::lost;
  reports[1]->suspects = {0};
  EXPECT_EQ(conclude(reports).culprits, (std::vector{0, 1}));
  reports[1].reset();
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
  reports[1] = {.operation = 7, .cause = Cause::own, .number = 3};
  EXPECT_EQ(conclude(reports).culprits, std::vector{1});
}

TEST(VerdictTest, TravelsAsTextAndIsValidated) {
  Verdict const verdict{{0, 2}, true, "ranks 0, 2 did not\ntake part", 7};
  auto const parsed = parse_verdict(serialize_verdict(verdict), 3);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->culprits, verdict.culprits);
  EXPECT_TRUE(parsed->timed_out);
  EXPECT_EQ(parsed->text, verdict.text);
  EXPECT_EQ(parsed->completed, 7u);
  for (char const* text : {"", "7", "7 1 0\n", "7 1 2 0 3\nx", "7 1 2 2 0\nx", "7 1 4 0 1 2 3\nx",
                           "7 1 1 -1\nx", "seven 1 1 0\nx"}) {
    EXPECT_FALSE(parse_verdict(text, 3)) << text;
  }
}

// Rank 0 posts its report and leaves just after the board was found to lack it; rank 2 says so.
TEST(ReportReaderTest, AReportComesWithAllThatWerePostedBeforeIt) {
  using Cause = FailureReport::Cause;
  auto const posted_by = [](int rank, FailureReport const& report) {
    return concat(rank, '\n', serialize_report(report));
  };
  std::vector<std::optional<std::string>> board(3);
  ReportReader reader(3);
  auto const read = [&](int number) {
    auto const found = board[number - 1];
    board[0] = posted_by(0, {7, Cause::lost, {1}, ""});
    board[1] = posted_by(2, {7, Cause::lost, {0}, ""});
    return found;
  };
  reader.look(2, read);
  EXPECT_TRUE(reader.reports()[0].has_value());
  EXPECT_FALSE(reader.reports()[2].has_value());
  reader.look(2, read);
  ASSERT_TRUE(reader.reports()[2].has_value());
  EXPECT_EQ(reader.reports()[0]->number, 1u);
  EXPECT_EQ(reader.reports()[2]->number, 2u);
  EXPECT_TRUE(settled(reader.reports()));
  EXPECT_EQ(conclude(reader.reports()).culprits, std::vector{1});
}

TEST(ReportReaderTest, WhatIsNoReportIsPassedOver) {
  std::vector<std::string> const board = {"not a report", "3\n7 1 0 0 0\n", "1\n7 1 0 0 0\n"};
  ReportReader reader(3);
  for (std::int64_t const posted : {std::int64_t{3}, std::int64_t{-1}, std::int64_t{1} << 40}) {
    reader.look(posted, [&](int number) { return std::optional(board[number - 1]); });
  }
  EXPECT_FALSE(reader.reports()[0].has_value());
  EXPECT_TRUE(reader.reports()[1].has_value());
  EXPECT_FALSE(reader.reports()[2].has_value());
}

}  // namespace
}  // namespace sparsecomm::test
