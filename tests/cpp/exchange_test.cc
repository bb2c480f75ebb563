// Contracts 1 to 6 and 9 for every algorithm in the table.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <mutex>
#include <tuple>

#include "allocations.h"
#include "engine/gradient_exchange.h"
#include "gradients.h"
#include "services.h"
#include "simulated_ranks.h"

namespace sparsecomm::test {
namespace {

// What one rank's exchange worked on and left behind, in double: exact for every type and value
// used here.
struct Outcome {
  std::string algorithm;  // that was run
  std::vector<double> result, residual, moment;
  std::vector<std::byte> bits;
  ExchangeStats stats;
  Counters counters{0};
};

template <class T>
double widened(T x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return static_cast<double>(static_cast<float>(x));
  }
}

// Of a slow link, or of a processor that is slow at all but dense blocks; so that nothing is
// measured.
CommunicatorOptions with_figures(bool slow_processor = false) {
  CommunicatorOptions options;
  Figures figures{{1e-4, 1e-5, 1e-8}, {1e-10, 1e-9, 1e-8, 4e-10, 1e-9, 4e-9, 2e-9, 1e-9}};
  if (slow_processor) {
    figures = {{1e-7, 0, 1e-12}, {1e-10, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-10}};
  }
  options.figures = std::make_shared<Figures const>(figures);
  return options;
}

// Makes the plan choose another algorithm for each step: two sparse ones after one another, then a
// dense one, and so on.
template <class T>
void force_switch(GradientExchange<T>& exchange, int step, std::size_t first) {
  std::vector<AlgorithmEntry const*> sparse, dense;
  for (AlgorithmEntry const& entry : algorithms()) {
    bool const able =
        delivers_exact_entries(entry) || (entry.needs != Needs::nothing && sizeof(T) >= 4);
    if (able) (entry.sparse ? sparse : dense).push_back(&entry);
  }
  auto const& kind = step % 3 == 2 ? dense : sparse;
  ExchangeState state = exchange.state();
  state.plan.figures = *with_figures().figures;
  state.plan.algorithm = kind[(first + step - step / 3) % kind.size()];
  state.collective = {};
  exchange.load_state(state);
  EXPECT_EQ(exchange.algorithm(), state.plan.algorithm->name);
}

struct Case {
  std::string algorithm;
  int ranks = 1;
  std::size_t numel = 0;
  double density = 0.1;
  ThresholdSchedule schedule;
  Pattern pattern = patterns[0];
  int steps = 3;
  int segments = 1;
  double balance_factor = 4;
  ValueCodec value_codec = ValueCodec::raw;
  bool forced = false;  // "auto" switches at every step; otherwise it decides
  SelectionRule rule = {};

  std::string text() const {
    return concat(algorithm, forced ? " forced" : "", ", P=", ranks, ", N=", numel, ", density ",
                  density, ", ", name(schedule.between), '/', schedule.period, ", ", pattern.name,
                  ", segments ", segments, ", bucket ", rule.bucket, ", block ", rule.block,
                  ", momentum ", rule.velocity.momentum, rule.mask_momentum ? " masked" : "",
                  rule.velocity.nesterov ? " of Nesterov" : "", ", gain ", rule.velocity.gain,
                  ", first moment ", rule.first_moment);
  }
};

// Runs `steps` exchanges and checks conservation and bit-identity after each.
template <class T>
void check_one(Case const& c) {
  SCOPED_TRACE(c.text() + ", " + std::string(name(dtype_of<T>())));
  using V = accumulate_t<T>;
  std::vector<std::vector<Outcome>> outcomes(c.steps, std::vector<Outcome>(c.ranks));
  auto const body = [&](Communicator& communicator) {
    ExchangeOptions options;
    options.algorithm = c.algorithm;
    options.density = c.density;
    options.schedule = c.schedule;
    options.collective.partition_period = 2;
    options.collective.balance_factor = c.balance_factor;
    options.collective.frame.value_codec = c.value_codec;
    options.collective.overlap_chunk = 170;  // several, and an uneven last one
    options.average = false;                 // a sum of integers is exact, a third of it is not
    options.rule = c.rule;
    auto const exchange =
        std::make_shared<GradientExchange<T>>("test", c.numel, options, communicator);
    std::vector<V> residual(c.numel, V{0});
    std::vector<V> moment(c.rule.has_moment() ? c.numel : 0, V{0});
    for (int step = 0; step < c.steps; ++step) {
      auto gradient = typed<T>(c.pattern.make(communicator.rank(), c.ranks, c.numel, step));
      std::vector<Segment<T>> segments;
      for (int s = 0; s < c.segments; ++s) {
        std::size_t const first = c.numel * s / c.segments;
        std::size_t const count = c.numel * (s + 1) / c.segments - first;
        segments.push_back(
            {std::span(gradient).subspan(first, count), std::span(residual).subspan(first, count)});
      }
      if (c.forced) force_switch(*exchange, step, c.ranks + c.numel);
      exchange->bind(segments, {}, moment);
      communicator.submit(exchange).wait();
      Outcome& outcome = outcomes[step][communicator.rank()];
      outcome.algorithm = exchange->algorithm();
      for (T const x : gradient) outcome.result.push_back(widened(x));
      for (V const x : residual) outcome.residual.push_back(static_cast<double>(x));
      for (V const x : moment) outcome.moment.push_back(static_cast<double>(x));
      auto const bytes = std::as_bytes(std::span(gradient));
      outcome.bits.assign(bytes.begin(), bytes.end());
      outcome.stats = exchange->stats();
      outcome.counters = communicator.counters();
    }
  };
  expect_no_errors(run_ranks(c.ranks, body, with_figures((c.ranks + c.numel) % 3 == 0), {},
                             services_for(c.algorithm)));
  if (::testing::Test::HasFailure()) return;

  std::vector<double> carried(c.numel, 0.0);
  auto k = std::max<std::uint64_t>(1, std::llround(c.density * static_cast<double>(c.numel)));
  if (c.rule.bucket > 0) {
    auto const each = std::llround(c.density * static_cast<double>(c.rule.bucket));
    k = bucket_top_k_count(c.numel, c.rule.bucket, std::max(1ll, each));
  }
  if (c.rule.block > 0) {
    auto const blocks = static_cast<double>((c.numel + c.rule.block - 1) / c.rule.block);
    k = std::min<std::uint64_t>(c.numel,
                                c.rule.block * std::max(1ll, std::llround(c.density * blocks)));
  }
  for (int step = 0; step < c.steps; ++step) {
    AlgorithmEntry const& algorithm = find_algorithm(outcomes[step][0].algorithm);
    for (int rank = 0; rank < c.ranks; ++rank) {
      ASSERT_EQ(outcomes[step][rank].algorithm, algorithm.name) << "rank " << rank;
      auto const gradient = c.pattern.make(rank, c.ranks, c.numel, step);
      for (std::size_t i = 0; i < c.numel; ++i) {
        double const scaled = c.rule.velocity.gain * gradient[i];
        double added = scaled;
        if (c.rule.has_moment()) {
          double const decay = c.rule.velocity.momentum + c.rule.first_moment;
          double const before = step > 0 ? outcomes[step - 1][rank].moment[i] : 0;
          double const moment = decay * before + scaled;
          if (c.rule.velocity.momentum > 0) added = moment;
          if (c.rule.velocity.nesterov) added = scaled + c.rule.velocity.momentum * moment;
          double const after = outcomes[step][rank].moment[i];
          bool const masked =
              after == 0 && c.rule.velocity.momentum > 0 && c.rule.mask_momentum && c.density < 1;
          ASSERT_TRUE(after == moment || masked) << after << " in place of " << moment;
        }
        carried[i] += added;
      }
      ASSERT_EQ(outcomes[step][rank].bits, outcomes[step][0].bits)
          << "rank " << rank << " differs at " << step;
    }
    std::size_t nonzero = 0;
    for (std::size_t i = 0; i < c.numel; ++i) {
      double total = outcomes[step][0].result[i];
      nonzero += total != 0;
      carried[i] -= total;
      double kept = 0;
      for (int rank = 0; rank < c.ranks; ++rank) kept += outcomes[step][rank].residual[i];
      // What is not among a lossy codec's levels is rounded when it is subtracted.
      double const tolerance = find_value_codec(c.value_codec)->lossy ? 1e-4 : 0;
      ASSERT_NEAR(kept, carried[i], tolerance)
          << "mass lost or counted twice at entry " << i << " of step " << step;
    }
    if (algorithm.top_k_result && c.schedule.between != ThresholdSource::reused) {
      ASSERT_LE(nonzero, k);
    }
    if (!algorithm.sparse) {
      ASSERT_TRUE(std::ranges::all_of(carried, [](double x) { return x == 0; }));
    }
  }
}

template <class T>
void check_contracts(Case c) {
  if (c.algorithm == auto_algorithm) {
    c.steps = 7;
    c.forced = true;
    check_one<T>(c);
    c.forced = false;
  }
  check_one<T>(c);
}

std::vector<std::string> algorithm_names() {
  std::vector<std::string> names;
  for (auto const& entry : algorithms()) {
    names.emplace_back(entry.name);
  }
  return names;
}

class ExchangeTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Algorithms, ExchangeTest, ::testing::ValuesIn([] {
                           auto names = algorithm_names();
                           names.emplace_back(auto_algorithm);
                           return names;
                         }()),
                         [](auto const& info) { return info.param; });

TEST_P(ExchangeTest, ConservesAndKeepsReplicasIdenticalForAnyWorldSizeAndPattern) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (Pattern const& pattern : patterns) {
      for (std::size_t const numel : {0u, 1u, 17u, 1000u}) {
        check_contracts<float>({GetParam(), ranks, numel, 0.1, {}, pattern});
      }
    }
  }
}

TEST_P(ExchangeTest, EveryDtype) {
  for (int const ranks : {1, 2, 3, 5}) {
    for (Pattern const& pattern : patterns) {
      check_contracts<double>({GetParam(), ranks, 300, 0.1, {}, pattern});
      check_contracts<Half>({GetParam(), ranks, 300, 0.1, {}, pattern});
      check_contracts<BFloat16>({GetParam(), ranks, 300, 0.1, {}, pattern});
    }
  }
}

TEST_P(ExchangeTest, EveryThresholdSourceAndDensity) {
  for (auto const& source : threshold_sources()) {
    for (double const density : {0.001, 0.02, 0.5, 1.0}) {
      for (Pattern const& pattern : patterns) {
        check_contracts<float>({GetParam(), 4, 2000, density, {source.id, 3}, pattern, 7});
      }
    }
  }
}

TEST_P(ExchangeTest, SharesAreEvenedOutWithoutChangingTheContracts) {
  for (int const ranks : {2, 3, 4, 7}) {
    for (Pattern const& pattern : patterns) {
      Case c{GetParam(), ranks, 2000, 0.05, {}, pattern};
      c.balance_factor = 1;  // at every step where shares are not even already
      check_contracts<float>(c);
    }
  }
}

TEST_P(ExchangeTest, LossyValueCodecsLoseNothingOrAreRefused) {
  bool const rounds = GetParam() != auto_algorithm && find_algorithm(GetParam()).rounds;
  for (ValueCodecEntry const& codec : value_codecs()) {
    if (!codec.lossy) continue;
    if (!rounds) {
      ExchangeOptions options;
      options.algorithm = GetParam();
      options.collective.frame.value_codec = codec.id;
      EXPECT_THROW(validate(options), InvalidArgument) << codec.name;
      continue;
    }
    for (int const ranks : {1, 2, 3, 4, 7}) {
      for (Pattern const& pattern : patterns) {
        Case c{GetParam(), ranks, 2000, 0.1, {}, pattern, 4};
        c.balance_factor = 1.5;
        c.value_codec = codec.id;
        SCOPED_TRACE(codec.name);
        check_contracts<float>(c);
      }
    }
  }
}

TEST_P(ExchangeTest, RulesOfSelectionKeepTheContracts) {
  SelectionRule const rules[] = {
      {.bucket = 16},
      {.bucket = 512},
      {.velocity = {.momentum = 0.5}},
      {.velocity = {.momentum = 0.5}, .mask_momentum = false},
      {.velocity = {.momentum = 0.5, .nesterov = true}},
      {.velocity = {.momentum = 0.5, .gain = 2, .nesterov = true}, .mask_momentum = false},
      {.velocity = {.gain = 0.5}},
      {.bucket = 64, .velocity = {.momentum = 0.5, .gain = 0.5}},
      {.first_moment = 0.5},
      {.bucket = 64, .velocity = {.momentum = 0.5}},
      {.bucket = 64, .first_moment = 0.5},
      {.block = 16},
      {.block = 128, .velocity = {.momentum = 0.5, .gain = 0.5}},
      {.block = 16, .first_moment = 0.5},
  };
  if (GetParam() != auto_algorithm && !find_algorithm(GetParam()).sparse) {
    ExchangeOptions options;
    options.algorithm = GetParam();
    options.rule = rules[0];
    EXPECT_THROW(validate(options), InvalidArgument);
    return;
  }
  for (SelectionRule const& rule : rules) {
    for (int const ranks : {1, 2, 3, 5}) {
      for (Pattern const& pattern : patterns) {
        for (double const density : {0.1, 1.0}) {
          Case c{GetParam(), ranks, 1000, density, {ThresholdSource::reused, 3}, pattern, 4, 3};
          c.rule = rule;
          check_contracts<float>(c);
          for (std::size_t const numel : {0, 1, 17}) {
            if (numel < 17 && density == 1.0) continue;
            c.numel = numel;
            check_contracts<double>(c);
          }
        }
      }
    }
  }
}

// What a bucket holds does not depend on how the gradient is cut, nor on the number of threads.
TEST(RuleTest, TheLargestOfEachBucketAreSelected) {
  expect_no_errors(run_ranks(1, [](Communicator& communicator) {
    ExchangeOptions options;
    options.algorithm = "topk_a";
    options.density = 0.25;
    options.rule.bucket = 8;
    std::vector<float> gradient(20), residual(20);
    for (int i = 0; i < 20; ++i) gradient[i] = static_cast<float>((i * 7) % 20 + 1);
    auto const original = gradient;
    std::span const all(gradient), kept(residual);
    auto const operation =
        std::make_shared<GradientExchange<float>>("test", 20, options, communicator);
    operation->bind({{all.first(11), kept.first(11)}, {all.subspan(11), kept.subspan(11)}});
    communicator.submit(operation).wait();
    for (std::size_t first = 0; first < 20; first += 8) {
      std::size_t const last = std::min<std::size_t>(20, first + 8);
      std::vector<float> sorted(original.begin() + first, original.begin() + last);
      std::ranges::sort(sorted, std::greater{});
      for (std::size_t i = first; i < last; ++i) {
        bool const taken = original[i] >= sorted[1];
        EXPECT_EQ(gradient[i], taken ? original[i] : 0) << i;
        EXPECT_EQ(residual[i], taken ? 0 : original[i]) << i;
      }
    }
  }));
}

// Whole, but for zeros, of the gradient and what is left of former ones, however it is cut.
TEST(RuleTest, TheBlocksOfTheLargestNormsAreSelected) {
  expect_no_errors(run_ranks(1, [](Communicator& communicator) {
    ExchangeOptions options;
    options.algorithm = "topk_a";
    options.density = 0.5;  // of three blocks: two
    options.rule.block = 16;
    auto const operation =
        std::make_shared<GradientExchange<float>>("test", 40, options, communicator);
    std::vector<float> gradient(40, 1), residual(40);
    gradient[3] = 5;                      // the first has 24 + 16
    std::fill_n(&gradient[32], 8, 2.5f);  // the last, of eight, has 50
    std::span const all(gradient), kept(residual);
    auto const step = [&] {
      operation->bind({{all.first(11), kept.first(11)}, {all.subspan(11), kept.subspan(11)}});
      communicator.submit(operation).wait();
    };
    auto const sent = gradient;
    step();
    for (int i = 0; i < 40; ++i) {
      bool const taken = i / 16 != 1;
      EXPECT_EQ(gradient[i], taken ? sent[i] : 0) << i;
      EXPECT_EQ(residual[i], taken ? 0 : 1) << i;
    }
    std::ranges::fill(gradient, 0.5f);
    gradient[20] = -1;  // takes back what is left
    step();
    for (int i = 0; i < 40; ++i) {
      float const in_second = i == 20 ? 0 : 1.5f;
      EXPECT_EQ(gradient[i], i < 16 ? 0.5f : i < 32 ? in_second : 0) << i;
      EXPECT_EQ(residual[i], i < 32 ? 0 : 0.5f) << i;
    }
  }));
}

TEST(RuleTest, ABlockIsAPowerOfTwoAndNoBucketBesideIt) {
  for (std::size_t const block : {1, 8, 100, 32768}) {
    ExchangeOptions options;
    options.rule.block = block;
    EXPECT_THROW(validate(options), InvalidArgument) << block;
  }
  ExchangeOptions options;
  options.rule.block = 256;
  validate(options);
  options.rule.bucket = 512;
  EXPECT_THROW(validate(options), InvalidArgument);
}

TEST(RuleTest, AWithdrawnStepGivesBackWhatWasSelectedAndItsMomentum) {
  expect_no_errors(run_ranks(2, [](Communicator& communicator) {
    ExchangeOptions options;
    options.algorithm = "topk_a";
    options.rule.velocity.momentum = 0.5;
    auto const exchange =
        std::make_shared<GradientExchange<float>>("test", 200, options, communicator);
    std::vector<float> residual(200), moment(200);
    auto gradient = typed<float>(patterns[0].make(communicator.rank(), 2, 200, 0));
    auto const original = gradient;
    exchange->bind({{gradient, residual}}, {}, moment);
    communicator.submit(exchange).wait();
    EXPECT_NE(moment, original);
    exchange->withdraw();
    EXPECT_EQ(residual, original);
    EXPECT_EQ(moment, original);
  }));
}

// By rules that change between the steps.
TEST(RuleTest, AWithdrawnStepGivesBackWhatNesterovsRuleMade) {
  expect_no_errors(run_ranks(2, [](Communicator& communicator) {
    ExchangeOptions options;
    options.algorithm = "topk_a";
    options.rule = {.velocity = {.momentum = 0.5, .nesterov = true}};
    auto const exchange =
        std::make_shared<GradientExchange<float>>("test", 200, options, communicator);
    std::vector<float> residual(200), moment(200), expected(200), velocity(200);
    for (int step = 0; step < 3; ++step) {
      VelocityRule const rule{1.0 / (1 << (step + 1)), 1.0 + step, true};
      exchange->set_velocity(rule);
      auto gradient = typed<float>(patterns[0].make(communicator.rank(), 2, 200, step));
      for (std::size_t i = 0; i < 200; ++i) {
        float const g = static_cast<float>(rule.gain) * gradient[i];
        velocity[i] = static_cast<float>(rule.momentum) * velocity[i] + g;
        expected[i] += g + static_cast<float>(rule.momentum) * velocity[i];
      }
      exchange->bind({{gradient, residual}}, {}, moment);
      communicator.submit(exchange).wait();
      EXPECT_NE(residual, expected);
      exchange->withdraw();
      EXPECT_EQ(residual, expected);
      EXPECT_EQ(moment, velocity);
    }
  }));
}

TEST(RuleTest, VelocityRulesOutOfRangeAreRefused) {
  double const infinity = std::numeric_limits<double>::infinity();
  for (SelectionRule const& rule :
       {SelectionRule{.velocity = {.gain = 0}}, SelectionRule{.velocity = {.gain = -1}},
        SelectionRule{.velocity = {.gain = infinity}},
        SelectionRule{.velocity = {.nesterov = true}},
        SelectionRule{.velocity = {.gain = 2}, .first_moment = 0.5}}) {
    ExchangeOptions options;
    options.rule = rule;
    EXPECT_THROW(validate(options), InvalidArgument);
  }
  ExchangeOptions options;
  options.algorithm = "dense";
  options.density = 1;
  options.rule.velocity.gain = 2;
  EXPECT_THROW(validate(options), InvalidArgument);
  options.feedback = true;
  EXPECT_NO_THROW(validate(options));
}

// Three steps of everything, then two of a half, one of a tenth, and on with a hundredth.
TEST_P(ExchangeTest, DensityWarmsUp) {
  if (GetParam() != auto_algorithm && !find_algorithm(GetParam()).sparse) return;
  for (int const ranks : {1, 2, 3}) {
    expect_no_errors(run_ranks(
        ranks,
        [&](Communicator& communicator) {
          std::size_t const numel = 2000;
          ExchangeOptions options;
          options.algorithm = GetParam();
          options.average = false;
          options.schedule = {ThresholdSource::reused, 100};
          options.warmup = {.dense_steps = 3, .stage_steps = 2, .stages = {0.5, 0.005}};
          auto const exchange =
              std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
          std::vector<float> residual(numel);
          std::uint64_t before = 0;
          for (int step = 0; step < 9; ++step) {
            if (step >= 3 && GetParam() == auto_algorithm) {
              ExchangeState state = exchange->state();
              state.plan.figures = *with_figures().figures;
              state.plan.algorithm = &find_algorithm("oktopk");
              exchange->load_state(state);
            }
            if (step < 3) {
              EXPECT_EQ(exchange->algorithm(), warmup_algorithm);
            }
            auto gradient = typed<float>(patterns[0].make(communicator.rank(), ranks, numel, step));
            exchange->bind({{gradient, residual}});
            communicator.submit(exchange).wait();
            double const density = step < 3 ? 1 : step < 5 ? 0.5 : 0.01;
            auto const selected = static_cast<double>(exchange->stats().selected - before);
            before = exchange->stats().selected;
            if (step < 3) {
              std::vector<float> expected(numel);
              for (int rank = 0; rank < ranks; ++rank) {
                auto const theirs = patterns[0].make(rank, ranks, numel, step);
                for (std::size_t i = 0; i < numel; ++i)
                  expected[i] += static_cast<float>(theirs[i]);
              }
              EXPECT_EQ(gradient, expected) << step;
              EXPECT_TRUE(std::ranges::all_of(residual, [](float x) { return x == 0; }));
            }
            // A reused threshold would be that of another density.
            bool const first_at_density = step == 3 || step == 5;
            if (step < 3 || (first_at_density && exchange->algorithm() != "gaussian_k")) {
              EXPECT_EQ(selected, density * numel) << step;
            }
          }
        },
        with_figures(), {}, services_for(GetParam())));
  }
}

TEST_P(ExchangeTest, SegmentsOfOneGradientAreExchangedAsOne) {
  for (int const segments : {2, 7, 40}) {
    check_contracts<float>({GetParam(), 3, 1000, 0.05, {}, patterns[0], 4, segments});
  }
}

TEST_P(ExchangeTest, NonFiniteGradientPoisonsEveryRankAndSparesResiduals) {
  for (float const poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (int const ranks : {1, 2, 5}) {
      auto const body = [&](Communicator& communicator) {
        ExchangeOptions options;
        options.algorithm = GetParam();
        auto const exchange =
            std::make_shared<GradientExchange<float>>("test", 100, options, communicator);
        std::vector<float> residual(100, 0.0f);
        std::vector<float> gradient =
            typed<float>(patterns[0].make(communicator.rank(), ranks, 100, 0));
        exchange->bind({{gradient, residual}});
        communicator.submit(exchange).wait();
        auto const before = residual;
        gradient = typed<float>(patterns[0].make(communicator.rank(), ranks, 100, 1));
        if (communicator.rank() == ranks - 1) gradient[42] = poison;
        exchange->bind({{gradient, residual}});
        communicator.submit(exchange).wait();
        EXPECT_FALSE(std::isfinite(gradient[42])) << "on rank " << communicator.rank();
        EXPECT_EQ(std::memcmp(before.data(), residual.data(), 400), 0)
            << "on rank " << communicator.rank();
        // And the next step is an ordinary one.
        gradient = typed<float>(patterns[0].make(communicator.rank(), ranks, 100, 2));
        exchange->bind({{gradient, residual}});
        communicator.submit(exchange).wait();
        EXPECT_TRUE(std::ranges::all_of(gradient, [](float x) { return std::isfinite(x); }));
      };
      expect_no_errors(run_ranks(ranks, body, with_figures(), {}, services_for(GetParam())));
    }
  }
}

// Residuals are f32, and may hold more than the gradient's type.
TEST_P(ExchangeTest, WhatTheTypeCannotHoldStaysInTheResiduals) {
  if (GetParam() != auto_algorithm && !find_algorithm(GetParam()).sparse) return;
  constexpr std::size_t numel = 100;
  for (auto const& [ranks, density, average, momentum] : {std::tuple{1, 0.1, true, 0.0},
                                                          {2, 0.1, true, 0.0},
                                                          {2, 0.1, false, 0.0},
                                                          {3, 1.0, true, 0.0},
                                                          {4, 1.0, false, 0.0},
                                                          {4, 0.1, true, 0.5},
                                                          {5, 0.1, true, 0.0}}) {
    SCOPED_TRACE(concat(ranks, " ranks, density ", density, ", average ", average));
    std::vector<std::vector<Half>> results(ranks);
    std::vector<std::vector<float>> residuals(ranks);
    std::vector<double> before(numel), after(numel);
    std::mutex mutex;
    auto const body = [&, density, average, momentum](Communicator& communicator) {
      ExchangeOptions options;
      options.algorithm = GetParam();
      options.density = density;
      options.average = average;
      options.rule.velocity.momentum = momentum;
      auto const exchange =
          std::make_shared<GradientExchange<Half>>("test", numel, options, communicator);
      auto gradient =
          typed<Half>(patterns[0].make(communicator.rank(), communicator.size(), numel, 0));
      std::vector<float> residual(numel), moment(momentum > 0 ? numel : 0);
      residual[3] = 600'000;
      residual[50] = -300'000;
      gradient[50] = Half(-65504.0f);
      residual[99] = communicator.rank() == 0 ? 500'000.0f : 0;  // the others may select nothing
      auto sums = residual;
      for (std::size_t i = 0; i < numel; ++i) sums[i] += static_cast<float>(gradient[i]);
      auto const first = gradient;
      exchange->bind({{gradient, residual}}, {}, moment);
      communicator.submit(exchange).wait();
      results[communicator.rank()] = gradient;
      residuals[communicator.rank()] = residual;
      {
        std::lock_guard const lock(mutex);
        for (std::size_t i = 0; i < numel; ++i) {
          before[i] += sums[i];
          after[i] += residual[i];
        }
      }
      exchange->withdraw();
      EXPECT_EQ(residual, sums);

      // What is infinite itself arrives, and nothing is kept of it.
      gradient = first;
      if (communicator.rank() == 0) gradient[7] = Half(std::numeric_limits<float>::infinity());
      exchange->bind({{gradient, residual}}, {}, moment);
      communicator.submit(exchange).wait();
      EXPECT_FALSE(std::isfinite(static_cast<float>(gradient[7])));
      EXPECT_EQ(residual, sums);
    };
    expect_no_errors(run_ranks(ranks, body, with_figures(), {}, services_for(GetParam())));
    EXPECT_EQ(static_cast<float>(results[0][3]), 65504);
    EXPECT_EQ(static_cast<float>(results[0][50]), -65504);
    for (std::size_t i = 0; i < numel; ++i) {
      auto const result = static_cast<double>(static_cast<float>(results[0][i]));
      // f16 has 11 bits, and an average of three or five f32 its 24.
      double const rounding = std::abs(result) < 65504 ? std::abs(result) * 0x1p-11 * ranks : 1;
      EXPECT_NEAR(after[i] + (average ? ranks : 1) * result, before[i], rounding) << "entry " << i;
      for (int rank = 1; rank < ranks; ++rank) EXPECT_EQ(results[rank][i], results[0][i]);
    }
  }
}

TEST(ExcessTest, ASumThatBfloat16RoundsToInfinityIsLimited) {
  expect_no_errors(run_ranks(1, [](Communicator& communicator) {
    ExchangeOptions options;
    options.algorithm = "topk_a";
    auto const exchange =
        std::make_shared<GradientExchange<BFloat16>>("test", 100, options, communicator);
    std::vector<BFloat16> gradient(100);
    std::vector<float> residual(100);
    residual[3] = std::numeric_limits<float>::max();
    exchange->bind({{gradient, residual}});
    communicator.submit(exchange).wait();
    EXPECT_EQ(gradient[3].bits, 0x7f7f);
    EXPECT_EQ(residual[3], std::numeric_limits<float>::max() - static_cast<float>(gradient[3]));
  }));
}

TEST_P(ExchangeTest, AveragesExactlyWhereTheAverageIsRepresentable) {
  for (int const ranks : {1, 2, 3, 7}) {
    auto const body = [&](Communicator& communicator) {
      ExchangeOptions options;
      options.algorithm = GetParam();
      options.density = 1.0;
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", 50, options, communicator);
      std::vector<float> residual(50, 0.0f);
      std::vector<float> gradient(50);
      for (int i = 0; i < 50; ++i)
        gradient[i] = static_cast<float>(i * (communicator.rank() == 0 ? ranks : 0));
      exchange->bind({{gradient, residual}});
      communicator.submit(exchange).wait();
      for (int i = 0; i < 50; ++i) EXPECT_EQ(gradient[i], static_cast<float>(i));
    };
    expect_no_errors(run_ranks(ranks, body, with_figures(), {}, services_for(GetParam())));
  }
}

// Of the matrix above: that "auto" has chosen sparse and dense exchanges there by itself.
TEST(AutoTest, DecidesByTheFiguresAndByWhatItSees) {
  for (bool const slow_processor : {false, true}) {
    expect_no_errors(run_ranks(
        3,
        [&](Communicator& communicator) {
          ExchangeOptions options;
          options.algorithm = auto_algorithm;
          auto const exchange =
              std::make_shared<GradientExchange<float>>("test", 10000, options, communicator);
          std::vector<float> residual(10000), gradient(10000, 1.0f);
          exchange->bind({{gradient, residual}});
          communicator.submit(exchange).wait();
          EXPECT_EQ(find_algorithm(exchange->algorithm()).sparse, !slow_processor)
              << exchange->algorithm();
        },
        with_figures(slow_processor)));
  }
}

class HeldClock final : public Clock {
 public:
  TimePoint now() const override { return time; }
  std::atomic<TimePoint> time = TimePoint{};
};

// The number of an exchange's allocations in prepare().
class Counting final : public Operation {
 public:
  explicit Counting(GradientExchange<float>& exchange) : exchange_(exchange) {}
  Proposal prepare() override {
    allocations = 0;
    counting = true;
    Proposal const proposal = exchange_.prepare();
    counting = false;
    return proposal;
  }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return exchange_.merge(into, other);
  }
  void run(Channel& channel, Agreement const& agreement) override {
    counted = allocations;
    exchange_.run(channel, agreement);
  }
  Batch const* batch() const override { return exchange_.batch(); }

  std::size_t counted = 0;

 private:
  GradientExchange<float>& exchange_;
};

TEST(ProposalTest, TakesNoMemoryOnceItsBuffersAreThere) {
  expect_no_errors(run_ranks(4, [](Communicator& communicator) {
    GradientExchange<float> exchange("test", 10'000, {}, communicator);
    auto const operation = std::make_shared<Counting>(exchange);
    std::vector<float> residual(10'000);
    for (int step = 0; step < 8; ++step) {
      std::vector<float> gradient(10'000);
      auto random = generator(communicator.rank(), step);
      for (float& x : gradient) x = 1 + static_cast<float>(random() % 1000);
      exchange.bind({{gradient, residual}});
      communicator.run(operation);
      if (step >= 5) {
        EXPECT_EQ(operation->counted, 0u) << "step " << step;
      }
    }
  }));
}

TEST(DensityTest, ANumberOfEntriesIsRoundedToTheNearestHalvesUp) {
  EXPECT_EQ(entries_at(0.5, 5), 3u);
  EXPECT_EQ(entries_at(0.5, 7), 4u);
  EXPECT_EQ(entries_at(0.01, 149), 1u);
  EXPECT_EQ(entries_at(0.01, 10), 1u);
  EXPECT_EQ(entries_at(0.49999999999999994, 1), 1u);
  EXPECT_EQ(entries_at(1, 7), 7u);
  EXPECT_EQ(entries_at(1, 0), 1u);
}

TEST(ReadyTest, AGroupWaitsForItsOwnGradientWhenItsTurnComesAndNoClockCountsIt) {
  HeldClock clock;
  Communicator communicator(std::move(make_inproc_transports(1).front()), {}, &clock);
  std::vector<std::string> log;
  std::vector<std::vector<float>> gradients(2), residuals(2, std::vector<float>(100));
  std::vector<std::shared_ptr<GradientExchange<float>>> exchanges;
  std::vector<Communicator::Handle> handles;
  std::promise<void> bound;
  for (int group = 0; group < 2; ++group) {
    exchanges.push_back(
        std::make_shared<GradientExchange<float>>("test", 100, ExchangeOptions{}, communicator));
    gradients[group].resize(100);
    exchanges[group]->bind({{gradients[group], residuals[group]}}, {.wait = [&, group] {
                             if (group == 0) bound.get_future().wait();
                             log.push_back(concat("ready ", group));
                             gradients[group][7] = 3;
                             clock.time = clock.time.load() + std::chrono::minutes(1);
                           }});
    handles.push_back(communicator.submit(exchanges[group], [&, group](std::exception_ptr const&) {
      log.push_back(concat("done ", group));
    }));
  }
  bound.set_value();
  for (int group = 0; group < 2; ++group) {
    handles[group].wait();
    EXPECT_EQ(gradients[group][7], 3) << "group " << group;
    EXPECT_EQ(exchanges[group]->stats().select, Duration::zero());
  }
  EXPECT_EQ(log, (std::vector<std::string>{"ready 0", "done 0", "ready 1", "done 1"}));
}

// The second gradient comes when the first one has been exchanged, and is the first to be asked for
// on some ranks.
TEST(ReadyTest, AGradientThatIsNotThereHoldsUpNoneThatIs) {
  expect_no_errors(run_ranks(3, [](Communicator& communicator) {
    std::vector<std::vector<float>> gradients(2, std::vector<float>(100, 1.0f)),
        residuals(2, std::vector<float>(100));
    std::vector<std::shared_ptr<GradientExchange<float>>> exchanges;
    for (int group = 0; group < 2; ++group) {
      exchanges.push_back(
          std::make_shared<GradientExchange<float>>("test", 100, ExchangeOptions{}, communicator));
    }
    for (int step = 0; step < 20; ++step) {
      std::promise<void> first_ended;
      std::atomic<bool> comes = false;
      auto const comes_at_last = first_ended.get_future().share();
      exchanges[0]->bind({{gradients[0], residuals[0]}});
      exchanges[1]->bind({{gradients[1], residuals[1]}}, {.wait = [&] { comes_at_last.wait(); },
                                                          .is_here = [&] { return comes.load(); }});
      std::vector<Communicator::Handle> handles(2);
      auto const submit = [&](int group) {
        auto const end = [&, group](std::exception_ptr const&) {
          if (group == 1) return;
          first_ended.set_value();
          if (communicator.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3));
          comes = true;
        };
        handles[group] = communicator.submit(exchanges[group], end, concat("gradients ", group));
      };
      // While an operation runs, so that both are there when it has ended.
      std::promise<void> submitted;
      std::vector<float> none(4), no_residual(4);
      auto const before =
          std::make_shared<GradientExchange<float>>("before", 4, ExchangeOptions{}, communicator);
      before->bind({{none, no_residual}}, {.wait = [&] { submitted.get_future().wait(); }});
      Communicator::Handle const held = communicator.submit(before);
      bool const reverse = communicator.rank() % 2 == 0;
      submit(reverse ? 1 : 0);
      submit(reverse ? 0 : 1);
      submitted.set_value();
      held.wait();
      for (auto const& handle : handles) handle.wait();
    }
  }));
}

// Nobody rings when a device has made a gradient.
TEST(ReadyTest, AGradientThatComesWhileRanksListenIsNoticed) {
  expect_no_errors(run_ranks(2, [](Communicator& communicator) {
    bool const late = communicator.rank() == 0;
    std::atomic<bool> comes = false;
    auto const submit = [&](std::string const& name, Awaited awaited) {
      auto const exchange =
          std::make_shared<GradientExchange<float>>(name, 100, ExchangeOptions{}, communicator);
      auto const gradient = std::make_shared<std::vector<float>>(100, 1.0f);
      auto const residual = std::make_shared<std::vector<float>>(100);
      exchange->bind({{*gradient, *residual}}, std::move(awaited));
      auto const keep = [exchange, gradient, residual](std::exception_ptr const&) {};
      return communicator.submit(exchange, keep, name);
    };
    Communicator::Handle const first = submit(late ? "a" : "b", {});
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (late) {
      Communicator::Handle const second =
          submit("b", {.wait = [] {}, .is_here = [&] { return comes.load(); }});
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      comes = true;
      second.wait();
    } else {
      first.wait();
      submit("a", {}).wait();
    }
    first.wait();
  }));
}

TEST(ReadyTest, AGradientThatDoesNotComeIsAnErrorOnEveryRankAndTheOthersAreKept) {
  for_seeds([](SeededSimulation& simulation) {
    expect_no_errors(simulate_ranks(simulation, 2, [](Communicator& communicator) {
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", 100, ExchangeOptions{}, communicator);
      std::vector<float> gradient(100, 1.0f), residual(100, 0.0f);
      exchange->bind({{gradient, residual}}, {.wait = [&] {
                       if (communicator.rank() == 1) throw Error("the device has failed");
                     }});
      try {
        communicator.submit(exchange).wait();
        ADD_FAILURE() << "it was exchanged";
      } catch (Mismatch const& error) {
        EXPECT_EQ(std::string(error.what()),
                  "rank 1 failed before the exchange: the device has failed");
      }
      bool const came = communicator.rank() != 1;
      EXPECT_EQ(gradient, std::vector<float>(100, came ? 0.0f : 1.0f));
      EXPECT_EQ(residual, std::vector<float>(100, came ? 1.0f : 0.0f));
      exchange->bind({{gradient, residual}});
      communicator.submit(exchange).wait();
      EXPECT_EQ(exchange->stats().steps, 1u);
    }));
  });
}

// After a dense warm-up there is a residual, which a dense algorithm without feedback leaves alone.
TEST(WithdrawTest, AResultThatIsTakenBackIsNoGradient) {
  for_seeds([](SeededSimulation& simulation) {
    expect_no_errors(simulate_ranks(simulation, 2, [](Communicator& communicator) {
      ExchangeOptions options;
      options.algorithm = "dense_ring";
      options.warmup.dense_steps = 1;
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", 100, options, communicator);
      std::vector<float> gradient(100), residual(100, 0.0f);
      for (int step = 0; step < 2; ++step) {
        std::ranges::fill(gradient, 1.0f);
        exchange->bind({{gradient, residual}});
        communicator.submit(exchange).wait();
      }
      exchange->withdraw();
      EXPECT_EQ(residual, std::vector<float>(100, 0.0f));
    }));
  });
}

// A device that fails in the middle, and then cannot give back either, in words of torch's.
class Failing final : public LocalGradient<float> {
 public:
  void bind(std::vector<Segment<float>>, std::span<float>) override {}
  bool all_finite() override { return true; }
  void accumulate() override {}
  void find_threshold(std::uint64_t, std::uint64_t) override {}
  SparseView<float> select(std::uint64_t) override { throw std::runtime_error("out of memory"); }
  void flush() override {}
  void keep(SparseView<float>) override {}
  void mask(StreamView<float> const&) override {}
  void restore() override { throw std::runtime_error("the device is gone"); }
  void forget() override {}
  void residual_changed() override {}
  void follow(ThresholdSchedule) override {}
  void set_velocity(VelocityRule const&) override {}
  void reset(double) override {}
  double threshold() const override { return 0; }
  void store(StreamView<float> const&, float) override {}
  void fill(float) override {}
  std::span<float> gather() override { return {}; }
  void spread() override {}
};

TEST(FailureTest, WhatCannotBeGivenBackEndsNeitherTheProgramNorTheExplanation) {
  for_seeds([](SeededSimulation& simulation) {
    expect_no_errors(simulate_ranks(simulation, 1, [](Communicator& communicator) {
      auto const exchange = std::make_shared<GradientExchange<float>>(
          "test", 100, ExchangeOptions{}, communicator, std::make_unique<Failing>());
      std::vector<float> gradient(100), residual(100);
      exchange->bind({{gradient, residual}});
      try {
        communicator.submit(exchange).wait();
        ADD_FAILURE() << "it was exchanged";
      } catch (std::exception const& error) {
        EXPECT_EQ(std::string(error.what()), "out of memory");
      }
    }));
  });
}

TEST(InnerTest, WhereTheTransportHasNoneItIsRefusedAndALoadedPlanBeginsAnew) {
  expect_no_errors(run_ranks(2, [](Communicator& communicator) {
    ExchangeOptions options;
    options.algorithm = "dense_inner";
    try {
      GradientExchange<float> const exchange("test", 100, options, communicator);
      ADD_FAILURE() << "it was accepted";
    } catch (InvalidArgument const& error) {
      EXPECT_NE(std::string_view(error.what()).find(R"(use transport "c10d")"), std::string::npos)
          << error.what();
    }
    options.algorithm = auto_algorithm;
    GradientExchange<float> planned("test", 100, options, communicator);
    ExchangeState state;
    state.plan.figures = *with_figures().figures;
    state.plan.algorithm = &find_algorithm("dense_inner");
    planned.load_state(state);
    EXPECT_EQ(planned.algorithm(), auto_algorithm);
    state.plan.algorithm = &find_algorithm("dense");
    planned.load_state(state);
    EXPECT_EQ(planned.algorithm(), "dense");
  }));
}

// Counts what it passes on.
class CountingTransport final : public WrappedTransport, public NativeAllreduce {
 public:
  CountingTransport(std::unique_ptr<Transport> inner, std::atomic<int>& calls)
      : WrappedTransport(std::move(inner)), calls_(calls) {}

  NativeAllreduce* native() override { return this; }
  void allreduce(std::span<std::byte> bytes, DType dtype, Reduction reduction,
                 Deadline const& deadline) override {
    ++calls_;
    WrappedTransport::native()->allreduce(bytes, dtype, reduction, deadline);
  }

 private:
  std::atomic<int>& calls_;
};

TEST(InnerTest, AfterReconnectingTheNewTransportsAllreduceIsUsed) {
  ExchangeOptions options;
  options.algorithm = "dense_inner";
  std::array<std::atomic<int>, 2> calls{};
  std::array<std::vector<std::unique_ptr<Transport>>, 2> reducing;
  for (std::size_t i = 0; i < 2; ++i) {
    for (auto& transport : make_inproc_transports(2)) {
      reducing[i].push_back(std::make_unique<CountingTransport>(
          services_for(options.algorithm).wrap(std::move(transport)), calls[i]));
    }
  }
  expect_no_errors(on_threads(2, [&](int rank) {
    auto former = std::make_unique<Communicator>(std::move(reducing[0][rank]), patient_options());
    auto const exchange = std::make_shared<GradientExchange<float>>("test", 100, options, *former);
    Communicator next(std::move(reducing[1][rank]), patient_options());
    for (Communicator* const communicator : {former.get(), &next}) {
      if (communicator == &next) {
        exchange->reconnect(next);
        former.reset();
      }
      std::vector<float> gradient(100, static_cast<float>(rank));
      std::vector<float> residual(100);
      exchange->bind({{gradient, residual}});
      communicator->run(exchange);
      EXPECT_EQ(gradient, std::vector<float>(100, 0.5f));
    }
  }));
  EXPECT_EQ(calls[0], 2);
  EXPECT_EQ(calls[1], 2);
}

class CostTest : public ::testing::TestWithParam<std::string> {};

// Without what an engine's own allreduce sends, which is not counted.
INSTANTIATE_TEST_SUITE_P(Algorithms, CostTest, ::testing::ValuesIn([] {
                           auto names = algorithm_names();
                           std::erase_if(names, [](std::string const& name) {
                             return find_algorithm(name).needs != Needs::nothing;
                           });
                           return names;
                         }()),
                         [](auto const& info) { return info.param; });

TEST_P(CostTest, CountedMessagesAndBytesStayUnderTheFormula) {
  AlgorithmEntry const& entry = find_algorithm(GetParam());
  for (int ranks = 1; ranks <= 9; ++ranks) {
    std::size_t const numel = 40000;
    double const density = 0.02;
    std::vector<Counters> counters(ranks, Counters(0));
    std::vector<std::uint64_t> selected(ranks);
    auto const errors = run_ranks(ranks, [&](Communicator& communicator) {
      ExchangeOptions options;
      options.algorithm = GetParam();
      options.density = density;
      options.schedule = {ThresholdSource::exact, 1};
      options.collective.frame = {IndexCodecChoice::raw32, false};
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
      std::vector<float> residual(numel, 0.0f);
      auto gradient = std::vector<float>(numel);
      auto random = generator(communicator.rank(), 0);
      std::normal_distribution<float> normal;
      for (float& x : gradient) x = normal(random);
      Counters before(ranks);
      for (int step = 0; step < 2; ++step) {  // of which the second is known
        before = communicator.counters();
        auto bound = gradient;
        exchange->bind({{bound, residual}});
        communicator.submit(exchange).wait();
      }
      counters[communicator.rank()] = difference(communicator.counters(), before);
      selected[communicator.rank()] = exchange->last_step().selected;
    });
    expect_no_errors(errors);
    auto const k = static_cast<std::uint64_t>(density * static_cast<double>(numel));
    Cost cost = entry.cost(
        {ranks, numel, entry.sparse ? std::max(k, std::ranges::max(selected)) : k, sizeof(float)},
        {});
    cost = cost + agreement_cost(ranks, 0) + commit_cost(ranks);
    std::uint64_t sent = 0, received = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      SCOPED_TRACE(concat(GetParam(), ", rank ", rank, " of ", ranks));
      if (!entry.selection) {
        EXPECT_EQ(selected[rank], entry.sparse ? k : numel);
      }
      EXPECT_LE(Counters::total(counters[rank].sent_messages), cost.messages);
      EXPECT_LE(Counters::total(counters[rank].received_bytes), cost.bytes);
      sent += Counters::total(counters[rank].sent_bytes);
      received += Counters::total(counters[rank].received_bytes);
    }
    EXPECT_EQ(sent, received);
  }
}

}  // namespace
}  // namespace sparsecomm::test
