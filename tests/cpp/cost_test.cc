// Contract 9 and the cost functions: counted messages and bytes of every algorithm of the table.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "contributions.h"
#include "engine/gradient_exchange.h"

namespace sparsecomm::test {
namespace {

constexpr std::uint64_t extent = 17 * 16 * 15 * 7;

// Exactly k positions, in ascending order, or as many as there are.
struct Placement {
  std::string_view name;
  bool even;  // spread evenly over the regions, the same or others on every rank
  std::vector<std::uint32_t> (*place)(int rank, int size, std::uint64_t k);
};

std::vector<std::uint32_t> sample(int seed, std::uint64_t range, std::uint64_t k) {
  std::vector<std::uint32_t> all(range);
  std::iota(all.begin(), all.end(), 0u);
  std::vector<std::uint32_t> chosen;
  std::ranges::sample(all, std::back_inserter(chosen), static_cast<std::ptrdiff_t>(k),
                      generator(seed, range));
  return chosen;
}

constexpr Placement placements[] = {
    {"random", true, [](int rank, int, std::uint64_t k) { return sample(rank, extent, k); }},
    {"shared", true, [](int, int, std::uint64_t k) { return sample(0, extent, k); }},
    {"disjoint", true,
     [](int rank, int size, std::uint64_t k) {
       auto positions = sample(0, extent / size, std::min(k, extent / size));
       for (std::uint32_t& i : positions) i = static_cast<std::uint32_t>(i * size + rank);
       return positions;
     }},
    {"half clustered", false,  // half of the entries in the first region, the others nowhere else
     [](int rank, int size, std::uint64_t k) {
       std::uint64_t const region = extent / size;
       auto positions = sample(rank, region, std::min(k / 2, region));
       std::uint64_t const rest = (extent - region) / size;
       for (std::uint32_t const i : sample(0, rest, std::min(k - positions.size(), rest))) {
         positions.push_back(static_cast<std::uint32_t>(region + i * size + rank));
       }
       return positions;
     }},
    {"clustered", false,
     [](int rank, int, std::uint64_t k) { return sample(rank, std::min(extent, 2 * k), k); }},
};

// Of the rank with the most of each.
struct Counted {
  double messages = 0;
  double bytes = 0;
};

// A whole gradient, by the engine, which ranks have agreed on before.
std::vector<Counters> exchange(AlgorithmEntry const& entry, int ranks,
                               AlgorithmOptions const& collective) {
  std::vector<Counters> counters(ranks);
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    ExchangeOptions options;
    options.algorithm = entry.name;
    options.collective = collective;
    auto const exchange =
        std::make_shared<GradientExchange<float>>("test", extent, options, communicator);
    std::vector<float> gradient(extent, 1.0f);
    std::vector<float> residual(extent);
    Counters before(ranks);
    for (int step = 0; step < 2; ++step) {
      before = communicator.counters();
      exchange->bind({{gradient, residual}});
      communicator.run(exchange);
    }
    counters[communicator.rank()] = difference(communicator.counters(), before);
  }));
  return counters;
}

std::vector<Counters> reduce(AlgorithmEntry const& entry, Placement const& placement, int ranks,
                             std::uint64_t k) {
  AlgorithmOptions options;
  options.frame.index_codec = IndexCodecChoice::raw32;
  std::vector<Counters> counters(ranks);
  auto transports = make_inproc_transports(ranks);
  expect_no_errors(run_transports(transports, [&](Transport& transport) {
    auto const indices = placement.place(transport.rank(), ranks, k);
    auto random = generator(transport.rank(), 5);
    std::vector<float> values(indices.size());
    for (float& x : values) x = 1 + static_cast<float>(random() % 1000);
    auto const allreduce = make_sparse_allreduce<float>(entry, options, {});
    Channel channel(transport, 1, soon());
    allreduce->run(channel, {indices, values},
                   {.extent = extent, .k = indices.size(), .limit = indices.size()});
    counters[transport.rank()] = transport.counters();
  }));
  return counters;
}

Counted most(std::vector<Counters> const& counters) {
  Counted most;
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  for (Counters const& one : counters) {
    auto const messages = static_cast<double>(Counters::total(one.sent_messages));
    auto const bytes = static_cast<double>(Counters::total(one.received_bytes));
    most = {std::max(most.messages, messages), std::max(most.bytes, bytes)};
    sent += Counters::total(one.sent_bytes);
    received += Counters::total(one.received_bytes);
  }
  EXPECT_EQ(sent, received);
  return most;
}

std::uint64_t union_of(Placement const& placement, int ranks, std::uint64_t k) {
  std::vector<bool> held(extent);
  for (int rank = 0; rank < ranks; ++rank) {
    for (std::uint32_t const i : placement.place(rank, ranks, k)) held[i] = true;
  }
  return static_cast<std::uint64_t>(std::ranges::count(held, true));
}

class CostTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Algorithms, CostTest, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (auto const& entry : algorithms()) {
                             if (entry.needs == Needs::nothing) names.emplace_back(entry.name);
                           }
                           return names;
                         }()),
                         [](auto const& info) { return info.param; });

// A bound holds for every placement, and in one of them it is nearly reached.
TEST_P(CostTest, CountedMessagesAndBytesEqualTheCostWhereItIsExactAndElseStayUnderIt) {
  AlgorithmEntry const& entry = find_algorithm(GetParam());
  for (int ranks = 1; ranks <= 17; ++ranks) {
    if (!entry.sparse) {
      AlgorithmOptions in_chunks;  // where there are any, and the last one is shorter
      in_chunks.overlap_chunk = extent / 3 + 100;
      for (AlgorithmOptions const& options : {AlgorithmOptions{}, in_chunks}) {
        SCOPED_TRACE(concat("P=", ranks, ", chunks of ", options.overlap_chunk));
        Cost const whole = entry.cost({.ranks = ranks, .extent = extent, .k = extent}, options);
        Cost const cost = whole + agreement_cost(ranks, 0) + commit_cost(ranks);
        Counted const counted = most(exchange(entry, ranks, options));
        EXPECT_EQ(counted.messages, cost.messages);
        EXPECT_LE(counted.bytes, cost.bytes);
        EXPECT_GE(counted.bytes, whole.exact ? cost.bytes : 0.99 * cost.bytes);
      }
      continue;
    }
    for (std::uint64_t const k : {extent / 200, extent / 20, extent * 3 / 10, extent}) {
      double largest = 0;
      for (Placement const& placement : placements) {
        if (k == extent && placement.name != placements[0].name) continue;  // all the same
        SCOPED_TRACE(concat(entry.name, ", P=", ranks, ", k=", k, ", ", placement.name));
        std::uint64_t const entries = placement.place(0, ranks, k).size();
        Cost const cost = entry.cost({.ranks = ranks, .extent = extent, .k = entries}, {});
        Counted const counted = most(reduce(entry, placement, ranks, k));
        if (cost.exact) {
          EXPECT_EQ(counted.messages, cost.messages);
          EXPECT_EQ(counted.bytes, cost.bytes);
        }
        EXPECT_LE(counted.bytes, cost.bytes);
        EXPECT_LE(counted.messages, cost.messages);
        if (entry.lossless()) {
          EXPECT_EQ(counted.messages, cost.messages);
        }
        largest = std::max(largest, ranks == 1 ? 1 : counted.bytes / cost.bytes);
      }
      // A cut to all of N entries cuts nothing, and moves nothing to even out shares.
      if (k < extent || entry.lossless()) {
        EXPECT_GE(largest, 1 / 1.6) << entry.name << ", P=" << ranks << ", k=" << k;
      }
    }
  }
}

class PredictionTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Algorithms, PredictionTest, ::testing::ValuesIn(lossless_names()),
                         [](auto const& info) { return info.param; });

TEST_P(PredictionTest, FromTheUnionIsWithin15PercentForPositionsSpreadEvenly) {
  AlgorithmEntry const& entry = find_algorithm(GetParam());
  for (int ranks = 2; ranks <= 17; ++ranks) {
    for (std::uint64_t const k : {extent / 20, extent * 3 / 10}) {
      for (Placement const& placement : placements) {
        if (!placement.even) continue;
        CostShape const shape{.ranks = ranks,
                              .extent = extent,
                              .k = placement.place(0, ranks, k).size(),
                              .union_nnz = union_of(placement, ranks, k)};
        double const predicted = entry.cost(shape, {}).bytes;
        EXPECT_NEAR(most(reduce(entry, placement, ranks, k)).bytes, predicted, 0.15 * predicted)
            << entry.name << ", P=" << ranks << ", k=" << k << ", " << placement.name;
      }
    }
  }
}

TEST(EmptyCostTest, NothingHasACost) {
  for (AlgorithmEntry const& entry : algorithms()) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      Cost const cost = entry.cost({.ranks = ranks, .extent = 0, .k = 0}, {});
      EXPECT_TRUE(std::isfinite(cost.bytes) && std::isfinite(cost.entries)) << entry.name;
    }
  }
}

}  // namespace
}  // namespace sparsecomm::test
