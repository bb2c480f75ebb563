// That groups that share a density select together what one group would.
#include "engine/density_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "engine/gradient_exchange.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

// Groups with such factors of the density, extents and agreed counts.
struct Row {
  double factor;
  std::uint64_t extent;
  float entries, threshold;
};

std::vector<SharingGroup> groups_of(std::vector<Row> const& rows, double magnitude = 1) {
  std::vector<SharingGroup> groups;
  for (Row const& row : rows) {
    groups.push_back(
        {{row.factor, magnitude, {}, ShareCounts{row.entries, row.threshold}}, row.extent});
  }
  return groups;
}

// Shares have six bits.
void expect_entries(SharingGroup const& group, double density, double entries) {
  double const share = group.share.factor * density * static_cast<double>(group.extent);
  EXPECT_NEAR(share, entries, 0.016 * entries);
}

TEST(DensityShareTest, EntriesAreSharedByCountsAndFormerShares) {
  auto groups = groups_of({{1, 1000, 30, 2}, {1, 3000, 10, 0.5}});
  ASSERT_TRUE(share_density(groups, 0.01));
  // 40 of 4,000, by the means of these counts and of 10 and 30 before.
  expect_entries(groups[0], 0.01, 20);
  expect_entries(groups[1], 0.01, 20);
  // Half of the way to the mean, by how many each had wanted.
  double const mean = std::exp((1000 * std::log(2) + 3000 * std::log(0.5)) / 4000);
  for (SharingGroup const& group : groups) {
    EXPECT_FALSE(group.share.agreed);
    EXPECT_NEAR(group.share.magnitude, std::sqrt(mean), 1e-6);
  }
  // What is selected as it is shared stays.
  for (SharingGroup& group : groups) group.share.agreed = ShareCounts{20, 0.5};
  ASSERT_TRUE(share_density(groups, 0.01));
  expect_entries(groups[0], 0.01, 20);
  expect_entries(groups[1], 0.01, 20);
}

TEST(DensityShareTest, TheFirstMagnitudeIsTheLargestThreshold) {
  auto groups = groups_of({{1, 1000, 100, 4}, {1, 1000, 1, 1}}, 0);
  ASSERT_TRUE(share_density(groups, 0.1));
  for (SharingGroup const& group : groups) {
    EXPECT_EQ(group.share.factor, 1);
    EXPECT_EQ(group.share.magnitude, 4);
  }
}

TEST(DensityShareTest, NothingIsSharedUntilAllIsKnown) {
  auto groups = groups_of({{1, 1000, 30, 2}, {1, 3000, 10, 0.5}});
  groups[1].share.own = std::exchange(groups[1].share.agreed, {});
  EXPECT_FALSE(share_density(groups, 0.01));
  EXPECT_TRUE(groups[0].share.agreed);
  EXPECT_FALSE(share_density({}, 0.01));
}

TEST(DensityShareTest, AGroupThatIsExchangedDenseTakesNoPart) {
  auto groups = groups_of({{1, 1000, 30, 2}, {3, 500, 1, 1}, {1, 3000, 10, 0.5}});
  groups[1].share.agreed.reset();
  ASSERT_TRUE(share_density(groups, 0.01));
  expect_entries(groups[0], 0.01, 20);
  expect_entries(groups[2], 0.01, 20);
  EXPECT_EQ(groups[1].share.factor, 3);
  EXPECT_EQ(groups[1].share.magnitude, groups[0].share.magnitude);
  // The others stay in motion, also if there is one.
  groups[0].share.agreed = ShareCounts{40, 1};
  double const former = groups[0].share.magnitude;
  ASSERT_TRUE(share_density(groups, 0.01));
  expect_entries(groups[0], 0.01, 10);
  EXPECT_GT(groups[0].share.magnitude, former);
  auto alone = groups_of({{1, 1000, 30, 2}, {1, 500, 1, 1}}, 0);
  alone[1].share.agreed.reset();
  EXPECT_FALSE(share_density(alone, 0.01));
}

TEST(DensityShareTest, AGroupSelectsNoMoreThanItHasAndLeavesTheRestToOthers) {
  auto groups = groups_of({{1, 10, 1'000'000, 1}, {1, 1000, 1, 1}, {1, 0, 1, 0}});
  ASSERT_TRUE(share_density(groups, 0.25));
  expect_entries(groups[0], 0.25, 10);
  expect_entries(groups[1], 0.25, 0.25 * 1010 - 10);
}

TEST(DensityShareTest, WhatCannotBeIsRejected) {
  double const nan = std::nan("");
  float const infinity = std::numeric_limits<float>::infinity();
  ShareCounts counts;
  EXPECT_THROW(counts.merge({infinity, 0}, 10), MalformedFrame);
  EXPECT_THROW(counts.merge({12, 0}, 10), MalformedFrame);
  EXPECT_THROW(counts.merge({-1, 0}, 10), MalformedFrame);
  EXPECT_THROW(counts.merge({1, std::nanf("")}, 10), MalformedFrame);
  EXPECT_NO_THROW(counts.merge({11, 3}, 10));
  EXPECT_THROW(validate(DensityShare{.factor = nan}, 10), InvalidArgument);
  EXPECT_THROW(validate(DensityShare{.factor = 0}, 10), InvalidArgument);
  EXPECT_THROW(validate(DensityShare{.magnitude = -1}, 10), InvalidArgument);
  EXPECT_THROW(validate(DensityShare{.own = ShareCounts{1, infinity}}, 10), InvalidArgument);
  EXPECT_THROW(validate(DensityShare{.agreed = ShareCounts{-1, 1}}, 10), InvalidArgument);
  EXPECT_THROW(validate(DensityShare{.own = ShareCounts{12, 1}}, 10), InvalidArgument);
  EXPECT_NO_THROW(validate(DensityShare{.own = ShareCounts{11, 1}}, 10));
  EXPECT_NO_THROW(validate(DensityShare(), 0));
}

// Three groups of different sizes and scales, whose exchanges share a density.
struct Sharing {
  static constexpr std::array<std::size_t, 3> sizes{20000, 50000, 7000};
  static constexpr std::array<double, 3> scales{1, 0.2, 3};
  static constexpr double density = 0.02;

  Sharing(Communicator& communicator, ExchangeOptions options, double loss_scale = 1)
      : communicator(communicator), loss_scale(loss_scale) {
    options.density = density;
    options.shares_density = true;
    for (std::size_t g = 0; g < sizes.size(); ++g) {
      exchanges.push_back(std::make_shared<GradientExchange<float>>(concat("group ", g), sizes[g],
                                                                    options, communicator));
      residuals.emplace_back(sizes[g]);
      moments.emplace_back(options.rule.has_moment() ? sizes[g] : 0);
    }
  }

  // As a caller does before each step.
  void share() {
    std::vector<SharingGroup> groups;
    for (auto const& exchange : exchanges) {
      groups.push_back({exchange->state().share, exchange->extent()});
    }
    if (!share_density(groups, density)) return;
    for (std::size_t g = 0; g < groups.size(); ++g) exchanges[g]->set_share(groups[g].share);
  }

  void run(int step) {
    share();
    for (std::size_t g = 0; g < exchanges.size(); ++g) {
      std::mt19937_64 random(static_cast<std::uint64_t>(100 * step + 10 * communicator.rank()) + g);
      std::normal_distribution<double> normal(0, scales[g] * loss_scale);
      std::vector<float> gradient(sizes[g]);
      for (float& x : gradient) x = static_cast<float>(normal(random));
      exchanges[g]->bind({{gradient, residuals[g]}}, {}, moments[g], batch_of_one, loss_scale);
      communicator.submit(exchanges[g]).wait();
    }
  }

  std::vector<double> thresholds() const {
    std::vector<double> found;
    for (auto const& exchange : exchanges) {
      found.push_back(exchange->last_step().threshold.value_or(0) / loss_scale);
    }
    return found;
  }

  Communicator& communicator;
  double loss_scale;
  std::vector<std::shared_ptr<GradientExchange<float>>> exchanges;
  std::vector<std::vector<float>> residuals, moments;
};

void check_shares(ExchangeOptions const& options, double loss_scale = 1) {
  std::vector<std::vector<double>> factors(3);
  expect_no_errors(run_ranks(3, [&](Communicator& communicator) {
    Sharing sharing(communicator, options, loss_scale);
    std::uint64_t selected = 0;
    for (int step = 0; step < 40; ++step) {
      sharing.run(step);
      if (step < 32) continue;
      for (auto const& exchange : sharing.exchanges) selected += exchange->last_step().selected;
    }
    // About as many as one group would select, above the same threshold.
    double const wanted = 8 * Sharing::density * (20000 + 50000 + 7000);
    EXPECT_NEAR(static_cast<double>(selected), wanted, 0.15 * wanted);
    auto const thresholds = sharing.thresholds();
    EXPECT_EQ(std::set<double>(thresholds.begin(), thresholds.end()).size(), 1u);
    for (auto const& exchange : sharing.exchanges) {
      factors[communicator.rank()].push_back(exchange->state().share.factor);
    }
  }));
  EXPECT_EQ(factors[0], factors[1]);
  EXPECT_EQ(factors[0], factors[2]);
  ASSERT_EQ(factors[0].size(), 3u);
  EXPECT_GT(factors[0][2], 2);
  EXPECT_LT(factors[0][1], 0.5);
}

TEST(DensityShareTest, GroupsComeToTheSameThreshold) {
  ExchangeOptions options;
  for (std::string const algorithm : {"oktopk", "topk_a", "topk_dsa"}) {
    SCOPED_TRACE(algorithm);
    options.algorithm = algorithm;
    options.schedule = {};
    check_shares(options);
    options.schedule = {ThresholdSource::exact, 1};
    check_shares(options);
    options.schedule = {ThresholdSource::reused, 4};
    check_shares(options);
  }
  options.schedule = {};
  options.rule.velocity.momentum = 0.5;
  check_shares(options);
  options.rule.velocity.momentum = 0;
  check_shares(options, 1024);
}

TEST(DensityShareTest, AStepThatIsNotFiniteCountsNothing) {
  expect_no_errors(run_ranks(2, [](Communicator& communicator) {
    Sharing sharing(communicator, {});
    auto const& exchange = sharing.exchanges.front();
    for (int const broken : {0, 2, 4}) {
      std::vector<float> gradient(Sharing::sizes[0]);
      if (communicator.rank() == 1) gradient[5] = std::nanf("");
      exchange->bind({{gradient, sharing.residuals[0]}});
      communicator.submit(exchange).wait();
      EXPECT_FALSE(exchange->delivered()) << broken;
      EXPECT_FALSE(exchange->state().share.own) << broken;
      sharing.run(broken);
      sharing.run(broken + 1);
    }
  }));
}

TEST(DensityShareTest, ASavedStateGoesOnAlike) {
  for (int const saved_at : {1, 2, 3, 4, 7}) {
    SCOPED_TRACE(saved_at);
    expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
      Sharing first(communicator, {}), second(communicator, {});
      for (int step = 0; step < saved_at; ++step) first.run(step);
      for (std::size_t g = 0; g < first.exchanges.size(); ++g) {
        second.exchanges[g]->load_state(first.exchanges[g]->state());
      }
      second.residuals = first.residuals;
      for (int step = saved_at; step < 12; ++step) {
        first.run(step);
        second.run(step);
        ASSERT_EQ(first.thresholds(), second.thresholds()) << step;
        ASSERT_EQ(first.residuals, second.residuals) << step;
      }
    }));
  }
}

TEST(DensityShareTest, AStepThatIsWithdrawnIsCountedAgain) {
  expect_no_errors(run_ranks(2, [](Communicator& communicator) {
    Sharing sharing(communicator, {}), other(communicator, {});
    for (int step = 0; step < 9; ++step) {
      sharing.run(step);
      // In another part of the step.
      for (auto const& exchange : sharing.exchanges) exchange->withdraw_step();
      sharing.residuals = other.residuals;
      sharing.run(step);
      other.run(step);
      for (std::size_t g = 0; g < sharing.exchanges.size(); ++g) {
        DensityShare const& share = sharing.exchanges[g]->state().share;
        DensityShare const& expected = other.exchanges[g]->state().share;
        EXPECT_EQ(share.factor, expected.factor);
        EXPECT_EQ(share.magnitude, expected.magnitude);
        ASSERT_TRUE(share.own && expected.own);
        EXPECT_EQ(share.own->entries, expected.own->entries);
      }
      ASSERT_EQ(sharing.thresholds(), other.thresholds()) << step;
    }
  }));
}

}  // namespace
}  // namespace sparsecomm::test
