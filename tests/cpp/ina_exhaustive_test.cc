// Every order of deliveries: two workers, windows of 1 to 3 blocks, arrays of up to 6 blocks, every
// pair of sets of blocks that are not zero.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ina_run.h"

namespace sparsecomm::test {
namespace {

constexpr std::size_t block_bytes = 64;
constexpr std::size_t in_block = block_bytes / sizeof(float);

InaPlan plan_of(unsigned blocks, unsigned window, CombineOrder order) {
  return {.elements = blocks * in_block - 3,  // the last block is shorter
          .block_bytes = block_bytes,
          .workers = 2,
          .window = static_cast<std::uint8_t>(window),
          .order = order};
}

// Block i of the worker holds a power of two that no other block of either holds.
Bytes input_of(InaPlan const& plan, unsigned worker, unsigned support) {
  std::vector<float> input(plan.elements);
  for (unsigned i = 0; i < plan.blocks(); ++i) {
    if ((support >> i & 1) != 0)
      input[i * in_block + 2] = static_cast<float>(1u << (2 * i + worker));
  }
  auto const bytes = std::as_bytes(std::span(input));
  return {bytes.begin(), bytes.end()};
}

class Explorer {
 public:
  Explorer(InaPlan const& plan, std::vector<Bytes> const& inputs)
      : plan_(plan), inputs_(inputs), expected_(dense_reduction(plan, inputs)) {}

  // Runs every order of deliveries; returns how many there are.
  std::size_t all_orders() {
    std::size_t orders = 0;
    std::vector<int> path;
    while (true) {
      // Replays the path, and goes on with the first of the choices.
      auto run = new_run();
      std::vector<int> taken;
      std::vector<int> next;  // the smallest larger path
      for (auto open = run.choices(); !open.empty(); open = run.choices()) {
        int const choice = taken.size() < path.size() ? path[taken.size()] : open.front();
        auto const later = std::ranges::upper_bound(open, choice);
        if (later != open.end()) {
          next = taken;
          next.push_back(*later);
        }
        run.step(choice);
        taken.push_back(choice);
      }
      ++orders;
      check_end(run, taken);
      if (next.empty() || ::testing::Test::HasFailure()) return orders;
      path = next;
    }
  }

  // Visits every state once. A state is how many messages have been delivered on each of the four
  // ways, and who came first in a round that is not over; that who came first in a round that is
  // over leaves no trace is what all_orders() shows.
  std::size_t all_states() {
    std::set<std::array<int, 5>> seen;
    std::vector<std::vector<int>> paths{{}};
    while (!paths.empty() && !::testing::Test::HasFailure()) {
      std::vector<int> const path = paths.back();
      paths.pop_back();
      auto run = new_run();
      std::array<int, 5> state{0, 0, 0, 0, -1};
      for (int const choice : path) {
        run.step(choice);
        ++state[choice];
        if (choice < 2) state[4] = state[0] == state[1] ? -1 : choice;
      }
      if (!seen.insert(state).second) continue;
      auto const open = run.choices();
      if (open.empty()) check_end(run, path);
      for (int const choice : open) {
        paths.push_back(path);
        paths.back().push_back(choice);
      }
    }
    return seen.size();
  }

 private:
  InaRun new_run() {
    aggregator_.lose(0);  // ends a run that was left in the middle
    return {aggregator_, workers_, plan_, inputs_, {.in_place = ++runs_ % 2 == 0}};
  }

  void check_end(InaRun const& run, std::vector<int> const& path) {
    std::string text;
    for (int const choice : path) text += concat(choice, " ");
    EXPECT_TRUE(run.complete()) << "nothing can happen any more after " << text;
    for (Bytes const& output : run.outputs()) EXPECT_EQ(output, expected_) << text;
  }

  static InaAggregator new_aggregator() {
    return InaAggregator(plan_of(6, 3, CombineOrder::arrival));
  }

  InaPlan plan_;
  std::vector<Bytes> inputs_;
  Bytes expected_;
  InaAggregator aggregator_ = new_aggregator();
  std::vector<InaWorker> workers_;
  unsigned runs_ = 0;
};

template <class F>
void for_all_supports(unsigned blocks, unsigned window, CombineOrder order, F&& f) {
  InaPlan const plan = plan_of(blocks, window, order);
  for (unsigned a = 0; a < 1u << blocks; ++a) {
    for (unsigned b = 0; b < 1u << blocks; ++b) {
      SCOPED_TRACE(concat("window ", window, ", supports ", a, " and ", b));
      f(Explorer(plan, {input_of(plan, 0, a), input_of(plan, 1, b)}));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// Orders of a run of R rounds: the two contributions of the first in either order; then six orders
// of the two updates and of the contributions that each sets free; at the end the last updates.
TEST(InaExhaustiveTest, EveryOrderOfDeliveriesEndsWithTheSum) {
  std::map<std::size_t, int> runs_with;
  auto const explore = [&](Explorer explorer) { ++runs_with[explorer.all_orders()]; };
  for (CombineOrder const order : {CombineOrder::arrival, CombineOrder::rank}) {
    for_all_supports(6, 3, order, explore);
    for_all_supports(order == CombineOrder::arrival ? 6 : 4, 2, order, explore);
    for_all_supports(4, 1, order, explore);
  }
  // 1 to 4 rounds, and no other number.
  std::vector<std::size_t> orders;
  for (auto const& [count, runs] : runs_with) orders.push_back(count);
  EXPECT_EQ(orders, (std::vector<std::size_t>{4, 24, 144, 864}));
}

TEST(InaExhaustiveTest, EveryStateOfSixBlocksGoesOnToTheSum) {
  std::size_t states = 0;
  auto const explore = [&](Explorer explorer) { states += explorer.all_states(); };
  for (unsigned const window : {1u, 2u, 3u}) {
    for_all_supports(6, window, CombineOrder::arrival, explore);
  }
  for_all_supports(6, 2, CombineOrder::rank, explore);
  EXPECT_GT(states, 100000u);
}

}  // namespace
}  // namespace sparsecomm::test
