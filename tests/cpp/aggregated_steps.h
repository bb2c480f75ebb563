// Dense allreduces by the algorithm `ina`, one after another, whose sums are known.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "collectives/algorithm.h"
#include "ranks.h"

namespace sparsecomm::test {

// Blocks and messages so small that an operation has many of them.
inline AlgorithmOptions small_messages() {
  AlgorithmOptions options;
  options.block_bytes = 64;
  options.block_window = 2;
  options.combine_order = CombineOrder::rank;
  return options;
}

// The data must be as it was until the result is written.
template <class T>
class AggregatedSum final : public Operation {
 public:
  AggregatedSum(Communicator const& communicator, AlgorithmOptions const& options)
      : dense_(find_algorithm("ina").dense->make<T>(options, communicator.services())) {}
  void bind(std::vector<T>& data) { data_ = &data; }
  Proposal prepare() override { return {}; }
  void run(Channel& channel, Agreement const&) override {
    std::vector<T> const before = *data_;
    dense_->run(channel, *data_, Reduction::sum, 1);
    EXPECT_EQ(*data_, before) << "on rank " << channel.rank();
    dense_->write(*data_);
  }

 private:
  std::unique_ptr<DenseAllreduce<T>> dense_;
  std::vector<T>* data_ = nullptr;
};

// What a rank has in a step. Some blocks are zero on some ranks. Sums of floating-point numbers are
// rounded between two ranks, where there is one order only, and exact between more.
template <class T>
std::vector<T> aggregated_input(int rank, int ranks, int step, std::size_t numel) {
  std::mt19937 random(static_cast<unsigned>(1000 * step + rank));
  std::normal_distribution<float> normal;
  std::vector<T> values(numel);
  std::size_t const block = small_messages().block_bytes / sizeof(T);
  for (std::size_t i = 0; i < numel; ++i) {
    if ((i / block + std::size_t(rank)) % 3 == 0) continue;
    if (std::is_integral_v<T> || ranks > 2) {
      values[i] = static_cast<T>(int(random() % 2000) - 1000);
    } else {
      values[i] = static_cast<T>(normal(random));
    }
  }
  return values;
}

template <class T>
std::vector<T> aggregated_sum(int ranks, int step, std::size_t numel) {
  std::vector<T> sum = aggregated_input<T>(0, ranks, step, numel);
  for (int rank = 1; rank < ranks; ++rank) {
    auto const other = aggregated_input<T>(rank, ranks, step, numel);
    std::ranges::transform(sum, other, sum.begin(), std::plus<>());
  }
  return sum;
}

}  // namespace sparsecomm::test
