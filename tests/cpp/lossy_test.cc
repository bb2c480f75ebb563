// gtopk and gaussian_k beyond the contracts of every algorithm.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "collectives/pairs.h"
#include "engine/gradient_exchange.h"
#include "gradients.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

TEST(TopKTest, KeepsTheLargestAndOfTiesTheFirst) {
  std::vector<std::uint32_t> const indices{1, 3, 5, 7, 9, 11};
  std::vector<float> const values{2, -2, 1, -3, 2, 0};
  for (std::uint64_t k = 0; k <= 7; ++k) {
    Pairs<float> kept, rest;
    float const least = TopK<float>().cut({indices, values}, k, kept, &rest);
    std::vector<std::vector<std::uint32_t>> const expected{
        {}, {7}, {1, 7}, {1, 3, 7}, {1, 3, 7, 9}, {1, 3, 5, 7, 9}, indices, indices};
    EXPECT_EQ(kept.indices, expected[k]);
    EXPECT_EQ(kept.indices.size() + rest.indices.size(), indices.size());
    for (std::uint32_t const index : rest.indices) {
      EXPECT_FALSE(std::ranges::binary_search(kept.indices, index));
    }
    EXPECT_EQ(least, (std::vector<float>{0, 3, 2, 2, 2, 1, 0, 0})[k]);
  }
}

using Sparse = std::map<std::uint32_t, float>;

Sparse top_k(Sparse const& all, std::size_t k) {
  std::vector<std::pair<std::uint32_t, float>> sorted(all.begin(), all.end());
  std::ranges::stable_sort(sorted, std::greater<>(), [](auto& e) { return std::abs(e.second); });
  sorted.resize(std::min(k, sorted.size()));
  return {sorted.begin(), sorted.end()};
}

// The result of the tree below `rank`, whose children lie nearer than `span`.
Sparse tree(std::vector<Sparse> const& selections, int rank, int span, std::size_t k) {
  Sparse sum = top_k(selections[rank], k);
  for (int distance = 1; distance < span; distance *= 2) {
    if (rank + distance >= static_cast<int>(selections.size())) break;
    for (auto const& [index, value] : tree(selections, rank + distance, distance, k)) {
      sum[index] += value;
    }
    sum = top_k(sum, k);
  }
  return sum;
}

TEST(GTopKTest, CutsAtEveryLevelOfTheTreeAndRejectsWhatItCuts) {
  std::size_t const numel = 400;
  std::size_t const k = 20;
  for (int ranks = 1; ranks <= 9; ++ranks) {
    // Supports overlap, ties abound, and some select more than k.
    std::vector<Sparse> selections(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      auto random = generator(rank, 3);
      for (std::size_t i = 0; i < k + 7 * (rank % 3); ++i) {
        selections[rank][random() % 60] = static_cast<float>(static_cast<int>(random() % 9) - 4);
      }
    }
    Sparse const expected = tree(selections, 0, 2 * ranks, k);
    std::vector<double> missing(numel, 0.0), rejected(numel, 0.0);
    for (Sparse const& selection : selections) {
      for (auto const& [index, value] : selection) missing[index] += value;
    }
    for (auto const& [index, value] : expected) missing[index] -= value;

    class Call final : public Operation {
     public:
      Call(Sparse const& selection, SparseProblem problem) : problem_(problem) {
        for (auto const& [index, value] : selection) own_.push(index, value);
      }
      Proposal prepare() override { return {}; }
      void run(Channel& channel, Agreement const&) override {
        result = gtopk_->run(channel, own_.view(), problem_);
      }
      AllreduceResult<float> result;

     private:
      SparseProblem problem_;
      Pairs<float> own_;
      std::unique_ptr<SparseAllreduce<float>> gtopk_ =
          make_sparse_allreduce<float>(find_algorithm("gtopk"), {}, {});
    };
    std::mutex mutex;
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      auto const call = std::make_shared<Call>(selections[communicator.rank()],
                                               SparseProblem{numel, k, 2 * k, 0});
      communicator.submit(call).wait();
      auto const result = call->result.reduced.sparse;
      Sparse const found = [&] {
        Sparse entries;
        for (std::size_t i = 0; i < result.nnz(); ++i)
          entries[result.indices[i]] = result.values[i];
        return entries;
      }();
      EXPECT_EQ(found, expected) << "P=" << ranks << ", rank " << communicator.rank();
      std::lock_guard const lock(mutex);
      auto const back = call->result.rejected;
      EXPECT_TRUE(std::ranges::is_sorted(back.indices, std::less_equal<>()) || back.nnz() < 2);
      for (std::size_t i = 0; i < back.nnz(); ++i) rejected[back.indices[i]] += back.values[i];
    }));
    EXPECT_EQ(rejected, missing) << "P=" << ranks;
  }
}

TEST(GaussianTest, QuantilesAreThoseOfTheTables) {
  EXPECT_DOUBLE_EQ(upper_normal_quantile(0.5), 0);
  EXPECT_NEAR(upper_normal_quantile(0.025), 1.959963984540054, 1e-12);
  EXPECT_NEAR(upper_normal_quantile(0.005), 2.5758293035489004, 1e-12);
  EXPECT_NEAR(upper_normal_quantile(1e-6), 4.753424308822899, 1e-11);
  EXPECT_NEAR(upper_normal_quantile(1e-10), 6.361340902404056, 1e-10);
  EXPECT_THROW(upper_normal_quantile(0), InvalidArgument);
  EXPECT_THROW(upper_normal_quantile(0.6), InvalidArgument);
}

template <class T>
class GaussianThreshold : public ::testing::Test {
 protected:
  // How many of `numel` entries drawn from `distribution` pass the threshold for `k`, which comes
  // from three segments.
  template <class Distribution>
  static double passing(Distribution distribution, std::size_t numel, std::uint64_t k) {
    using V = accumulate_t<T>;
    std::mt19937_64 random(4);
    std::vector<T> gradient(numel);
    std::vector<V> residual(numel);
    for (std::size_t i = 0; i < numel; ++i) {
      gradient[i] = T(static_cast<V>(distribution(random) / 2));
      residual[i] = static_cast<V>(distribution(random) / 2);
    }
    std::vector<Segment<T>> segments;
    for (std::size_t const first : {std::size_t{0}, numel / 3, numel / 2}) {
      std::size_t const last = first == 0 ? numel / 3 : first == numel / 3 ? numel / 2 : numel;
      segments.push_back({std::span(gradient).subspan(first, last - first),
                          std::span(residual).subspan(first, last - first)});
    }
    auto const threshold = gaussian_threshold<T>(segments, k);
    EXPECT_EQ(threshold.ties, 0u);
    std::size_t count = 0;
    for (std::size_t i = 0; i < numel; ++i) {
      count += std::abs(residual[i] + static_cast<V>(gradient[i])) > threshold.magnitude;
    }
    return static_cast<double>(count);
  }
};

using Floats = ::testing::Types<float, double, Half, BFloat16>;
TYPED_TEST_SUITE(GaussianThreshold, Floats);

TYPED_TEST(GaussianThreshold, SelectsAboutKOfANormalDistributionAndMoreThanThreeQuartersOfAny) {
  std::size_t const numel = 200'000;
  for (double const k : {200.0, 2000.0, 20'000.0}) {
    auto const wanted = static_cast<std::uint64_t>(k);
    double const normal = this->passing(std::normal_distribution<double>(0, 1e-3), numel, wanted);
    EXPECT_GT(normal, 0.75 * k);
    EXPECT_NEAR(normal, k, 0.08 * k + 4 * std::sqrt(k));
    // Heavier tails.
    EXPECT_GT(this->passing(std::student_t_distribution<double>(3), numel, wanted), 0.75 * k);
  }
  // No tails: the estimate of 1.64 deviations is above most of what there is.
  double const flat =
      this->passing([](auto& random) { return random() % 2 == 0 ? 1.0 : -1.0; }, numel, 20'000);
  EXPECT_GT(flat, 15'000);
  EXPECT_EQ(this->passing([](auto&) { return 0.0; }, 1000, 10), 0);
  EXPECT_EQ(this->passing([](auto&) { return 1.0; }, 1000, 10), 1000);
  EXPECT_EQ(this->passing([](auto&) { return 1.0; }, 10, 10), 10);
}

TEST(GaussianTest, TheAlgorithmOverridesTheSchedule) {
  std::size_t const numel = 10'000;
  std::map<std::string, std::uint64_t> selected;
  for (std::string const algorithm : {"topk_a", "gaussian_k"}) {
    expect_no_errors(run_ranks(1, [&](Communicator& communicator) {
      ExchangeOptions options;
      options.algorithm = algorithm;
      options.schedule = {ThresholdSource::exact, 1};
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
      std::vector<float> residual(numel), gradient(numel);
      std::mt19937_64 random(1);
      std::student_t_distribution<float> heavy_tailed(3);
      for (float& x : gradient) x = heavy_tailed(random);
      exchange->bind({{gradient, residual}});
      communicator.submit(exchange).wait();
      selected[algorithm] = exchange->stats().selected;
    }));
  }
  EXPECT_EQ(selected["topk_a"], 100u);
  EXPECT_GT(selected["gaussian_k"], 120u);
}

}  // namespace
}  // namespace sparsecomm::test
