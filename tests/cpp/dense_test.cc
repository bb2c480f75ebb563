// Every dense allreduce, for every type and reduction, against a plain computation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "collectives/algorithm.h"
#include "gradients.h"
#include "services.h"

namespace sparsecomm::test {
namespace {

template <class T>
class DenseCall final : public Operation {
 public:
  DenseCall(AlgorithmEntry const& entry, AlgorithmOptions const& options,
            Communicator const& communicator, std::vector<T>& data, Reduction reduction,
            accumulate_t<T> divisor)
      : dense_(entry.dense->make<T>(options, communicator.services())),
        data_(data),
        reduction_(reduction),
        divisor_(divisor) {}
  Proposal prepare() override { return {}; }
  void run(Channel& channel, Agreement const&) override {
    dense_->run(channel, data_, reduction_, divisor_);
    elsewhere_.assign(data_.size(), T(1));
    dense_->write(elsewhere_);
    dense_->write(data_);
  }
  std::vector<T> const& elsewhere() const { return elsewhere_; }

 private:
  std::unique_ptr<DenseAllreduce<T>> dense_;
  std::vector<T>& data_;
  Reduction reduction_;
  accumulate_t<T> divisor_;
  std::vector<T> elsewhere_;
};

// Small powers of two, so that sums and products are exact in every type, and stretches of zeros,
// the same on all ranks.
template <class T>
std::vector<T> input(int rank, std::size_t numel) {
  auto random = generator(rank, numel);
  std::vector<T> result(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    constexpr int choices[] = {-2, -1, 1, 1, 2};
    bool const zero = i / 300 % 2 == 1;
    result[i] = T(static_cast<accumulate_t<T>>(zero ? 0 : choices[random() % 5]));
  }
  return result;
}

template <class T>
void check(AlgorithmEntry const& entry, int ranks, std::size_t numel) {
  using V = accumulate_t<T>;
  AlgorithmOptions options;
  options.overlap_chunk = 30;
  options.window = 3;
  options.block_bytes = 64;
  for (auto const& reduction : reductions()) {
    SCOPED_TRACE(concat(entry.name, ", P=", ranks, ", N=", numel, ", ", name(dtype_of<T>()), ", ",
                        reduction.name));
    V const divisor = reduction.id == Reduction::sum && !std::is_integral_v<T> ? V(2) : V(1);
    std::vector<T> expected = input<T>(0, numel);
    for (int rank = 1; rank < ranks; ++rank) {
      auto const other = input<T>(rank, numel);
      visit_reduction<V>(reduction.id, [&](auto combine) {
        for (std::size_t i = 0; i < numel; ++i) {
          expected[i] = T(combine(static_cast<V>(expected[i]), static_cast<V>(other[i])));
        }
      });
    }
    for (T& x : expected) x = T(static_cast<V>(x) / divisor);
    auto const body = [&](Communicator& communicator) {
      auto data = input<T>(communicator.rank(), numel);
      auto const call =
          std::make_shared<DenseCall<T>>(entry, options, communicator, data, reduction.id, divisor);
      communicator.submit(call).wait();
      EXPECT_TRUE(std::ranges::equal(data, expected)) << "on rank " << communicator.rank();
      EXPECT_TRUE(std::ranges::equal(call->elsewhere(), expected))
          << "elsewhere, on rank " << communicator.rank();
    };
    expect_no_errors(run_ranks(ranks, body, {}, {}, services_for(entry.name)));
  }
}

TEST(DenseTest, EveryTypeAndReduction) {
  for (AlgorithmEntry const& entry : algorithms()) {
    if (entry.sparse) continue;
    for (int const ranks : {1, 2, 3, 4, 5, 6, 7, 8, 13}) {
      for (std::size_t const numel : {0u, 1u, 5u, 100u, 2000u}) {
        check<float>(entry, ranks, numel);
      }
      check<double>(entry, ranks, 2000);
      check<Half>(entry, ranks, 2000);
      check<BFloat16>(entry, ranks, 2000);
      check<std::int32_t>(entry, ranks, 2000);
      check<std::int64_t>(entry, ranks, 2000);
    }
  }
}

// Sums that every order of additions rounds differently.
TEST(DenseTest, ReplicasAreIdenticalWhereSumsAreRounded) {
  std::size_t const numel = 1000;
  auto const gradient_of = [&](int rank) {
    auto random = generator(rank, 1);
    std::normal_distribution<float> normal;
    std::vector<Half> gradient(numel);
    for (Half& x : gradient) x = Half(normal(random));
    return gradient;
  };
  for (AlgorithmEntry const& entry : algorithms()) {
    if (entry.sparse) continue;
    for (int const ranks : {3, 4, 7}) {
      std::vector<std::vector<Half>> results(ranks), gradients;
      for (int rank = 0; rank < ranks; ++rank) gradients.push_back(gradient_of(rank));
      auto const body = [&](Communicator& communicator) {
        auto data = gradients[communicator.rank()];
        communicator
            .submit(std::make_shared<DenseCall<Half>>(entry, AlgorithmOptions{}, communicator, data,
                                                      Reduction::sum, 1.0f))
            .wait();
        results[communicator.rank()] = data;
      };
      expect_no_errors(run_ranks(ranks, body, {}, {}, services_for(entry.name)));
      for (int rank = 1; rank < ranks; ++rank) {
        EXPECT_EQ(std::memcmp(results[rank].data(), results[0].data(), numel * sizeof(Half)), 0)
            << entry.name << ", P=" << ranks << ", rank " << rank;
      }
      for (std::size_t i = 0; i < numel; ++i) {
        float exact = 0;
        for (auto const& gradient : gradients) exact += float(gradient[i]);
        // Each rounding is off by half of the last place of a sum of at most 16.
        EXPECT_NEAR(float(results[0][i]), exact, static_cast<float>(ranks) * 0.004f) << entry.name;
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace sparsecomm::test
