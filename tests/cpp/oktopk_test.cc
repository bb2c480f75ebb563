// What oktopk promises beyond the contracts of every algorithm: its result, and how little it
// receives wherever ranks select.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "collectives/pairs.h"
#include "engine/gradient_exchange.h"
#include "gradients.h"
#include "named_sums.h"
#include "ranks.h"
#include "sparse/intersection.h"
#include "transport/wrapped.h"

namespace sparsecomm::test {
namespace {

// One call of an algorithm on a selection that the test made.
class OneCall final : public Operation {
 public:
  static constexpr char const* text = "operation=one call";

  OneCall(SparseAllreduce<float>& algorithm, SparseProblem problem, SparseView<float> selection)
      : algorithm_(algorithm), problem_(problem), selection_(selection) {}
  Proposal prepare() override { return {.text = text}; }
  void run(Channel& channel, Agreement const&) override {
    result = algorithm_.run(channel, selection_, problem_);
  }
  AllreduceResult<float> result;

 private:
  SparseAllreduce<float>& algorithm_;
  SparseProblem problem_;
  SparseView<float> selection_;
};

constexpr std::uint64_t extent = 40000;
constexpr std::uint64_t wanted = 1000;  // k

using Positions = std::set<std::uint32_t>;

// `count` random positions in [first, last) beside what is there.
void scatter(Positions& positions, std::uint64_t first, std::uint64_t last, std::size_t count,
             std::mt19937_64& random) {
  std::size_t const size = positions.size() + std::min<std::size_t>(count, last - first);
  while (positions.size() < size) {
    positions.insert(static_cast<std::uint32_t>(first + random() % (last - first)));
  }
}

struct Support {
  std::string_view name;
  // Where `rank` of `size` selects at `step`: at most `wanted` positions.
  void (*select)(int rank, int size, std::uint64_t step, Positions& positions);
};

constexpr Support supports[] = {
    {"the same everywhere",
     [](int, int, std::uint64_t step, Positions& at) {
       auto random = generator(0, step);
       scatter(at, 0, extent, wanted, random);
     }},
    {"everywhere",
     [](int rank, int, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       scatter(at, 0, extent, wanted, random);
     }},
    {"each in a region of its own",
     [](int rank, int size, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       scatter(at, extent * rank / size, extent * (rank + 1) / size, wanted, random);
     }},
    {"each in the next rank's region",
     [](int rank, int size, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       int const region = (rank + 1) % size;
       scatter(at, extent * region / size, extent * (region + 1) / size, wanted, random);
     }},
    {"regions in reverse that turn with every step",
     [](int rank, int size, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       int const region = static_cast<int>((size - 1 - rank + step) % size);
       scatter(at, extent * region / size, extent * (region + 1) / size, wanted, random);
     }},
    {"one narrow cluster",
     [](int rank, int, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       scatter(at, 17000, 17000 + 2 * wanted, wanted, random);
     }},
    {"one cluster that jumps",
     [](int rank, int, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       auto const first = generator(0, step)() % (extent - 2 * wanted);
       scatter(at, first, first + 2 * wanted, wanted, random);
     }},
    {"the same block, which jumps",
     [](int, int, std::uint64_t step, Positions& at) {
       auto random = generator(0, step);
       auto const first = random() % (extent - wanted);
       scatter(at, first, first + wanted, wanted, random);
     }},
    {"a cluster per rank, which jumps",
     [](int rank, int, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       auto const first = random() % (extent - 2 * wanted);
       scatter(at, first, first + 2 * wanted, wanted, random);
     }},
    {"everywhere, then all at the end",
     [](int rank, int, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       scatter(at, step == 0 ? 0 : extent - wanted, extent, wanted, random);
     }},
    {"all but one where they were",
     [](int rank, int, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       scatter(at, rank == 0 && step > 0 ? extent - 2 * wanted : 0, extent, wanted, random);
     }},
    {"half in a block, half everywhere",
     [](int rank, int size, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       auto const first = (step * 3001 + rank * extent / size) % (extent - wanted);
       scatter(at, first, first + wanted / 2, wanted / 2, random);
       scatter(at, 0, extent, wanted / 2, random);
     }},
    {"denser towards the start",
     [](int rank, int, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       std::uint64_t last = extent;
       for (std::size_t left = wanted; left > 20; left -= left / 4, last /= 2) {
         scatter(at, 0, std::max(last, 2 * wanted), left / 4, random);
       }
     }},
    {"one rank only, another each time",
     [](int rank, int size, std::uint64_t step, Positions& at) {
       auto random = generator(rank, step);
       if (static_cast<std::uint64_t>(rank) == step % size) scatter(at, 0, extent, wanted, random);
     }},
};

// Small integers, so that sums are exact; of one sign at an index, so that none is zero. At odd
// steps the large ones lie at the start.
float value_at(std::uint32_t index, int rank, std::uint64_t step) {
  auto const mixed = (index + 1) * 0x9e3779b97f4a7c15u ^ (rank + 1) * 0xbf58476d1ce4e5b9u;
  int const magnitude = 1 + static_cast<int>((mixed >> 40) % 30);
  int const place = step % 2 == 1 && index < extent / 8 ? 100 : 0;
  return static_cast<float>(index % 3 != 0 ? magnitude + place : -magnitude - place);
}

struct Measured {
  std::vector<std::uint64_t> pairs, bytes, messages;  // [rank]
  SparseProblem problem;
  AlgorithmOptions options;
};

// Calls check(measured) for each of `steps` calls.
template <class F>
void for_each_call(Support const& support, int ranks, std::uint64_t steps, F&& check) {
  std::vector<std::uint64_t> counter(ranks);
  std::vector<Measured> calls(steps);
  for (Measured& call : calls) {
    call.pairs.resize(ranks);
    call.bytes.resize(ranks);
    call.messages.resize(ranks);
    call.options.frame = {IndexCodecChoice::raw32, false};
    call.options.schedule = {ThresholdSource::exact, 1};
    call.options.partition_period = 100;
    call.options.window = 3;  // so that most sizes have several
  }
  std::vector<std::vector<Pairs<float>>> selections(steps);  // [step][rank]
  std::vector<Pairs<float>> expected(steps);
  for (std::uint64_t step = 0; step < steps; ++step) {
    SparseStream<float> sum;
    sum.reset(0, extent, extent);
    for (int rank = 0; rank < ranks; ++rank) {
      Positions positions;
      support.select(rank, ranks, step, positions);
      Pairs<float>& pairs = selections[step].emplace_back();
      for (std::uint32_t const i : positions) pairs.push(i, value_at(i, rank, step));
      sum.add(pairs.view());
    }
    TopK<float>().cut(sum.sparse(), wanted, expected[step]);
  }
  auto const errors = run_ranks(
      ranks,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        auto const algorithm =
            make_sparse_allreduce<float>(find_algorithm("oktopk"), calls.front().options, {});
        communicator.run(std::make_shared<Quiet>("one call"));  // so that ranks know it
        Counters before = communicator.counters();
        for (std::uint64_t step = 0; step < steps; ++step) {
          auto const& selection = selections[step][rank];
          std::uint64_t const pairs = counter[rank];
          SparseProblem const problem{extent, wanted, wanted, step};
          auto const call = std::make_shared<OneCall>(*algorithm, problem, selection.view());
          communicator.submit(call).wait();
          Counters const after = communicator.counters();
          Measured& measured = calls[step];
          if (rank == 0) measured.problem = problem;
          measured.pairs[rank] = counter[rank] - pairs;
          measured.bytes[rank] =
              Counters::total(after.received_bytes) - Counters::total(before.received_bytes);
          measured.messages[rank] =
              Counters::total(after.sent_messages) - Counters::total(before.sent_messages);
          before = after;

          // The result, and that what is rejected is what is missing from it.
          SparseIntersection<float> intersection;
          auto const missing = intersection.difference(selection.view(), expected[step].indices);
          EXPECT_TRUE(
              std::ranges::equal(call->result.reduced.sparse.indices, expected[step].indices))
              << support.name << ", P=" << ranks << ", step " << step << ", rank " << rank;
          EXPECT_TRUE(
              std::ranges::equal(call->result.reduced.sparse.values, expected[step].values));
          EXPECT_TRUE(std::ranges::equal(call->result.rejected.indices, missing.indices));
          EXPECT_TRUE(std::ranges::equal(call->result.rejected.values, missing.values));
        }
      },
      {}, std::nullopt,
      [&](std::unique_ptr<Transport> transport) {
        std::uint64_t& pairs = counter[transport->rank()];
        auto const count = [&pairs](FrameHeader const& header) {
          if (header.kind == FrameKind::sparse) pairs += header.count;
        };
        return std::make_unique<FrameObserver>(std::move(transport), count);
      });
  expect_no_errors(errors);
  for (std::uint64_t step = 0; step < steps; ++step) {
    SCOPED_TRACE(concat(support.name, ", P=", ranks, ", step ", step));
    check(calls[step]);
  }
}

TEST(OkTopkTest, NoRankReceivesMoreThanSixKWordsWhereverRanksSelect) {
  for (int ranks = 1; ranks <= 17; ++ranks) {
    for (Support const& support : supports) {
      for_each_call(support, ranks, 3, [&](Measured const& call) {
        // Two words each.
        std::uint64_t const most = 3 * wanted * (ranks - 1) / ranks;
        Cost const cost = find_algorithm("oktopk").cost({ranks, extent, wanted}, call.options) +
                          agreement_cost(ranks, 0);
        for (int rank = 0; rank < ranks; ++rank) {
          EXPECT_LE(call.pairs[rank], most) << "on rank " << rank;
          EXPECT_LE(call.bytes[rank], cost.bytes) << "on rank " << rank;
          EXPECT_LE(call.messages[rank], cost.messages) << "on rank " << rank;
        }
      });
    }
  }
}
// Section 3.2: each rank selects in its own region, the result is spread evenly. Histograms, sizes
// and headers do not depend on k but for the logarithm of their bins.
TEST(OkTopkTest, InTheBestCaseHardlyMoreIsReceivedThanTheLowerBound) {
  Support const best{"its own region, evenly",
                     [](int rank, int size, std::uint64_t, Positions& at) {
                       std::uint64_t const first = extent * rank / size;
                       std::uint64_t const width = extent * (rank + 1) / size - first;
                       for (std::uint64_t i = 0; i < wanted; ++i) {
                         at.insert(static_cast<std::uint32_t>(first + width * i / wanted));
                       }
                     }};
  for (int ranks = 1; ranks <= 17; ++ranks) {
    for_each_call(best, ranks, 3, [&](Measured const& call) {
      if (call.problem.step % 2 == 1) return;  // the result is not spread evenly then
      double const least = static_cast<double>(wanted) * (ranks - 1) / ranks;
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_LE(static_cast<double>(call.pairs[rank]), 1.25 * least) << "on rank " << rank;
      }
    });
  }
}

// u = TopK(sum of TopK(G_i)), against a plain computation of both.
TEST(OkTopkTest, ResultIsTheTopKOfTheSumOfTheTopKs) {
  for (int ranks = 1; ranks <= 6; ++ranks) {
    std::size_t const numel = 5000;
    std::size_t const k = 250;
    auto const gradient_of = [&](int rank) {
      auto random = generator(rank, 7);
      std::normal_distribution<float> normal;
      std::vector<float> gradient(numel);
      for (float& x : gradient) x = normal(random);
      return gradient;
    };
    auto const top_k = [&](std::vector<double> const& x) {
      std::vector<double> magnitudes(x.size());
      std::ranges::transform(x, magnitudes.begin(), [](double v) { return std::abs(v); });
      std::ranges::nth_element(magnitudes, magnitudes.begin() + (k - 1), std::greater<>());
      std::vector<double> result(x.size(), 0.0);
      for (std::size_t i = 0; i < x.size(); ++i) {
        if (std::abs(x[i]) >= magnitudes[k - 1]) result[i] = x[i];
      }
      return result;
    };
    std::vector<double> sum(numel, 0.0);
    for (int rank = 0; rank < ranks; ++rank) {
      auto const gradient = gradient_of(rank);
      auto const selected = top_k({gradient.begin(), gradient.end()});
      for (std::size_t i = 0; i < numel; ++i) sum[i] += selected[i];
    }
    auto const expected = top_k(sum);
    auto const errors = run_ranks(ranks, [&](Communicator& communicator) {
      ExchangeOptions options;
      options.density = static_cast<double>(k) / numel;
      options.schedule = {ThresholdSource::exact, 1};
      options.average = false;
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
      std::vector<float> residual(numel, 0.0f);
      auto gradient = gradient_of(communicator.rank());
      exchange->bind({{gradient, residual}});
      communicator.submit(exchange).wait();
      for (std::size_t i = 0; i < numel; ++i) {
        EXPECT_EQ(gradient[i] != 0, expected[i] != 0) << i;
        EXPECT_NEAR(gradient[i], expected[i], 1e-5) << i;
      }
    });
    expect_no_errors(errors);
  }
}

// Selections are spread evenly, but the large entries of all ranks lie in the region of one, and
// nowhere twice.
TEST(OkTopkTest, BalancingLimitsWhatTheRankWithTheLargestShareSends) {
  int const ranks = 8;
  std::size_t const numel = 16000;
  std::vector<float> results[2];
  std::uint64_t sent[2] = {}, messages[2] = {};
  for (int const balanced : {0, 1}) {
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      ExchangeOptions options;
      options.density = 0.05;
      options.collective.balance_factor = balanced != 0 ? 4 : 1e9;
      options.collective.frame = {IndexCodecChoice::raw32, false};
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
      std::vector<float> residual(numel);
      auto random = generator(communicator.rank(), 5);
      std::normal_distribution<float> normal;
      std::vector<float> gradient(numel);
      for (float& x : gradient) x = normal(random);
      exchange->bind({{gradient, residual}});
      communicator.submit(exchange).wait();
      Counters const before = communicator.counters();
      std::ranges::fill(residual, 0.0f);
      for (std::size_t i = 0; i < numel; ++i) {
        bool const large = i < numel / 8 && i % 20 == static_cast<std::size_t>(communicator.rank());
        bool const small = i >= numel / 8 && i % 20 == 0;
        gradient[i] = large ? 100.0f + static_cast<float>(i % 7) : small ? 1.0f : 0.0f;
      }
      exchange->bind({{gradient, residual}});
      communicator.submit(exchange).wait();
      if (communicator.rank() != 0) return;
      Counters const after = communicator.counters();
      results[balanced] = gradient;
      sent[balanced] = Counters::total(after.sent_bytes) - Counters::total(before.sent_bytes);
      messages[balanced] =
          Counters::total(after.sent_messages) - Counters::total(before.sent_messages);
    }));
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(messages[1], messages[0] + ranks - 1);
  EXPECT_LT(sent[1], 0.8 * sent[0]);
}

TEST(OkTopkTest, DefaultScheduleKeepsTheNumberSelectedWithin15PercentOfK) {
  std::size_t const numel = 1 << 20;
  auto const errors = run_ranks(2, [&](Communicator& communicator) {
    ExchangeOptions options;
    options.density = 0.02;
    auto const exchange =
        std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
    std::vector<float> residual(numel, 0.0f);
    std::vector<float> gradient(numel);
    auto random = generator(communicator.rank(), 3);
    std::student_t_distribution<float> heavy_tailed(3.0f);
    double const k = options.density * numel;
    std::uint64_t selected = 0, nnz = 0;
    for (int step = 0; step < 12; ++step) {
      float const scale =
          std::exp2(static_cast<float>(step % 5) - 2);  // gradients that change quickly
      for (float& x : gradient) x = scale * heavy_tailed(random);
      exchange->bind({{gradient, residual}});
      communicator.submit(exchange).wait();
      auto const& stats = exchange->stats();
      EXPECT_NEAR(static_cast<double>(stats.selected - selected), k, 0.15 * k) << "step " << step;
      EXPECT_NEAR(static_cast<double>(stats.result_nnz - nnz), k, 0.15 * k) << "step " << step;
      selected = stats.selected;
      nnz = stats.result_nnz;
    }
  });
  expect_no_errors(errors);
}

TEST(OkTopkTest, AResumedExchangeIsBitIdentical) {
  std::size_t const numel = 3000;
  for (auto const& source : threshold_sources()) {
    auto const errors = run_ranks(3, [&](Communicator& communicator) {
      ExchangeOptions options;
      options.schedule = {source.id, 4};
      options.collective.partition_period = 3;
      auto const straight =
          std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
      auto resumed =
          std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
      std::vector<float> residuals[2] = {std::vector<float>(numel), std::vector<float>(numel)};
      for (std::uint64_t step = 0; step < 10; ++step) {
        if (step == 6) {
          ExchangeState const saved = resumed->state();
          resumed = std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
          resumed->load_state(saved);
        }
        std::vector<float> results[2];
        for (int run = 0; run < 2; ++run) {
          results[run] = typed<float>(patterns[0].make(communicator.rank(), 3, numel, step));
          auto const& exchange = run == 0 ? straight : resumed;
          exchange->bind({{results[run], residuals[run]}});
          communicator.submit(exchange).wait();
        }
        EXPECT_EQ(results[0], results[1]) << "step " << step << ", " << source.name;
        EXPECT_EQ(residuals[0], residuals[1]) << "step " << step << ", " << source.name;
      }
    });
    expect_no_errors(errors);
  }
}

}  // namespace
}  // namespace sparsecomm::test
