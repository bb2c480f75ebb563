// The CUDA kernels against the scalar ones; run by the emulator, and on a device by `make
// test-cuda`.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cuda/device_memory.h"
#include "fills.h"
#include "kernels/kernels.h"
#include "kernels/magnitude.h"

namespace sparsecomm::cuda {
namespace {

using test::Array;
using test::library;
using test::One;
using test::shuffle;
using test::workspace;

constexpr std::uint64_t no_limit = std::numeric_limits<std::uint32_t>::max();

template <class T>
struct Problem {
  using V = accumulate_t<T>;

  Problem(std::size_t size, std::size_t offset, Fill<V> const& gradients, Fill<V> const& residuals,
          std::mt19937_64& random)
      : offset(offset), gradient(size + offset), residual(size + offset), momentum(size + offset) {
    for (T& x : gradient) x = T(gradients.draw(random));
    for (V& x : residual) x = residuals.draw(random);
    for (V& x : momentum) x = residuals.draw(random);
  }
  std::size_t size() const { return gradient.size() - offset; }

  std::size_t offset;
  std::vector<T> gradient;
  std::vector<V> residual, momentum;
};

template <class V>
struct Selected {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  SelectionStats<V> stats;
  std::uint64_t ties_taken = 0;
};

template <class V>
void expect_same(Selected<V> const& actual, Selected<V> const& expected) {
  EXPECT_EQ(actual.indices, expected.indices);
  expect_equal(actual.values, expected.values);
  EXPECT_EQ(actual.stats.count, expected.stats.count);
  EXPECT_EQ(actual.stats.max_magnitude, expected.stats.max_magnitude);
  EXPECT_EQ(actual.stats.finite, expected.stats.finite);
  EXPECT_EQ(actual.stats.complete, expected.stats.complete);
  EXPECT_EQ(actual.ties_taken, expected.ties_taken);
}

// What the scalar kernel selects of x.
template <class T, class V = accumulate_t<T>>
Selected<V> oracle(std::span<const T> x, Threshold<V> threshold, std::uint64_t limit,
                   std::uint32_t first_index) {
  Selected<V> selected;
  selected.indices.resize(x.size());
  selected.values.resize(x.size());
  std::uint64_t const ties = threshold.ties;
  selected.stats = kernel_tables<T>().front().select(x, threshold, first_index, limit,
                                                     {selected.indices, selected.values});
  selected.ties_taken = ties - threshold.ties;
  selected.indices.resize(selected.stats.count);
  selected.values.resize(selected.stats.count);
  return selected;
}

// A state with room for what is selected, by kernels that `run` starts.
template <class V, class Run>
Selected<V> run_on_device(Threshold<V> threshold, std::uint64_t limit, std::size_t room,
                          Run&& run) {
  Array<std::uint32_t> const indices(room);
  Array<V> const values(room);
  SelectionState garbage;
  std::memset(&garbage, 0x5a, sizeof(garbage));
  One<SelectionState> const state(garbage);
  library().begin(begin_selection(threshold, limit), state.data(), nullptr);
  run(state.data(), Packed<V>{indices.data(), values.data()});
  Selected<V> selected{indices.get(), values.get(), state.get().template stats<V>(),
                       state.get().ties_taken};
  EXPECT_LE(selected.stats.count, room);
  selected.indices.resize(selected.stats.count);
  selected.values.resize(selected.stats.count);
  return selected;
}

template <class T>
std::vector<Threshold<accumulate_t<T>>> thresholds(std::vector<accumulate_t<T>> const& x) {
  using V = accumulate_t<T>;
  using Limits = std::numeric_limits<V>;
  std::vector<Threshold<V>> list{
      {V(1), 3},          {V(2), no_limit},          {V(2), 0},
      {V(0), 5},          {Limits::infinity(), 2},   {V(-1), 4},
      {Limits::max(), 1}, {Limits::denorm_min(), 2}, {Limits::quiet_NaN(), 1}};
  if (!x.empty()) list.push_back({std::abs(x[x.size() / 2]), 2});
  return list;
}

template <class T>
class CudaLogic : public testing::Test {};
using Elements = testing::Types<float, double, Half, BFloat16>;
TYPED_TEST_SUITE(CudaLogic, Elements);

constexpr std::size_t sizes[] = {0, 1, 31, 32, 33, 512, 4095, 4096, 4097, 20000};

TYPED_TEST(CudaLogic, SelectEqualsTheScalarKernel) {
  using T = TypeParam;
  using V = accumulate_t<T>;
  std::mt19937_64 random(11);
  for (auto const& fill : fills<V>()) {
    std::size_t const size = sizes[random() % std::size(sizes)];
    Problem<T> problem(size, random() % 3, fill, fill, random);
    std::span<const T> const x = std::span(problem.gradient).subspan(problem.offset);
    std::vector<V> wide(x.size());
    std::ranges::transform(x, wide.begin(), [](T v) { return widen(v); });
    for (Threshold<V> const& threshold : thresholds<T>(wide)) {
      std::uint64_t const limit = random() % 3 == 0 ? random() % (size + 1) : no_limit;
      Array<T> const device(problem.gradient);
      SCOPED_TRACE(testing::Message() << fill.name << ", size " << size << ", threshold "
                                      << threshold.magnitude << ", limit " << limit);
      shuffle(random(), 1 + random() % 4);
      auto const space = workspace(library().selection_workspace(size));
      expect_same(run_on_device<V>(threshold, limit, size,
                                   [&](SelectionState* state, Packed<V> out) {
                                     library().kernels<T>().select(device.data() + problem.offset,
                                                                   size, 7, state, out,
                                                                   space.data(), nullptr);
                                   }),
                  oracle<T>(x, threshold, limit, 7));
    }
  }
}

enum class Momentum { none, masked, kept, nesterov };

// Several segments in one selection, with the scalar kernel on their sums as one.
template <class T>
void check_feedback(std::vector<std::size_t> const& segments, Fill<accumulate_t<T>> const& fill,
                    Fill<accumulate_t<T>> const& residuals, accumulate_t<T> scale,
                    Momentum momentum, std::mt19937_64& random, unsigned resident = 0) {
  using V = accumulate_t<T>;
  std::size_t size = 0;
  for (std::size_t const segment : segments) size += segment;
  Problem<T> problem(size, random() % 3, fill, residuals, random);
  std::vector<V> sums(size), momenta = problem.momentum;
  for (std::size_t i = 0; i < size; ++i) {
    std::size_t const at = problem.offset + i;
    V const g = scale * widen(problem.gradient[at]);
    V step = g;
    if (momentum != Momentum::none) {
      step = V{0.875} * problem.momentum[at] + g;
      momenta[at] = step;
    }
    if (momentum == Momentum::nesterov) step = g + V{0.875} * step;
    sums[i] = problem.residual[at] + step;
  }
  auto const& choices = thresholds<T>(sums);
  Threshold<V> const threshold = choices[random() % choices.size()];
  std::uint64_t const limit = random() % 2 == 0 ? random() % (size + 1) : no_limit;
  SCOPED_TRACE(testing::Message() << fill.name << ", threshold " << threshold.magnitude
                                  << ", limit " << limit);
  Selected<V> const expected = oracle<V>(sums, threshold, limit, 0);
  for (std::uint32_t const index : expected.indices) {
    sums[index] = 0;
    if (momentum == Momentum::masked) momenta[problem.offset + index] = 0;
  }
  Array<T> const gradient(problem.gradient);
  Array<V> const residual(problem.residual);
  Array<V> const u(problem.momentum);
  shuffle(random(), resident > 0 ? resident : 1 + random() % 4);
  auto const actual =
      run_on_device<V>(threshold, limit, size, [&](SelectionState* state, Packed<V> out) {
        std::size_t first = 0;
        for (std::size_t const segment : segments) {
          std::size_t const at = problem.offset + first;
          auto const space = workspace(library().selection_workspace(segment));
          ErrorFeedbackArguments<T> arguments;
          arguments.gradient = gradient.data() + at;
          arguments.residual = residual.data() + at;
          if (momentum != Momentum::none) arguments.momentum = u.data() + at;
          arguments.size = segment;
          arguments.first_index = static_cast<std::uint32_t>(first);
          arguments.scale = scale;
          arguments.momentum_factor = 0.875;
          arguments.mask_momentum = momentum == Momentum::masked;
          arguments.nesterov = momentum == Momentum::nesterov;
          library().kernels<T>().fused_error_feedback(arguments, state, out, space.data(), nullptr);
          first += segment;
        }
      });
  expect_same(actual, expected);
  std::vector<V> const left = residual.get();
  expect_equal(std::vector<V>(left.begin() + problem.offset, left.end()), sums);
  if (momentum != Momentum::none) expect_equal(u.get(), momenta);
  std::vector<T> const zeroed = gradient.get();
  for (T const g : std::span(zeroed).subspan(problem.offset)) ASSERT_TRUE(same(widen(g), V{0}));
}

TYPED_TEST(CudaLogic, FusedErrorFeedbackEqualsTheScalarKernel) {
  using V = accumulate_t<TypeParam>;
  std::mt19937_64 random(12);
  auto const all = fills<V>();
  for (auto const& fill : all) {
    for (auto const momentum :
         {Momentum::none, Momentum::masked, Momentum::kept, Momentum::nesterov}) {
      std::vector<std::size_t> segments(1 + random() % 3);
      for (std::size_t& size : segments) size = sizes[random() % std::size(sizes)];
      V const scale = random() % 2 == 0 ? V{1} : V{0.1};
      check_feedback<TypeParam>(segments, fill, all[random() % all.size()], scale, momentum,
                                random);
    }
  }
}

TEST(CudaLogicOnce, ManyTilesStayInOrderWhoeverComesFirst) {
  std::mt19937_64 random(13);
  auto const all = fills<float>();
  for (unsigned const resident : {1u, 7u, 60u}) {
    check_feedback<float>({300003}, all[0], all[2], 1, Momentum::none, random, resident);
  }
}

TEST(CudaLogicOnce, SendAllPacksZerosToo) {
  constexpr std::size_t size = 5000;
  constexpr std::size_t limit = 4990;
  std::vector<float> before(size);
  for (std::size_t i = 0; i < size; ++i) before[i] = i % 3 == 0 ? 0.0f : 1 / static_cast<float>(i);
  Array<float> const gradient(before);
  Array<float> const residual(size);
  ErrorFeedbackArguments<float> arguments;
  arguments.gradient = gradient.data();
  arguments.residual = residual.data();
  arguments.size = size;
  arguments.send_all = true;
  auto const space = workspace(library().selection_workspace(size));
  auto const sent =
      run_on_device<float>({2, 1}, limit, size, [&](SelectionState* state, Packed<float> out) {
        library().f32.fused_error_feedback(arguments, state, out, space.data(), nullptr);
      });
  EXPECT_FALSE(sent.stats.complete);
  ASSERT_EQ(sent.stats.count, limit);
  auto const left = residual.get();
  for (std::size_t i = 0; i < size; ++i) {
    ASSERT_EQ(left[i], i < limit ? 0 : before[i]);
    if (i >= limit) continue;
    ASSERT_EQ(sent.indices[i], i);
    ASSERT_EQ(sent.values[i], before[i]);
  }
}

TYPED_TEST(CudaLogic, AllFiniteSeesTheLastEntry) {
  using T = TypeParam;
  using V = accumulate_t<T>;
  for (std::size_t const size : {1u, 33u, 5000u}) {
    using Limits = std::numeric_limits<V>;
    for (V const last : {V(2), Limits::infinity(), Limits::quiet_NaN()}) {
      std::vector<T> x(size, T(V(-2)));
      x.back() = T(-last);
      Array<T> const device(x);
      One<std::uint32_t> const flag;
      library().kernels<T>().all_finite(device.data(), size, flag.data(), nullptr);
      EXPECT_EQ(flag.get(), std::isfinite(last) ? 0u : 1u);
    }
  }
}

template <class T>
void expect_threshold(SelectionState const& state, Threshold<accumulate_t<T>> const& expected) {
  EXPECT_EQ(state.magnitude, std::uint64_t{magnitude_bits(expected.magnitude)});
  EXPECT_EQ(state.ties, expected.ties);
}

// Parts of a problem, cut where `cuts` says, in either memory.
template <class T>
std::vector<Segment<T>> cut(T* gradient, accumulate_t<T>* residual,
                            std::vector<std::size_t> const& cuts) {
  std::vector<Segment<T>> segments;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    segments.push_back({{gradient + cuts[i], gradient + cuts[i + 1]},
                        {residual + cuts[i], residual + cuts[i + 1]}});
  }
  return segments;
}

TYPED_TEST(CudaLogic, ThresholdsEqualTheScalarOnes) {
  using T = TypeParam;
  using V = accumulate_t<T>;
  std::mt19937_64 random(14);
  ThresholdScratch<V> scratch;
  for (auto const& fill : fills<V>()) {
    for (std::size_t const size : {std::size_t{1}, std::size_t{700}, std::size_t{9001}}) {
      Problem<T> problem(size, random() % 3, fill, fill, random);
      Array<T> const gradient(problem.gradient);
      Array<V> const residual(problem.residual);
      std::vector<std::size_t> const cuts{problem.offset, problem.offset + random() % (size + 1),
                                          problem.offset + size};
      auto const segments = cut(problem.gradient.data(), problem.residual.data(), cuts);
      auto const on_device = cut(gradient.data(), residual.data(), cuts);
      for (std::uint64_t const k : {std::uint64_t{1}, size / 100 + 1, size / 2 + 1, size}) {
        SCOPED_TRACE(testing::Message() << fill.name << ", size " << size << ", k " << k);
        auto const space = workspace(library().threshold_workspace(size, 0));
        shuffle(random(), 2);
        One<SelectionState> const state;
        library().kernels<T>().exact_threshold(on_device, k, state.data(), space.data(), nullptr);
        expect_threshold<T>(state.get(), exact_threshold<T>(segments, k, scratch));
      }
    }
  }
}

TYPED_TEST(CudaLogic, SampledThresholdEqualsTheScalarOne) {
  using T = TypeParam;
  using V = accumulate_t<T>;
  std::mt19937_64 random(15);
  ThresholdScratch<V> scratch;
  constexpr std::size_t size = 200003;
  auto const all = fills<V>();
  for (std::size_t const which : {0, 2, 5}) {
    Problem<T> problem(size, 0, all[which], all[which], random);
    Array<T> const gradient(problem.gradient);
    Array<V> const residual(problem.residual);
    std::vector<std::size_t> const cuts{0, 5, 70005, size};
    auto const segments = cut(problem.gradient.data(), problem.residual.data(), cuts);
    auto const on_device = cut(gradient.data(), residual.data(), cuts);
    for (std::uint64_t const k : {std::uint64_t{30000}, std::uint64_t{190000}}) {
      std::size_t const stride = sampled_stride(size, k, 41);
      ASSERT_NE(stride, 0u);
      SCOPED_TRACE(testing::Message() << all[which].name << ", k " << k);
      auto const space = workspace(library().threshold_workspace(size, stride));
      One<SelectionState> const state;
      for (std::size_t const phase : {17, 1000}) {  // a step of a training, beyond every stride
        library().kernels<T>().sampled_threshold(on_device, k, stride, phase, state.data(),
                                                 space.data(), nullptr);
        expect_threshold<T>(state.get(), sampled_threshold<T>(segments, k, stride, phase, scratch));
      }
    }
  }
}

TYPED_TEST(CudaLogic, MomentsAndHistogramsEqualTheScalarOnes) {
  using T = TypeParam;
  using V = accumulate_t<T>;
  std::mt19937_64 random(19);
  for (auto const& fill : fills<V>()) {
    for (std::size_t const size : {0, 1, 300, 9001}) {
      SCOPED_TRACE(testing::Message() << fill.name << ", size " << size);
      Problem<T> const problem(size, 0, fill, fill, random);
      KernelTable<T> const& scalar = kernel_tables<T>().front();
      Array<T> const gradient(problem.gradient);
      Array<V> const residual(problem.residual);
      constexpr unsigned shift = std::numeric_limits<V>::digits - 7;
      std::uint64_t const base = random() % 2 == 0 ? 0 : magnitude_bits(V{1}) >> shift;
      std::vector<std::uint64_t> expected(histogram_bins);
      scalar.magnitude_histogram(problem.gradient, problem.residual, shift, base, expected);
      Array<std::uint32_t> const counts(histogram_bins);
      library().kernels<T>().magnitude_histogram(gradient.data(), residual.data(), size, shift,
                                                 base, counts.data(), nullptr);
      EXPECT_TRUE(std::ranges::equal(counts.get(), expected));

      auto const space = workspace(library().threshold_workspace(size, 0));
      One<Moments> const sums;
      library().kernels<T>().moments(gradient.data(), residual.data(), size, sums.data(),
                                     space.data(), nullptr);
      Moments const exact = scalar.moments(problem.gradient, problem.residual);
      if (!std::isfinite(exact.squares)) {
        EXPECT_FALSE(std::isfinite(sums.get().squares));
        continue;
      }
      double const tolerance = 1e-12 * std::sqrt(exact.squares * static_cast<double>(size));
      EXPECT_NEAR(sums.get().sum, exact.sum, tolerance);
      EXPECT_NEAR(sums.get().squares, exact.squares, 1e-12 * exact.squares);
    }
  }
}

TYPED_TEST(CudaLogic, ArgumentsOutOfRangeAreNamed) {
  using T = TypeParam;
  using V = accumulate_t<T>;
  SelectionState state{};
  EXPECT_THROW(library().kernels<T>().exact_threshold({}, 0, &state, nullptr, nullptr),
               InvalidArgument);
  EXPECT_THROW(library().kernels<T>().sampled_threshold({}, 1, 0, 0, &state, nullptr, nullptr),
               InvalidArgument);
  EXPECT_THROW(library().kernels<T>().select(nullptr, std::uint64_t{1} << 32, 1, &state, {},
                                             nullptr, nullptr),
               InvalidArgument);
  EXPECT_THROW(library().values<V>().qsgd_dequantize_add(nullptr, 1, 3, 1024, nullptr, nullptr),
               InvalidArgument);
}

}  // namespace
}  // namespace sparsecomm::cuda
