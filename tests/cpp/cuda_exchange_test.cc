// The exchange of a gradient in a device's memory gives the bits that one in the processor's gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "compress/device_gradient.h"
#include "cuda/device_memory.h"
#include "engine/gradient_exchange.h"
#include "gradients.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

DeviceQueue queue() { return {&library(), library().runtime.context(0), nullptr, allocate}; }

struct Case {
  std::string algorithm;
  int ranks = 2;
  std::size_t numel = 0;
  double density = 0.05;
  ThresholdSchedule schedule = {};
  int segments = 3;
  int steps = 4;
  SelectionRule rule = {};
  float residual = 0;   // of every entry, to begin with
  bool shares = false;  // a density, with itself
};

// By itself, of which half is left.
template <class T>
void share(GradientExchange<T>& exchange) {
  std::vector<SharingGroup> groups{{exchange.state().share, exchange.extent()}};
  if (!share_density(groups, 0.05)) return;
  groups.front().share.factor /= 2;
  exchange.set_share(groups.front().share);
}

constexpr Figures figures{{1e-4, 1e-5, 1e-8}, {1e-10, 1e-9, 1e-8, 4e-10, 1e-9, 4e-9, 2e-9, 1e-9}};

template <class E>
void append(std::vector<std::byte>& bytes, std::vector<E> const& values) {
  auto const more = std::as_bytes(std::span(values));
  bytes.insert(bytes.end(), more.begin(), more.end());
}

// A plan takes a sparse and a dense algorithm in turn.
template <class T>
void switch_algorithm(GradientExchange<T>& exchange, int step) {
  ExchangeState state = exchange.state();
  state.plan.figures = figures;
  state.plan.algorithm = &find_algorithm(step % 2 == 0 ? "oktopk" : "dense_ring");
  state.collective = {};
  exchange.load_state(state);
}

// By step and rank: the bits of gradient and residual, and the threshold. One step has a NaN on one
// rank, the result of another is withdrawn.
template <class T>
std::vector<std::vector<std::byte>> outcomes(Case const& c, bool on_device) {
  using V = accumulate_t<T>;
  std::vector<std::vector<std::byte>> outcomes(c.steps * c.ranks);
  auto const body = [&](Communicator& communicator) {
    ExchangeOptions options;
    options.algorithm = c.algorithm;
    options.density = c.density;
    options.schedule = c.schedule;
    options.collective.partition_period = 2;
    options.rule = c.rule;
    options.shares_density = c.shares;
    std::unique_ptr<LocalGradient<T>> local;
    if (on_device) {
      local = make_device_gradient<T>(c.schedule, c.rule, c.numel, queue());
    }
    auto const exchange = std::make_shared<GradientExchange<T>>("test", c.numel, options,
                                                                communicator, std::move(local));
    Array<V> residual(std::vector<V>(c.numel, c.residual), on_device);
    Array<V> moment(c.rule.has_moment() ? c.numel : 0, on_device);
    Array<T> gradient(c.numel, on_device);
    for (int step = 0; step < c.steps; ++step) {
      auto values = typed<T>(patterns[step % 2].make(communicator.rank(), c.ranks, c.numel, step));
      if (step == 2 && communicator.rank() == c.ranks - 1 && c.numel > 0) {
        values.back() = T(std::numeric_limits<V>::quiet_NaN());
      }
      gradient.set(values);
      std::vector<Segment<T>> segments;
      for (int s = 0; s < c.segments; ++s) {
        std::size_t const first = c.numel * s / c.segments;
        std::size_t const count = c.numel * (s + 1) / c.segments - first;
        segments.push_back(
            {gradient.span().subspan(first, count), residual.span().subspan(first, count)});
      }
      if (c.algorithm == auto_algorithm) switch_algorithm(*exchange, step);
      if (c.shares) share(*exchange);
      exchange->bind(segments, {}, moment.span());
      communicator.submit(exchange).wait();
      bool const finite =
          std::ranges::all_of(gradient.get(), [](T x) { return std::isfinite(static_cast<V>(x)); });
      EXPECT_EQ(finite, step != 2 || c.numel == 0) << "step " << step;
      if (step == 1) exchange->withdraw();
      std::vector<std::byte>& outcome = outcomes[step * c.ranks + communicator.rank()];
      append(outcome, gradient.get());
      append(outcome, residual.get());
      append(outcome, moment.get());
      append(outcome, std::vector<double>{exchange->state().local_threshold,
                                          static_cast<double>(exchange->stats().selected)});
      DensityShare const& shared = exchange->state().share;
      auto const counts = shared.own.value_or(ShareCounts());
      append(outcome, std::vector<double>{shared.magnitude, counts.entries, counts.threshold});
    }
  };
  CommunicatorOptions options;
  options.figures = std::make_shared<Figures const>(figures);
  expect_no_errors(run_ranks(c.ranks, body, options));
  return outcomes;
}

template <class T>
void check(Case const& c) {
  SCOPED_TRACE(concat(c.algorithm, ", P=", c.ranks, ", N=", c.numel, ", ", name(c.schedule.between),
                      '/', c.schedule.period, ", ", name(dtype_of<T>())));
  auto const expected = outcomes<T>(c, false);
  auto const actual = outcomes<T>(c, true);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(actual[i] == expected[i]) << "step " << i / c.ranks << ", rank " << i % c.ranks;
  }
}

TEST(CudaExchange, EveryAlgorithmGivesTheBitsOfTheProcessor) {
  for (AlgorithmEntry const& algorithm : algorithms()) {
    if (algorithm.needs != Needs::nothing) continue;  // which inproc has none for
    for (int const ranks : {1, 3}) check<float>({std::string(algorithm.name), ranks, 3000});
  }
}

TEST(CudaExchange, EveryTypeAndSize) {
  for (std::size_t const numel : {0, 1, 40, 9000}) {
    for (std::string const algorithm : {"oktopk", "auto"}) {
      check<float>({algorithm, 2, numel});
      check<double>({algorithm, 2, numel});
      check<Half>({algorithm, 2, numel});
      check<BFloat16>({algorithm, 2, numel});
    }
  }
}

TEST(CudaExchange, EveryThresholdSource) {
  for (auto const& source : threshold_sources()) {
    // Large enough for a sample.
    check<float>({"oktopk", 2, 140000, 0.2, {source.id, 3}});
  }
}

TEST(CudaExchange, MomentumCorrection) {
  for (bool const mask : {true, false}) {
    SelectionRule const rule{.velocity = {.momentum = 0.5}, .mask_momentum = mask};
    for (std::string const algorithm : {"oktopk", "topk_dsa", "auto"}) {
      for (double const density : {0.05, 1.0}) {
        check<float>({algorithm, 2, 3000, density, {}, 3, 6, rule});
        check<BFloat16>({algorithm, 3, 700, density, {}, 3, 6, rule});
      }
    }
    check<double>({"topk_a", 2, 9000, 0.05, {ThresholdSource::gaussian, 3}, 2, 6, rule});
  }
}

TEST(CudaExchange, NesterovAndGain) {
  for (SelectionRule const& rule :
       {SelectionRule{.velocity = {.momentum = 0.5, .gain = 0.3, .nesterov = true}},
        SelectionRule{.velocity = {.gain = 0.3}},
        SelectionRule{.bucket = 64, .velocity = {.momentum = 0.9, .gain = 3}}}) {
    for (std::string const algorithm : {"oktopk", "auto"}) {
      for (double const density : {0.05, 1.0}) {
        check<float>({algorithm, 2, 3000, density, {}, 3, 6, rule});
        check<BFloat16>({algorithm, 3, 700, density, {}, 3, 6, rule});
      }
    }
    check<double>({"topk_a", 2, 9000, 0.05, {ThresholdSource::gaussian, 3}, 2, 6, rule});
  }
}

TEST(CudaExchange, TheLargestOfEachBucket) {
  for (SelectionRule const& rule :
       {SelectionRule{.bucket = 64}, SelectionRule{.bucket = 512, .velocity = {.momentum = 0.5}}}) {
    for (std::size_t const numel : {0, 1, 40, 3000}) {
      for (double const density : {0.05, 1.0}) {
        check<float>({"topk_a", 2, numel, density, {}, 3, 6, rule});
        check<BFloat16>({"auto", 2, numel, density, {}, 3, 6, rule});
      }
    }
  }
}

TEST(CudaExchange, TheBlocksOfTheLargestNorms) {
  for (SelectionRule const& rule :
       {SelectionRule{.block = 16}, SelectionRule{.block = 256, .velocity = {.momentum = 0.5}}}) {
    for (std::size_t const numel : {0, 1, 40, 3000}) {
      for (double const density : {0.05, 1.0}) {
        check<float>({"topk_dsa", 2, numel, density, {}, 3, 6, rule});
        check<double>({"topk_a", 2, numel, density, {}, 3, 6, rule});
        check<BFloat16>({"auto", 2, numel, density, {}, 3, 6, rule});
      }
    }
  }
}

TEST(CudaExchange, WhatTheTypeCannotHoldStaysInTheResiduals) {
  for (std::string const algorithm : {"oktopk", "gtopk", "topk_dsa"}) {
    for (double const density : {0.05, 1.0}) {
      check<Half>({algorithm, 3, 700, density, {}, 3, 4, {}, 200'000});
    }
  }
}

TEST(CudaExchange, ASharedDensity) {
  SelectionRule const momentum{.velocity = {.momentum = 0.5}};
  for (SelectionRule const& rule : {SelectionRule(), momentum}) {
    for (std::size_t const numel : {1, 3000}) {
      check<float>({"oktopk", 2, numel, 0.05, {}, 3, 9, rule, 0, true});
      check<double>({"topk_a", 3, numel, 0.05, {}, 3, 9, rule, 0, true});
      check<Half>({"topk_dsa", 2, numel, 0.05, {}, 3, 9, rule, 0, true});
    }
  }
}

TEST(CudaExchange, RulesThatDevicesDoNotHaveAreRefused) {
  SelectionRule const rule{.first_moment = 0.9};
  EXPECT_THROW(make_device_gradient<float>({}, rule, 10, queue()), InvalidArgument);
}

// Two groups on one stream, queued before either gradient is there.
std::vector<std::byte> two_groups(bool on_device) {
  constexpr int ranks = 2;
  constexpr std::size_t sizes[] = {3000, 500};
  std::vector<std::vector<std::byte>> outcomes(ranks);
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    std::vector<std::shared_ptr<GradientExchange<float>>> exchanges;
    std::vector<Array<float>> gradients, residuals;
    for (std::size_t const size : sizes) {
      std::unique_ptr<LocalGradient<float>> local;
      if (on_device) {
        local = make_device_gradient<float>({}, {}, size, queue());
      }
      exchanges.push_back(std::make_shared<GradientExchange<float>>(
          "test", size, ExchangeOptions{}, communicator, std::move(local)));
      gradients.emplace_back(size, on_device);
      residuals.emplace_back(size, on_device);
    }
    for (int step = 0; step < 3; ++step) {
      std::promise<void> queued;
      auto const all = queued.get_future().share();
      std::vector<Communicator::Handle> handles;
      for (std::size_t g = 0; g < std::size(sizes); ++g) {
        exchanges[g]->bind(
            {{gradients[g].span(), residuals[g].span()}}, {.wait = [&, all, g, step] {
              all.wait();
              gradients[g].set(
                  typed<float>(patterns[0].make(communicator.rank(), ranks, sizes[g], step)));
            }});
        handles.push_back(communicator.submit(exchanges[g]));
      }
      queued.set_value();
      for (std::size_t g = 0; g < std::size(sizes); ++g) {
        handles[g].wait();
        append(outcomes[communicator.rank()], gradients[g].get());
        append(outcomes[communicator.rank()], residuals[g].get());
      }
    }
  }));
  outcomes[0].insert(outcomes[0].end(), outcomes[1].begin(), outcomes[1].end());
  return outcomes[0];
}

TEST(CudaExchange, GroupsOnOneStreamEachTakeTheirOwnGradient) {
  EXPECT_TRUE(two_groups(true) == two_groups(false));
}

#ifndef SPARSECOMM_CUDA_LIBRARY  // what only the emulator shows

struct Problem {
  static constexpr std::size_t size = 500;
  static constexpr std::uint64_t k = 50;

  Problem() : gradient(numbers(1)), residual(numbers(3)) {
    local->bind({{gradient.span().first(200), residual.span().first(200)},
                 {gradient.span().subspan(200), residual.span().subspan(200)}});
  }
  // Whole numbers, so that sums are exact.
  static std::vector<float> numbers(int factor) {
    std::vector<float> values(size);
    for (std::size_t i = 0; i < size; ++i) {
      values[i] = static_cast<float>(static_cast<int>(i * 37 % 101) - 50) * factor;
    }
    return values;
  }
  void step() {
    ASSERT_TRUE(local->all_finite());
    local->find_threshold(k, 0);
    auto const chosen = local->select(k);
    ASSERT_EQ(chosen.nnz(), k);
    local->keep({chosen.indices.first(20), chosen.values.first(20)});
    StreamView<float> result;
    result.sparse = {chosen.indices.subspan(20), chosen.values.subspan(20)};
    local->store(result, 1);
    ASSERT_TRUE(local->all_finite());  // which waits
  }

  Array<float> gradient, residual;
  std::unique_ptr<LocalGradient<float>> local = make_device_gradient<float>({}, {}, size, queue());
};

TEST(CudaFailure, NoAllocationThatFailsLosesAnEntry) {
  bool failed = true;
  for (unsigned after = 0; failed; ++after) {
    SCOPED_TRACE(testing::Message() << "after " << after << " allocations");
    Problem problem;
    auto const gradient = problem.gradient.get();
    auto const residual = problem.residual.get();
    auto sums = gradient;
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += residual[i];
    failed = false;
    emulator::fail_allocation(after);
    try {
      problem.step();
    } catch (std::exception const&) {
      failed = true;
    }
    emulator::fail_none();
    problem.local->restore();
    bool const untouched = problem.gradient.get() == gradient && problem.residual.get() == residual;
    EXPECT_TRUE(untouched || problem.residual.get() == sums);
    if (!failed) {
      EXPECT_FALSE(untouched);
      EXPECT_GT(after, 15u);
    }
    problem.gradient.set(gradient);
    problem.step();  // goes as if nothing had happened
  }
}

TEST(CudaFailure, AnErrorIsNotFoundAgainInTheNextCall) {
  Array<float> const x(100);
  One<std::uint32_t> const flag;
  emulator::fail_allocation(0);
  EXPECT_THROW(library().runtime.allocate_pinned(8), Error);
  library().f32.all_finite(x.data(), x.size(), flag.data(), nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaDevices, AGradientOnTheSecondOpensNoOther) {
  cuda::Runtime const& runtime = library().runtime;
  std::thread([&] {
    emulator::close_all();
    runtime.enter(runtime.context(1));
    std::vector<float> const ones(500, 1.0f);
    Array<float> gradient(ones), residual(500);
    runtime.leave();
    EXPECT_EQ(emulator::device(), 0);
    {
      auto const local = make_device_gradient<float>(
          {}, {}, 500, {&library(), runtime.context(1), nullptr, [&](std::size_t bytes) {
                          EXPECT_EQ(emulator::device(), 1);  // or torch's allocator would open 0
                          return allocate(bytes);
                        }});
      local->bind({{gradient.span(), residual.span()}});
      EXPECT_TRUE(local->all_finite());
      local->find_threshold(50, 0);
      EXPECT_EQ(local->select(50).nnz(), 50u);
      local->restore();
      EXPECT_EQ(emulator::device(), 0);
    }
    EXPECT_EQ(emulator::opened(), std::set<int>{1});
    runtime.enter(runtime.context(1));
    EXPECT_EQ(residual.get(), ones);
    runtime.leave();
  }).join();
}

TEST(CudaDevices, AThreadThatHasADeviceKeepsIt) {
  cuda::Runtime const& runtime = library().runtime;
  std::thread([&] {
    cudaSetDevice(1);
    runtime.enter(runtime.context(0));
    int device = -1;
    cudaGetDevice(&device);
    EXPECT_EQ(device, 0);
    runtime.leave();
    cudaGetDevice(&device);
    EXPECT_EQ(device, 1);
  }).join();
}

#endif

}  // namespace
}  // namespace sparsecomm::test
