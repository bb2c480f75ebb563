// Sizes at which indices held in a float, or sums of boundaries held in 32 bits, go wrong.
#include <gtest/gtest.h>

#include "engine/gradient_exchange.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

TEST(LargeTest, EntriesAbove2To24ArriveWhereTheyBelong) {
  std::size_t const numel = (std::size_t{1} << 24) + 1001;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (entry.needs != Needs::nothing) continue;
    expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
      ExchangeOptions options;
      options.algorithm = entry.name;
      options.density = 100.0 / static_cast<double>(numel);
      options.average = false;
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
      std::vector<float> residual(numel), gradient(numel);
      // Odd indices above 2^24 are the first that a float cannot hold.
      for (std::size_t i = 0; i < 50; ++i) {
        gradient[numel - 1 - 2 * i] = static_cast<float>(i + 1);
        gradient[2 * i] = static_cast<float>(i + 1);
      }
      auto const expected = gradient;
      exchange->bind({{gradient, residual}});
      communicator.submit(exchange).wait();
      for (std::size_t i = 0; i < numel; ++i) {
        ASSERT_EQ(gradient[i], 2 * expected[i]) << entry.name << ", entry " << i;
      }
    }));
  }
}

// Sums selections of an extent that no test could hold densely.
class SparseSum final : public Operation {
 public:
  SparseSum(AlgorithmEntry const& entry, std::uint64_t extent, SparseView<float> selection)
      : extent_(extent),
        selection_(selection),
        algorithm_(make_sparse_allreduce<float>(entry, AlgorithmOptions{}, {})) {}

  Proposal prepare() override { return {}; }
  void run(Channel& channel, Agreement const&) override {
    std::uint64_t const k = selection_.nnz();
    SparseView<float> const sum =
        algorithm_->run(channel, selection_, {extent_, k, k, 0}).reduced.sparse;
    indices.assign(sum.indices.begin(), sum.indices.end());
    values.assign(sum.values.begin(), sum.values.end());
  }

  std::vector<std::uint32_t> indices;
  std::vector<float> values;

 private:
  std::uint64_t extent_;
  SparseView<float> selection_;
  std::unique_ptr<SparseAllreduce<float>> algorithm_;
};

TEST(LargeTest, RegionsNear2To32AreFoundWithoutOverflow) {
  std::uint64_t const extent = 4'294'967'294;
  for (AlgorithmEntry const& entry : algorithms()) {
    // Regions that always travel dense would take 16 GiB.
    if (entry.cost({.ranks = 2, .extent = extent, .k = 1000}, {}).dense_entries > 0) continue;
    for (int const ranks : {1, 2, 3, 5}) {
      expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
        std::vector<std::uint32_t> indices;
        std::vector<float> values;
        for (std::uint32_t i = 1000; i > 0; --i) {
          indices.push_back(static_cast<std::uint32_t>(extent - 7 * i));
          values.push_back(static_cast<float>(i));
        }
        auto const sum =
            std::make_shared<SparseSum>(entry, extent, SparseView<float>{indices, values});
        communicator.submit(sum).wait();
        ASSERT_EQ(sum->indices, indices) << entry.name << ", P=" << ranks;
        for (std::size_t i = 0; i < values.size(); ++i) {
          ASSERT_EQ(sum->values[i], static_cast<float>(ranks) * values[i]);
        }
      }));
    }
  }
}

}  // namespace
}  // namespace sparsecomm::test
