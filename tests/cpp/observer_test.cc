// What can be seen of an operation: its stages as they go by, and the record of its last step.
#include "engine/observer.h"

#include <gtest/gtest.h>

#include "engine/gradient_exchange.h"
#include "gradients.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

class Journal final : public StageObserver {
 public:
  void begin(Stage stage) noexcept override {
    open_.push_back(stage);
    text += concat(std::string(2 * (open_.size() - 1), ' '), name(stage), '\n');
  }
  void end(Stage stage) noexcept override {
    nested = nested && !open_.empty() && open_.back() == stage;
    open_.pop_back();
  }
  bool closed() const { return open_.empty(); }

  std::string text;
  bool nested = true;

 private:
  static char const* name(Stage stage) {
    constexpr char const* names[] = {"whole", "agree", "select", "exchange", "apply"};
    return names[static_cast<int>(stage)];
  }
  std::vector<Stage> open_;
};

constexpr std::size_t numel = 1000;

void run_step(Communicator& communicator, std::shared_ptr<GradientExchange<float>> const& exchange,
              std::vector<float>& residual, int step) {
  auto const input = patterns[0].make(communicator.rank(), communicator.size(), numel, step);
  std::vector<float> gradient(input.begin(), input.end());
  exchange->bind({{gradient, residual}});
  communicator.submit(exchange).wait();
}

TEST(ObserverTest, SeesTheStagesOfEveryStepAlsoOfOneThatFails) {
  expect_no_errors(run_ranks(2, [](Communicator& communicator) {
    Journal journal;
    ExchangeOptions options;
    options.density = 0.05;
    auto const exchange =
        std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
    exchange->show_to(journal);
    std::vector<float> residual(numel, 0.0f);
    run_step(communicator, exchange, residual, 0);
    // It is prepared, and waits, before its turn.
    std::string const turn = "  agree\nwhole\n  agree\n";
    EXPECT_EQ(journal.text, "whole\n  select\n" + turn + "  select\n  exchange\n  apply\n");
    journal.text.clear();
    exchange->set_density(communicator.rank() == 0 ? 0.1 : 0.2);
    EXPECT_THROW(run_step(communicator, exchange, residual, 1), Mismatch);
    EXPECT_EQ(journal.text, "whole\n  select\n" + turn);
    EXPECT_TRUE(journal.nested && journal.closed());
  }));
}

TEST(StepRecordTest, IsWhatTheStepAddedToTheTotals) {
  expect_no_errors(run_ranks(3, [](Communicator& communicator) {
    ExchangeOptions options;
    options.density = 0.05;
    options.schedule = {ThresholdSource::reused, 4};
    auto const exchange =
        std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
    EXPECT_EQ(exchange->last_step().algorithm, "");
    std::vector<float> residual(numel, 0.0f);
    ExchangeStats before = exchange->stats();
    Traffic traffic_before = Traffic::of(communicator.counters());
    for (int step = 0; step < 6; ++step) {
      run_step(communicator, exchange, residual, step);
      StepRecord const& last = exchange->last_step();
      ExchangeStats const& stats = exchange->stats();
      Traffic const traffic = Traffic::of(communicator.counters());
      EXPECT_EQ(last.algorithm, "oktopk");
      EXPECT_EQ(last.step, static_cast<std::uint64_t>(step));
      EXPECT_TRUE(last.finite);
      EXPECT_EQ(last.selected, stats.selected - before.selected);
      EXPECT_EQ(last.result_nnz, stats.result_nnz - before.result_nnz);
      EXPECT_EQ(last.select, stats.select - before.select);
      EXPECT_EQ(last.exchange, stats.exchange - before.exchange);
      EXPECT_EQ(last.apply, stats.apply - before.apply);
      EXPECT_EQ(last.agree, stats.agree - before.agree);
      EXPECT_GT(last.agree, Duration::zero());
      EXPECT_EQ(last.sent_bytes, traffic.sent_bytes - traffic_before.sent_bytes);
      EXPECT_EQ(last.received_bytes, traffic.received_bytes - traffic_before.received_bytes);
      EXPECT_EQ(last.messages, traffic.messages - traffic_before.messages);
      EXPECT_EQ(last.threshold, exchange->state().local_threshold);
      EXPECT_EQ(last.threshold_age, static_cast<std::uint64_t>(step % 4));
      EXPECT_FALSE(last.predicted_seconds.has_value());
      before = stats;
      traffic_before = traffic;
    }
  }));
}

TEST(StepRecordTest, HasWhatThePlanExpectsOnceItHasSeenTheAlgorithm) {
  CommunicatorOptions slow_link;
  slow_link.figures = std::make_shared<Figures const>(
      Figures{{1e-4, 1e-5, 1e-8}, {1e-10, 1e-9, 1e-8, 4e-10, 1e-9, 4e-9, 2e-9, 1e-9}});
  std::vector<std::vector<double>> predicted(2);
  expect_no_errors(run_ranks(
      2,
      [&](Communicator& communicator) {
        ExchangeOptions options;
        options.algorithm = auto_algorithm;
        options.density = 0.05;
        auto const exchange =
            std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
        std::vector<float> residual(numel, 0.0f);
        for (int step = 0; step < 4; ++step) {
          run_step(communicator, exchange, residual, step);
          predicted[communicator.rank()].push_back(
              exchange->last_step().predicted_seconds.value_or(-1));
          EXPECT_GT(exchange->last_step().observed_seconds, 0);
        }
      },
      slow_link));
  EXPECT_EQ(predicted[0], predicted[1]);
  // Nothing has been seen yet: the prediction as the figures have it.
  Workload const workload{.ranks = 2, .extent = numel, .k = 50, .options = {}};
  auto const ranking = rank_algorithms(workload, *slow_link.figures, is_candidate);
  EXPECT_NEAR(predicted[0][0], ranking[0].total(), 0.02 * ranking[0].total());
  for (double const seconds : predicted[0]) EXPECT_GT(seconds, 0);
}

}  // namespace
}  // namespace sparsecomm::test
