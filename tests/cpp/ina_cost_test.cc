// What in-network aggregation sends and receives, counted, against its formulas and its cost.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "engine/planner.h"
#include "ina_cluster.h"
#include "services.h"

namespace sparsecomm::test {
namespace {

constexpr int aggregators = 2;
constexpr std::size_t block_entries = 64 / sizeof(float);
constexpr std::uint8_t window = 4;

AlgorithmOptions small_blocks() {
  AlgorithmOptions options;
  options.block_bytes = 64;
  options.block_window = window;
  return options;
}

using Blocks = std::set<std::size_t>;  // that are not zero

struct Traffic {
  std::uint64_t sent = 0, received = 0;
};

// Of a sum, of which each rank has its own blocks.
std::vector<Traffic> reduce(std::vector<Blocks> const& own, std::size_t elements) {
  std::vector<Traffic> traffic(own.size());
  auto const around = with_aggregators();
  expect_no_errors(on_threads(int(own.size()), [&](int rank) {
    CommunicatorOptions options = patient_options();
    around.equip(options, 0, rank, int(own.size()));
    InaClient client(options.aggregators, rank);
    std::vector<float> data(elements);
    for (std::size_t i = 0; i < elements; ++i) {
      if (own[rank].contains(i / block_entries)) data[i] = 1;
    }
    InaPlan const plan{.elements = data.size(),
                       .block_bytes = 64,
                       .workers = std::uint16_t(own.size()),
                       .window = window};
    auto const bytes = std::as_writable_bytes(std::span(data));
    client.reduce(plan, bytes, bytes, Deadline(steady_clock(), long_time()));
    traffic[rank].sent = client.sent_bytes();
    traffic[rank].received = client.received_bytes();
  }));
  return traffic;
}

// A stream of the blocks from `first` on, round by round, as OmNICCL's section 2.1 has it: the
// first d blocks without votes, then the d smallest that some rank has voted for.
void count(std::vector<Blocks> own, std::size_t first, std::size_t past,
           std::vector<Traffic>& traffic) {
  Blocks round;
  for (std::size_t b = first; b < std::min(past, first + window); ++b) round.insert(b);
  for (auto& blocks : own) {
    blocks.erase(blocks.begin(), blocks.lower_bound(first));
    blocks.erase(blocks.lower_bound(past), blocks.end());
  }
  for (bool begun = false;; begun = true) {
    Blocks reduced, voted;
    for (std::size_t rank = 0; rank < own.size(); ++rank) {
      Blocks& left = own[rank];
      std::size_t sent = 0;
      for (std::size_t const b : round) {
        if (left.erase(b) == 0) continue;
        reduced.insert(b);
        ++sent;
      }
      std::size_t const votes = std::min<std::size_t>(left.size(), window);
      std::copy_n(left.begin(), votes, std::inserter(voted, voted.end()));
      traffic[rank].sent += sizeof(InaHeader) + (begun ? 0 : sizeof(InaPlanRecord)) +
                            votes * sizeof(std::uint32_t) + sent * 64;
    }
    Blocks next;
    std::copy_n(voted.begin(), std::min<std::size_t>(voted.size(), window),
                std::inserter(next, next.end()));
    for (Traffic& of : traffic) {
      of.received += sizeof(InaHeader) + next.size() * sizeof(std::uint32_t) + reduced.size() * 64;
    }
    if (next.empty()) return;
    round = next;
  }
}

std::vector<Traffic> expected(std::vector<Blocks> const& own, std::size_t blocks) {
  std::vector<Traffic> traffic(own.size());
  std::size_t const streams = aggregators * InaClient::default_streams;
  for (std::size_t i = 0; i < streams; ++i) {
    count(own, blocks * i / streams, blocks * (i + 1) / streams, traffic);
  }
  return traffic;
}

TEST(InaCostTest, OwnBlocksVotesAndHeadersGoUpAndTheUnionComesDown) {
  constexpr std::size_t blocks = 203;
  std::mt19937_64 random(7);
  for (int ranks = 1; ranks <= 17; ++ranks) {
    for (double const filled : {0.0, .1, .5, 1.0}) {
      std::vector<Blocks> own(ranks);
      for (Blocks& of : own) {
        for (std::size_t b = 0; b < blocks; ++b) {
          if (std::bernoulli_distribution(filled)(random)) of.insert(b);
        }
      }
      auto const counted = reduce(own, blocks * block_entries);
      auto const formula = expected(own, blocks);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(counted[rank].sent, formula[rank].sent) << ranks << ' ' << filled;
        EXPECT_EQ(counted[rank].received, formula[rank].received) << ranks << ' ' << filled;
      }
    }
  }
}

// Of arrays without zeros it is exact. With zeros it is what random positions come to.
TEST(InaCostTest, TheCostIsWhatIsCounted) {
  constexpr std::size_t blocks = 203;
  std::mt19937_64 random(8);
  std::uint64_t const extent = blocks * block_entries - 5;
  for (int ranks = 2; ranks <= 17; ++ranks) {
    std::vector<Blocks> own(ranks), some(ranks);
    for (std::size_t b = 0; b < blocks; ++b) own[0].insert(b);
    std::ranges::fill(own, own[0]);
    Cost const whole = find_algorithm("ina").cost(
        {.ranks = ranks, .extent = extent, .k = extent, .aggregators = aggregators},
        small_blocks());
    EXPECT_TRUE(whole.exact);
    EXPECT_EQ(whole.aggregator_bytes, double(reduce(own, extent)[0].received));
    EXPECT_EQ(whole.aggregator_load, whole.aggregator_bytes * std::max(1.0, ranks / 2.0));

    // As many entries of each rank, each in a random place.
    constexpr std::uint64_t k = 40;
    std::set<std::uint64_t> together;
    for (Blocks& of : some) {
      for (std::uint64_t i = 0; i < k; ++i) {
        std::uint64_t const entry = random() % extent;
        together.insert(entry);
        of.insert(entry / block_entries);
      }
    }
    CostShape shape{.ranks = ranks, .extent = extent, .k = k, .aggregators = aggregators};
    double const counted = double(reduce(some, extent)[0].received);
    EXPECT_LE(counted, find_algorithm("ina").cost(shape, small_blocks()).aggregator_bytes);
    shape.union_nnz = together.size();
    double const predicted = find_algorithm("ina").cost(shape, small_blocks()).aggregator_bytes;
    EXPECT_NEAR(counted, predicted, .15 * predicted) << ranks;
  }
}

// Of selections that are made of whole blocks, at random places.
TEST(InaCostTest, TheCostOfSelectedBlocksIsWhatIsCounted) {
  constexpr std::size_t blocks = 203;
  std::mt19937_64 random(9);
  std::uint64_t const extent = blocks * block_entries;
  for (int ranks = 2; ranks <= 17; ++ranks) {
    std::vector<Blocks> some(ranks);
    Blocks together;
    for (Blocks& of : some) {
      while (of.size() < 20) of.insert(random() % blocks);
      together.insert(of.begin(), of.end());
    }
    CostShape const shape{.ranks = ranks,
                          .extent = extent,
                          .k = 20 * block_entries,
                          .union_nnz = together.size() * block_entries,
                          .aggregators = aggregators,
                          .run = block_entries};
    Cost const cost = find_algorithm("ina_sparse").cost(shape, small_blocks());
    double const counted = double(reduce(some, extent)[0].received);
    EXPECT_NEAR(counted, cost.aggregator_bytes, .05 * counted) << ranks;
  }
}

// Of a dense vector whose blocks were counted; else its entries count as scattered.
TEST(InaCostTest, BlocksThatAreZeroTakeNoTime) {
  Workload workload;
  workload.ranks = 8;
  workload.extent = 1 << 24;
  workload.k = workload.extent / 10;
  workload.selects = false;
  workload.aggregators = 8;
  std::uint64_t const blocks = workload.extent * sizeof(float) / workload.options.block_bytes;
  Figures figures;
  figures.link = {.round = 1e-5, .message = 1e-6, .byte = 8e-9};
  auto const received = [&](std::uint64_t of_blocks) {
    workload.blocks = of_blocks;
    return predict(find_algorithm("ina"), workload, figures).bytes;
  };
  double const whole = 4.0 * double(workload.extent);
  EXPECT_NEAR(received(0), whole, .01 * whole);
  EXPECT_NEAR(received(blocks), whole, .01 * whole);
  EXPECT_NEAR(received(blocks / 100), (1 - std::pow(.99, 8)) * whole, .01 * whole);
}

TEST(InaCostTest, AnAggregatorForEachRankHalvesWhatTwoRanksWaitFor) {
  Workload workload;
  workload.ranks = 8;
  workload.extent = workload.k = 1 << 24;
  workload.selects = false;
  Figures figures;
  figures.link = {.round = 1e-5, .message = 1e-6, .byte = 8e-9};
  AlgorithmEntry const& entry = find_algorithm("ina");
  auto const transfer = [&](int count) {
    workload.aggregators = count;
    return predict(entry, workload, figures).transfer;
  };
  EXPECT_NEAR(transfer(4) / transfer(8), 2, .01);
  EXPECT_NEAR(transfer(16) / transfer(8), 1, .01);
  figures.aggregators.byte = 3 * figures.link.byte;
  double const slow = transfer(8);
  figures.aggregators.byte = 0;
  EXPECT_NEAR(slow / transfer(8), 3, .01);
}

}  // namespace
}  // namespace sparsecomm::test
