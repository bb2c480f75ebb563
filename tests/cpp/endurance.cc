// What a rank holds stays as it is over long runs: `make endurance`, which turns off glibc's caches
// of what threads have freed, since that would count as held.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <barrier>
#include <filesystem>
#include <iostream>

#include "engine/gradient_exchange.h"
#include "many_names.h"
#include "services.h"

namespace sparsecomm::test {
namespace {

std::ptrdiff_t count_files(char const* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

// Of this process.
struct Holdings {
  std::size_t bytes = ::mallinfo2().uordblks + ::mallinfo2().hblkhd;
  std::ptrdiff_t threads = count_files("/proc/self/task");
  std::ptrdiff_t descriptors = count_files("/proc/self/fd");

  friend std::ostream& operator<<(std::ostream& out, Holdings const& held) {
    return out << held.bytes << " bytes, " << held.threads << " threads, " << held.descriptors
               << " descriptors";
  }
};

void expect_flat(Holdings const& before, Holdings const& after) {
  std::cout << "before: " << before << "\nafter:  " << after << "\n";
  EXPECT_EQ(after.threads, before.threads);
  EXPECT_EQ(after.descriptors, before.descriptors);
  // Less than a byte for each.
  EXPECT_LT(after.bytes, before.bytes + 4096);
}

TEST(EnduranceTest, CommunicatorsLeaveNothingBehind) {
  auto const make = [](int count) {
    for (int i = 0; i < count; ++i) {
      expect_no_errors(run_ranks(2, [](Communicator& communicator) {
        auto const exchange =
            std::make_shared<GradientExchange<float>>("test", 100, ExchangeOptions{}, communicator);
        std::vector<float> gradient(100, 1.0f), residual(100);
        exchange->bind({{gradient, residual}});
        communicator.submit(exchange).wait();
      }));
    }
  };
  make(1000);
  Holdings const before;
  make(10000);
  expect_flat(before, {});
}

// In turn by all algorithms.
TEST(EnduranceTest, StepsLeaveNothingBehind) {
  constexpr int ranks = 2;
  constexpr std::size_t numel = 600;
  std::vector<Holdings> held;
  // While no rank has anything on its way.
  std::barrier between(ranks, [&]() noexcept { held.emplace_back(); });
  expect_no_errors(run_ranks(
      ranks,
      [&](Communicator& communicator) {
        std::vector<std::shared_ptr<GradientExchange<float>>> exchanges;
        for (AlgorithmEntry const& entry : algorithms()) {
          ExchangeOptions options;
          options.algorithm = entry.name;
          options.density = 0.05;
          exchanges.push_back(
              std::make_shared<GradientExchange<float>>("test", numel, options, communicator));
        }
        std::vector<std::vector<float>> residuals(exchanges.size(), std::vector<float>(numel));
        std::vector<float> gradient(numel);
        auto const step = [&](std::size_t number) {
          for (std::size_t i = 0; i < numel; ++i) {
            gradient[i] = static_cast<float>((i * 7 + number * 3) % 64) - 32;
          }
          std::size_t const which = number % exchanges.size();
          exchanges[which]->bind({{gradient, residuals[which]}});
          communicator.submit(exchanges[which]).wait();
        };
        for (std::size_t number = 0; number < 20000; ++number) step(number);
        between.arrive_and_wait();
        for (std::size_t number = 0; number < 200000; ++number) step(number);
        between.arrive_and_wait();
      },
      patient_options(), {}, services_for("auto")));
  ASSERT_EQ(held.size(), 2u);
  expect_flat(held[0], held[1]);
}

TEST(EnduranceTest, NamesInAnyOrderRunAlikeOnAllRanks) {
  run_many_names({.ranks = 8, .threads = 4, .steps = 1000, .names = 200, .cached = 150});
}

}  // namespace
}  // namespace sparsecomm::test
