// Contracts 1 and 7 where there is no memory: the step fails on every rank, nothing is lost, nobody
// waits for long.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <latch>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocations.h"
#include "failing_steps.h"
#include "wrapped_link.h"

namespace sparsecomm::test {
namespace {

constexpr std::size_t numel = 600;
constexpr int ranks = 3;
constexpr int victim = 1;

// The same operation, while the thread that runs it is refused some of what it allocates.
class Starved final : public Operation {
 public:
  Starved(std::shared_ptr<Operation> inner, std::size_t first, std::size_t last)
      : inner_(std::move(inner)), first_(first), last_(last) {}

  Proposal prepare() override {
    allocations = 0;
    first_refused = first_;
    last_refused = last_;
    counting = true;
    return inner_->prepare();
  }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return inner_->merge(into, other);
  }
  void run(Channel& channel, Agreement const& agreement) override {
    inner_->run(channel, agreement);
  }
  Batch const* batch() const override { return inner_->batch(); }
  void roll_back() noexcept override { inner_->roll_back(); }

 private:
  std::shared_ptr<Operation> inner_;
  std::size_t first_, last_;
};

// Links in the process run aggregators on the thread that sends to them, which are not starved.
class FedLink final : public WrappedLink {
 public:
  using WrappedLink::WrappedLink;

  void send(int aggregator, std::uint32_t instance, InaMessage const& message) override {
    Uncounted const fed;
    WrappedLink::send(aggregator, instance, message);
  }
  Event next(Deadline const& deadline) override {
    Uncounted const fed;
    return WrappedLink::next(deadline);
  }
  void close(int aggregator, std::string const& why) override {
    Uncounted const fed;
    WrappedLink::close(aggregator, why);
  }
};

Surroundings fed(Surroundings around) {
  if (!around.equip) return around;
  around.equip = [equip = around.equip](CommunicatorOptions& options, std::uint64_t run, int rank,
                                        int size) {
    equip(options, run, rank, size);
    options.aggregators = std::make_shared<FedLink>(options.aggregators);
  };
  return around;
}

struct Outcome {
  std::string error;
  bool conserved = true;
  bool usable = false;  // once the step had failed on all ranks alike
};

// Steps of which the last one is starved on the victim from its `first` allocation on, of which
// `count` fail. Returns whether there were so many.
bool starve(std::string const& algorithm, int steps, std::size_t first, std::size_t count) {
  SCOPED_TRACE(
      concat(algorithm, ", step ", steps - 1, ", allocations ", first, " to ", first + count - 1));
  std::vector<Outcome> outcomes(ranks);
  std::size_t allocated = 0;
  // No rank closes its communicator while another may still wait for it.
  std::latch done(ranks);
  auto const start = std::chrono::steady_clock::now();
  auto const body = [&](Communicator& communicator) {
    int const rank = communicator.rank();
    auto const exchange = std::make_shared<GradientExchange<float>>(
        "test", numel, failure_options(algorithm), communicator);
    std::vector<float> gradient(numel), residual(numel, 0.0f);
    std::vector<Segment<float>> segments;
    for (std::size_t const first : {std::size_t{0}, numel / 3}) {
      std::size_t const size = first == 0 ? numel / 3 : numel - first;
      segments.push_back(
          {std::span(gradient).subspan(first, size), std::span(residual).subspan(first, size)});
    }
    auto const bind = [&](int step) {
      auto const input = patterns[0].make(rank, ranks, numel, step);
      std::ranges::copy(input, gradient.begin());
      exchange->bind(segments);
    };
    for (int step = 0; step + 1 < steps; ++step) {
      bind(step);
      communicator.submit(exchange).wait();
    }
    bind(steps - 1);
    std::vector<float> expected(numel);
    for (std::size_t i = 0; i < numel; ++i) expected[i] = gradient[i] + residual[i];
    std::shared_ptr<Operation> operation = exchange;
    if (rank == victim) operation = std::make_shared<Starved>(exchange, first, first + count);
    auto const handle = communicator.submit(operation, [&](std::exception_ptr const&) {
      counting = false;
      if (rank == victim) allocated = allocations;
    });
    Outcome& outcome = outcomes[rank];
    try {
      handle.wait();
    } catch (std::exception const& error) {
      outcome.error = error.what();
      outcome.usable = dynamic_cast<Mismatch const*>(&error) != nullptr;
    }
    done.arrive_and_wait();
    if (outcome.error.empty()) return;
    for (std::size_t i = 0; i < numel; ++i) {
      outcome.conserved = outcome.conserved && gradient[i] + residual[i] == expected[i];
    }
    if (!outcome.usable) return;
    exchange->bind(segments);
    communicator.submit(exchange).wait();
  };
  CommunicatorOptions options = patient_options();
  options.failure_grace = patiently(std::chrono::seconds(1));
  expect_no_errors(run_ranks(ranks, body, options, {}, fed(services_for(algorithm))));
  EXPECT_LT(std::chrono::steady_clock::now() - start, long_time() / 2);
  bool const refused = allocated > first;
  for (int rank = 0; rank < ranks; ++rank) {
    SCOPED_TRACE(concat("rank ", rank, " says '", outcomes[rank].error, "'"));
    EXPECT_TRUE(outcomes[rank].conserved);
    EXPECT_TRUE(refused || outcomes[rank].error.empty());
    EXPECT_EQ(outcomes[rank].usable, outcomes[victim].usable);
    // On all or on none; but a victim without memory for its report is lost to the others.
    if (rank != victim || count == 1) {
      EXPECT_EQ(outcomes[rank].error.empty(), outcomes[victim == 0 ? 1 : 0].error.empty());
    }
  }
  return refused && !testing::Test::HasFailure();
}

class MemoryTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Algorithms, MemoryTest, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (auto const& entry : algorithms()) names.emplace_back(entry.name);
                           return names;
                         }()),
                         [](auto const& info) { return info.param; });

TEST_P(MemoryTest, AnyAllocationOfAStepMayFail) {
  for (int const steps : {1, 2}) {
    for (std::size_t first = 0; starve(GetParam(), steps, first, 1);) ++first;
  }
}

// Survivors wait for the report that the victim has no memory for, so many cases wait at once.
TEST_P(MemoryTest, TheMemoryMayRunOutForGood) {
  constexpr std::size_t at_once = 8;
  bool more = true;
  for (std::size_t first = 0; more; first += at_once) {
    std::vector<std::future<bool>> cases;
    for (std::size_t i = 0; i < at_once; ++i) {
      cases.push_back(std::async(std::launch::async, starve, GetParam(), 1, first + i, 1u << 20));
    }
    for (auto& refused : cases) more = refused.get() && more;
  }
}

TEST(MemoryTest, AnOperationThatCannotBeQueuedIsAnErrorOfTheCaller) {
  expect_no_errors(run_ranks(1, [&](Communicator& communicator) {
    auto const exchange = std::make_shared<GradientExchange<float>>(
        "test", numel, failure_options("topk_a"), communicator);
    std::vector<float> gradient(numel, 1.0f), residual(numel, 0.0f);
    exchange->bind({{gradient, residual}});
    std::size_t refused = 0;
    for (bool queued = false; !queued; ++refused) {
      allocations = 0;
      first_refused = refused;
      last_refused = refused + 1;
      try {
        counting = true;
        auto const handle = communicator.submit(exchange);
        counting = false;
        queued = true;
        handle.wait();
      } catch (std::bad_alloc const&) {
        counting = false;
      }
    }
    EXPECT_GE(refused, 2u);
  }));
}

}  // namespace
}  // namespace sparsecomm::test
