// The exchange of a gradient in a device's memory gives the bits that one in the processor's gives.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "compress/device_gradient.h"
#include "cuda/device_memory.h"
#include "engine/gradient_exchange.h"
#include "gradients.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

// Elements in the processor's memory or on the device.
template <class E>
class Elements {
 public:
  Elements(std::size_t size, bool on_device)
      : size_(size),
        memory_(on_device ? allocate(size * sizeof(E) + 1)
                          : std::shared_ptr<void>(std::malloc(size * sizeof(E) + 1), std::free)) {
    set(std::vector<E>(size));
  }
  void set(std::vector<E> const& values) { copy(memory_.get(), values.data()); }
  std::vector<E> get() const {
    std::vector<E> values(size_);
    copy(values.data(), memory_.get());
    return values;
  }
  std::span<E> span() { return {static_cast<E*>(memory_.get()), size_}; }

 private:
  void copy(void* to, void const* from) const {
    library().runtime.copy(to, from, size_ * sizeof(E), nullptr);
    library().runtime.synchronize(nullptr);
  }

  std::size_t size_;
  std::shared_ptr<void> memory_;
};

struct Case {
  std::string algorithm;
  int ranks = 2;
  std::size_t numel = 0;
  double density = 0.05;
  ThresholdSchedule schedule = {};
  int segments = 3;
  int steps = 4;
};

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
    std::unique_ptr<LocalGradient<T>> local;
    if (on_device) {
      local = make_device_gradient<T>(c.schedule, c.numel, {&library(), 0, nullptr, allocate});
    }
    auto const exchange = std::make_shared<GradientExchange<T>>("test", c.numel, options,
                                                                communicator, std::move(local));
    Elements<V> residual(c.numel, on_device);
    Elements<T> gradient(c.numel, on_device);
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
      exchange->bind(segments);
      communicator.submit(exchange).wait();
      if (step == 1) exchange->withdraw();
      std::vector<std::byte>& outcome = outcomes[step * c.ranks + communicator.rank()];
      append(outcome, gradient.get());
      append(outcome, residual.get());
      append(outcome, std::vector<double>{exchange->state().local_threshold,
                                          static_cast<double>(exchange->stats().selected)});
    }
  };
  CommunicatorOptions options;
  options.figures = figures;
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
    if (algorithm.inner) continue;  // which inproc has none for
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

}  // namespace
}  // namespace sparsecomm::test
