// The simulated scheduler.
#include "simulation.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "patience.h"

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

}  // namespace
}  // namespace sparsecomm::test
