// The simulated scheduler, and a communicator on it.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "failing_steps.h"
#include "simulated_ranks.h"

namespace sparsecomm::test {
namespace {

using std::chrono::hours;
using std::chrono::seconds;

// Two threads that take turns at a counter, and what they saw.
std::string interleave(std::uint64_t seed, std::uint64_t* trace = nullptr) {
  SeededSimulation simulation(seed);
  std::string order;
  simulation.run([&] {
    auto const body = [&](char letter) {
      for (int i = 0; i < 8; ++i) {
        order += letter;
        simulation.yield();
      }
    };
    std::thread one = simulation.start("one", [&] { body('1'); });
    std::thread two = simulation.start("two", [&] { body('2'); });
    simulation.join(one);
    simulation.join(two);
  });
  if (trace != nullptr) *trace = simulation.trace();
  return order;
}

TEST(SimulationTest, ARunIsAFunctionOfItsSeed) {
  std::set<std::string> orders;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::uint64_t first = 0, second = 0;
    std::string const order = interleave(seed, &first);
    EXPECT_EQ(interleave(seed, &second), order);
    EXPECT_EQ(first, second);
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 40u);
}

TEST(SimulationTest, TimePassesOnlyWhenNobodyCanRun) {
  SeededSimulation simulation(1);
  auto const real = std::chrono::steady_clock::now();
  simulation.run([&] {
    Runtime const runtime(simulation);
    TimePoint const begin = simulation.now();
    std::mutex mutex;
    Condition condition(runtime, "what never comes");
    std::unique_lock lock(mutex);
    EXPECT_FALSE(condition.wait_for(lock, hours(5), [] { return false; }));
    EXPECT_EQ(simulation.now() - begin, hours(5));
    lock.unlock();
    runtime.sleep(hours(1));
    EXPECT_EQ(simulation.now() - begin, hours(6));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - real, long_time());
}

TEST(SimulationTest, ADeadlockSaysWhoWaitsForWhat) {
  SeededSimulation simulation(1);
  try {
    simulation.run([&] {
      Runtime const runtime(simulation);
      auto* const mutex = new std::mutex;  // left behind with the threads
      auto* const condition = new Condition(runtime, "a letter");
      std::thread other = runtime.start("the reader", [=] {
        std::unique_lock lock(*mutex);
        condition->wait(lock, [] { return false; });
      });
      runtime.join(other);
    });
    FAIL() << "no deadlock";
  } catch (Deadlock const& deadlock) {
    std::string const text = deadlock.what();
    EXPECT_NE(text.find("(the reader) waits for a letter"), std::string::npos) << text;
    EXPECT_NE(text.find("(the first) waits for the end of a thread"), std::string::npos) << text;
  }
}

// Those whose waits are simulated: aggregators' are not yet.
std::vector<std::string> simulated_algorithms() {
  std::vector<std::string> names;
  for (auto const& entry : algorithms()) {
    if (entry.needs != Needs::aggregators) names.emplace_back(entry.name);
  }
  return names;
}

class SimulatedFailureTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Algorithms, SimulatedFailureTest,
                         ::testing::ValuesIn(simulated_algorithms()),
                         [](auto const& info) { return info.param; });

constexpr std::size_t numel = 600;
constexpr int culprit = 1;

// What a simulation of steps in which a rank fails has come to.
struct Outcome {
  std::vector<Survivor> survivors;
  std::uint64_t trace = 0;
};

Outcome simulate(std::string const& algorithm, int ranks, Fault fault, std::uint64_t seed) {
  SeededSimulation simulation(seed);
  Outcome run{.survivors = std::vector<Survivor>(static_cast<std::size_t>(ranks))};
  auto const errors = simulate_ranks(
      simulation, ranks,
      [&](Communicator& communicator) {
        run.survivors[static_cast<std::size_t>(communicator.rank())] =
            run_until_failure(communicator, algorithm, numel);
      },
      {}, RankFault{culprit, fault}, services_for(algorithm).wrap);
  expect_no_errors(errors);
  run.trace = simulation.trace();
  return run;
}

TEST_P(SimulatedFailureTest, AnyMessageMayBeTheLastOrNeverComeOrBeDamaged) {
  std::uint64_t faults = 0;
  for (int const ranks : {2, 3, 5}) {
    std::uint64_t const messages = messages_of_two_steps(GetParam(), ranks, numel, culprit);
    for (FaultKind const kind :
         {FaultKind::die, FaultKind::delay, FaultKind::truncate, FaultKind::corrupt}) {
      for (std::uint64_t message = 0; message < messages; ++message) {
        SCOPED_TRACE(concat("P=", ranks, ", fault ", int(kind), " at message ", message));
        Outcome const run = simulate(GetParam(), ranks, {kind, message}, message);
        ++faults;
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank != culprit) expect_accused(run.survivors[std::size_t(rank)], culprit);
        }
        ASSERT_EQ(find_violation(run.survivors, culprit, GetParam()), "");
        if (HasFailure()) return;
      }
    }
  }
  RecordProperty("faults", std::to_string(faults));
}

TEST_P(SimulatedFailureTest, ARunIsAFunctionOfItsSeed) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    Fault const fault{FaultKind::die, seed};
    Outcome const one = simulate(GetParam(), 3, fault, seed);
    Outcome const two = simulate(GetParam(), 3, fault, seed);
    EXPECT_EQ(one.trace, two.trace);
    EXPECT_EQ(one.survivors[0].error, two.survivors[0].error);
  }
}

}  // namespace
}  // namespace sparsecomm::test
