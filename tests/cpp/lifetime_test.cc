// How a communicator ends, beside and within what still runs: exit, fork, callbacks, interrupts.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <future>
#include <limits>

#include "engine/gradient_exchange.h"
#include "kernels/block_scan.h"
#include "kernels/half.h"
#include "kernels/intersect.h"
#include "kernels/kernels.h"
#include "services.h"
#include "simulated_ranks.h"
#include "transport/wrapped.h"
#include "wire/index_kernels.h"
#include "wire/qsgd.h"

namespace sparsecomm::test {
namespace {

using std::chrono::seconds;

// Ends at once where nothing is asked of other ranks; else waits for a message that nobody sends.
class Plain final : public Operation {
 public:
  explicit Plain(bool waits = false) : waits_(waits) {}
  Proposal prepare() override { return {.text = "operation=plain"}; }
  void run(Channel& channel, Agreement const& /*agreement*/) override {
    if (!waits_) return;
    std::vector<std::byte> buffer(100);
    Request request = channel.irecv(1 - channel.rank(), Phase::reduce, buffer);
    channel.wait(request);
  }

 private:
  bool waits_;
};

struct Raised : Error {
  using Error::Error;
};

class RaiseAtOnce final : public Interrupt {
 private:
  void check() override { throw Raised("Ctrl-C, say"); }
};

// As an engine is that blocks in a library's own wait.
class Uninterruptible final : public WrappedTransport {
 public:
  using WrappedTransport::WrappedTransport;
  bool interruptible() const override { return false; }
};

bool tables_are_whole() {
  auto const scalar = [](auto const& tables) { return tables.front().target == "scalar"; };
  std::vector<std::uint32_t> const indices{1, 2, 3};
  return scalar(index_kernel_tables()) && scalar(qsgd_kernel_tables<float>()) &&
         scalar(qsgd_kernel_tables<double>()) && scalar(block_kernel_tables()) &&
         scalar(intersect_kernel_tables()) && scalar(half_kernel_tables<Half>()) &&
         scalar(kernel_tables<float>()) && scalar(kernel_tables<double>()) &&
         scalar(kernel_tables<Half>()) && scalar(kernel_tables<BFloat16>()) &&
         index_kernels().strictly_increasing(indices);
}

// What is registered first runs last, after the destructors of statics that were made later.
TEST(LifetimeTest, AThreadThatRunsAtExitFindsItsTables) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        std::atexit([] {
          if (!tables_are_whole() || inline_executor().threads() != 1 ||
              steady_clock().now() == TimePoint{}) {
            ::_exit(3);
          }
        });
        tables_are_whole();
        inline_executor();
        steady_clock();
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(LifetimeTest, WhatAnOperationHoldsIsGoneOnceItHasEnded) {
  expect_no_errors(run_ranks(1, [](Communicator& communicator) {
    for (int round = 0; round < 2000; ++round) {
      auto operation = std::make_shared<Plain>();
      auto held = std::make_shared<int>();
      std::weak_ptr<Plain> const watched = operation;
      std::weak_ptr<int> const completion = held;
      auto const handle = communicator.submit(
          std::move(operation), [held = std::move(held)](std::exception_ptr const&) {});
      handle.wait();
      ASSERT_TRUE(watched.expired()) << round;
      ASSERT_TRUE(completion.expired()) << round;
    }
  }));
}

class NumberOfOperation final : public Operation {
 public:
  Proposal prepare() override { return {}; }
  void run(Channel& channel, Agreement const&) override { number = channel.operation(); }

  std::uint32_t number = 0;
};

// By all algorithms, each in turn.
TEST(LifetimeTest, NumbersOfOperationsWrapAround) {
  constexpr std::size_t numel = 100;
  for (std::uint64_t const wrap : {std::uint64_t{1} << 28, std::uint64_t{1} << 32}) {
    CommunicatorOptions options = patient_options();
    options.first_operation = wrap - 50;
    auto const body = [&](Communicator& communicator) {
      auto const first = std::make_shared<NumberOfOperation>();
      communicator.run(first);
      EXPECT_EQ(first->number, static_cast<std::uint32_t>(wrap - 49));
      auto const ranks = static_cast<float>(communicator.size());
      std::vector<std::shared_ptr<GradientExchange<float>>> exchanges;
      for (AlgorithmEntry const& entry : algorithms()) {
        ExchangeOptions own;
        own.algorithm = entry.name;
        own.density = 1;
        own.average = false;
        exchanges.push_back(
            std::make_shared<GradientExchange<float>>("test", numel, own, communicator));
      }
      std::vector<float> residual(numel);
      for (int step = 0; step < 200; ++step) {
        auto const& exchange = exchanges[std::size_t(step) % exchanges.size()];
        std::vector<float> gradient(numel, static_cast<float>(step));
        exchange->bind({{gradient, residual}});
        communicator.submit(exchange).wait();
        ASSERT_EQ(gradient, std::vector<float>(numel, ranks * static_cast<float>(step)))
            << exchange->algorithm() << ", step " << step;
      }
    };
    expect_no_errors(run_ranks(3, body, options, {}, services_for("auto")));
  }
}

// Glibc gives new threads of the child the stacks, and so the handles, of those that were not
// copied.
TEST(LifetimeTest, AForkedChildDropsACommunicatorWithoutTouchingItsThreads) {
  auto transports = make_inproc_transports(1);
  auto communicator =
      std::make_unique<Communicator>(std::move(transports[0]), CommunicatorOptions{});
  pid_t const child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::promise<void> end;
    auto const ended = end.get_future().share();
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back([ended] { ended.wait(); });
    communicator.reset();
    end.set_value();
    try {
      for (std::thread& thread : threads) thread.join();
    } catch (std::exception const&) {
      ::_exit(3);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(LifetimeTest, ABlockingCallFromACompletionIsRefused) {
  expect_no_errors(run_ranks(2, [](Communicator& communicator) {
    std::vector<std::string> refusals;
    auto const later = std::make_shared<std::promise<Communicator::Handle>>();
    auto const first =
        communicator.submit(std::make_shared<Plain>(), [&](std::exception_ptr const&) {
          EXPECT_TRUE(communicator.on_own_thread());
          auto const next = communicator.submit(std::make_shared<Plain>());
          for (auto const& wait :
               {std::function<void()>([&] { communicator.run(std::make_shared<Plain>()); }),
                std::function<void()>([&] { next.wait(); })}) {
            try {
              wait();
              refusals.emplace_back();
            } catch (Error const& error) {
              refusals.emplace_back(error.what());
            }
          }
          later->set_value(next);
        });
    first.wait();
    later->get_future().get().wait();
    ASSERT_EQ(refusals.size(), 2u);
    for (auto const& refusal : refusals) {
      EXPECT_NE(refusal.find("async_op=True"), std::string::npos) << refusal;
    }
    EXPECT_FALSE(communicator.on_own_thread());
    communicator.run(std::make_shared<Plain>());
  }));
}

TEST(LifetimeTest, AClosedCommunicatorRunsNothing) {
  expect_no_errors(run_ranks(1, [](Communicator& communicator) {
    communicator.close();
    communicator.close();
    EXPECT_TRUE(communicator.closed());
    EXPECT_THROW(communicator.submit(std::make_shared<Plain>()), Aborted);
    EXPECT_THROW(communicator.run(std::make_shared<Plain>()), Aborted);
  }));
}

// The interrupted rank is named by its peer, and both are done.
void check_interrupted(WrapTransport const& wrap) {
  SeededSimulation simulation(1);
  TimePoint const start = simulation.now();
  std::string reason;
  expect_no_errors(simulate_ranks(
      simulation, 2,
      [&](Communicator& communicator) {
        auto const operation = std::make_shared<Plain>(true);
        if (communicator.rank() == 0) {
          RaiseAtOnce interrupt;
          EXPECT_THROW(communicator.run(operation, &interrupt), Raised);
        } else {
          try {
            communicator.run(operation);
          } catch (PeerLost const& error) {
            reason = error.what();
            EXPECT_EQ(error.ranks(), std::vector{0});
          }
        }
        EXPECT_THROW(communicator.run(std::make_shared<Plain>()), Aborted);
      },
      {.failure_grace = std::chrono::hours(1)}, std::nullopt, wrap));
  EXPECT_LT(simulation.now() - start, seconds(1));
  EXPECT_NE(reason.find("rank 0 failed"), std::string::npos) << reason;
}

TEST(LifetimeTest, AnInterruptBreaksOffWhatTheCallersThreadRuns) { check_interrupted({}); }

TEST(LifetimeTest, AnInterruptBreaksOffWhatTheProgressThreadRunsForTheCaller) {
  check_interrupted(
      [](auto transport) { return std::make_unique<Uninterruptible>(std::move(transport)); });
}

TEST(LifetimeTest, AnInterruptCancelsWhatHasNotBegun) {
  std::promise<void> open;
  auto const opened = open.get_future().share();
  expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
    auto const before = communicator.submit(std::make_shared<Plain>(),
                                            [opened](std::exception_ptr const&) { opened.wait(); });
    if (communicator.rank() == 0) {
      RaiseAtOnce interrupt;
      EXPECT_THROW(communicator.run(std::make_shared<Plain>(), &interrupt), Raised);
      open.set_value();
    } else {
      EXPECT_THROW(communicator.run(std::make_shared<Plain>()), Cancelled);
    }
    before.wait();
    communicator.run(std::make_shared<Plain>());
  }));
}

TEST(DeadlineTest, NeverComesAndCanBeComputedWith) {
  Deadline deadline(steady_clock(), Duration::max());
  EXPECT_FALSE(deadline.passed());
  EXPECT_GT(deadline.remaining(), std::chrono::hours(24 * 365 * 50));
  deadline.postpone(seconds(1));
  EXPECT_FALSE(deadline.passed());
  EXPECT_TRUE(Deadline(steady_clock(), Duration::zero()).passed());
  EXPECT_TRUE(Deadline(steady_clock(), Duration::min()).passed());
}

}  // namespace
}  // namespace sparsecomm::test
