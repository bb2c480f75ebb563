// That both groupings are tried, that the quicker one is kept, and that counts alone say when.
#include "engine/grouping_trial.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"

namespace sparsecomm::test {
namespace {

constexpr GroupingTrialOptions few{.steps = 3, .most = 8, .least_gain = 0.02};

// Observes steps of two buckets.
void observe(GroupingTrial& trial, std::vector<double> const& seconds, bool settled = true) {
  for (double const each : seconds) trial.observe(2, settled, each);
}

// What has been tried by ranks that took as long.
Grouping decision(double model, double buckets) {
  GroupingTrial trial(few);
  observe(trial, {model, model, model});
  EXPECT_EQ(trial.grouping(), Grouping::buckets);
  EXPECT_FALSE(trial.is_over());
  observe(trial, {buckets, buckets, buckets});
  EXPECT_TRUE(trial.is_over());
  EXPECT_FALSE(trial.decided());
  trial.decide(trial.times());
  EXPECT_TRUE(trial.decided());
  EXPECT_FALSE(trial.is_over());
  return trial.grouping();
}

TEST(GroupingTrialTest, KeepsTheQuickerOneAndTheGroupIfTheyAreAlike) {
  EXPECT_EQ(GroupingTrial().grouping(), Grouping::model);
  EXPECT_EQ(decision(0.1, 0.09), Grouping::buckets);
  EXPECT_EQ(decision(0.1, 0.0975), Grouping::buckets);
  EXPECT_EQ(decision(0.1, 0.0985), Grouping::model);
  EXPECT_EQ(decision(0.1, 0.2), Grouping::model);
}

TEST(GroupingTrialTest, ADisturbedStepDoesNotCount) {
  GroupingTrial trial(few);
  observe(trial, {0.1, 50, 0.1});
  observe(trial, {0.09, 0.09, 0});
  trial.decide(trial.times());
  EXPECT_FLOAT_EQ(trial.times().model, 0.1F);
  EXPECT_EQ(trial.grouping(), Grouping::buckets);
}

TEST(GroupingTrialTest, StepsWithAnAlgorithmOnTrialDoNotCountUnlessThereAreNoOthers) {
  GroupingTrial trial(few);
  observe(trial, {9, 9}, false);
  observe(trial, {0.1, 0.2});
  observe(trial, {9}, false);
  EXPECT_EQ(trial.grouping(), Grouping::model);
  observe(trial, {0.3});
  EXPECT_EQ(trial.grouping(), Grouping::buckets);
  EXPECT_FLOAT_EQ(trial.times().model, 0.2F);
  observe(trial, {1, 2, 3, 4, 5, 6, 7}, false);
  EXPECT_FALSE(trial.is_over());
  observe(trial, {8}, false);
  EXPECT_TRUE(trial.is_over());
  EXPECT_FLOAT_EQ(trial.times().buckets, 5);
}

TEST(GroupingTrialTest, ASingleBucketLeavesNoChoice) {
  GroupingTrial trial(few);
  // DDP has made its buckets anew after the first step.
  trial.observe(1, true, 0.1);
  observe(trial, {0.1, 0.1});
  EXPECT_FALSE(trial.decided());
  GroupingTrial single(few);
  for (int step = 0; step < 3; ++step) single.observe(1, true, 0.1);
  EXPECT_TRUE(single.decided());
  EXPECT_EQ(single.grouping(), Grouping::model);
  EXPECT_EQ(single.times().model, 0);
}

TEST(GroupingTrialTest, AllRanksDecideAlikeWhateverEachHasMeasured) {
  // Rank 1 is late, so that rank 0 waits for it; rank 2 is out of data.
  std::array<GroupingTrial, 3> ranks{GroupingTrial(few), GroupingTrial(few), GroupingTrial(few)};
  for (double const buckets : {0.0, 0.02}) {
    for (int step = 0; step < 3; ++step) {
      ranks[0].observe(2, true, 0.5 - buckets);
      ranks[1].observe(2, true, 0.1 - buckets);
      ranks[2].observe(2, true, std::nullopt);
    }
  }
  GroupingTimes agreed;
  for (GroupingTrial const& rank : ranks) EXPECT_TRUE(agreed.merge(rank.times()));
  EXPECT_FLOAT_EQ(agreed.model, 0.1F);
  EXPECT_FLOAT_EQ(agreed.buckets, 0.08F);
  for (GroupingTrial& rank : ranks) {
    ASSERT_TRUE(rank.is_over());
    rank.decide(agreed);
    EXPECT_EQ(rank.grouping(), Grouping::buckets);
  }
}

TEST(GroupingTrialTest, NothingIsKnownIfNoRankHasData) {
  GroupingTrial trial(few);
  for (int step = 0; step < 6; ++step) trial.observe(2, true, std::nullopt);
  ASSERT_TRUE(trial.is_over());
  trial.decide(trial.times());
  EXPECT_EQ(trial.grouping(), Grouping::model);
}

TEST(GroupingTrialTest, ADecisionStays) {
  GroupingTrial trial(few);
  observe(trial, {1, 1, 1, 1});
  trial.restart();
  EXPECT_EQ(trial.grouping(), Grouping::model);
  observe(trial, {1, 1, 1});
  EXPECT_EQ(trial.grouping(), Grouping::buckets);
  trial.decide({1, 0.5});
  trial.restart();
  observe(trial, {9, 9, 9, 9, 9});
  EXPECT_TRUE(trial.decided());
  EXPECT_EQ(trial.grouping(), Grouping::buckets);
  EXPECT_FLOAT_EQ(trial.times().buckets, 0.5);
}

TEST(GroupingTrialTest, TimesThatCannotBeAreRejected) {
  GroupingTimes times{1, 1};
  float const infinity = std::numeric_limits<float>::infinity();
  EXPECT_THROW(times.merge({std::nanf(""), 1}), MalformedFrame);
  EXPECT_THROW(times.merge({1, infinity}), MalformedFrame);
  EXPECT_THROW(times.merge({-1, 1}), MalformedFrame);
}

}  // namespace
}  // namespace sparsecomm::test
