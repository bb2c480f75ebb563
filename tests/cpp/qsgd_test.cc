// QSGD of every instruction set against the scalar loops, and those against the definition.
#include "wire/qsgd.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "thread_executor.h"
#include "value_sets.h"
#include "wire/philox.h"

namespace sparsecomm {
namespace {

using test::same_bits;
using test::value_sets;
using test::ValueSet;

constexpr std::array<QsgdFormat, 6> formats{
    {{2, 512}, {2, 1024}, {4, 512}, {4, 1024}, {8, 512}, {8, 1024}}};

// By definition, one value at a time: |x| / scale * s lies between two levels; the upper one is
// taken with the probability of the distance from the lower one.
template <class V>
std::vector<V> definition(QsgdFormat format, std::vector<V> values, RoundingKey const& key) {
  V const s = V(format.top());
  std::size_t const draws = format.bucket / 4;
  for (std::size_t first = 0; first < values.size(); first += format.bucket) {
    std::size_t const size = std::min(format.bucket, values.size() - first);
    V scale = 0;
    for (std::size_t i = 0; i < size; ++i) scale = std::max(scale, std::abs(values[first + i]));
    for (std::size_t i = 0; i < size; ++i) {
      V& value = values[first + i];
      auto const words =
          philox4x32({std::uint32_t(first / 4 + i % draws), key.stream,
                      std::uint32_t(key.operation), std::uint32_t(key.operation >> 32)},
                     {std::uint32_t(key.seed), std::uint32_t(key.seed >> 32)});
      int const kept = sizeof(V) == 4 ? 24 : 31;
      V const uniform = std::ldexp(V(words[i / draws] >> (32 - kept)), -kept);
      if (scale == 0) {
        value = 0;
        continue;
      }
      V const position = std::abs(value) / scale * s;
      V level = std::floor(position);
      if (uniform < position - level) ++level;
      auto const value_of = [&](V l) {
        if (l == s) return scale;
        return scale > 1 ? (scale / 128 * l) / s * 128 : (scale * l) / s;
      };
      V const nearest = value_of(std::floor(position + V(0.5)));
      V const rounded = nearest == std::abs(value) ? nearest : value_of(level);
      value = rounded == 0 ? V{0} : std::copysign(rounded, value);
    }
  }
  return values;
}

template <class V>
std::vector<V> rounded(QsgdKernels<V> const& kernels, QsgdFormat format, std::vector<V> values,
                       RoundingKey const& key) {
  qsgd_round<V>(kernels, format, values, key);
  return values;
}

// Writes into memory of just that size, so that sanitizers see what is beyond it.
template <class V, class F>
std::vector<std::byte> bytes_of(QsgdFormat format, std::size_t count, F&& write) {
  std::vector<std::byte> out(format.bytes(count, sizeof(V)), std::byte{0xab});
  out.shrink_to_fit();
  write(out);
  return out;
}

template <class V>
std::vector<std::byte> encoded(QsgdKernels<V> const& kernels, QsgdFormat format,
                               std::vector<V> const& values) {
  return bytes_of<V>(format, values.size(), [&](std::span<std::byte> out) {
    qsgd_encode<V>(kernels, format, values, out);
  });
}

template <class V>
std::vector<std::byte> quantized(QsgdKernels<V> const& kernels, QsgdFormat format,
                                 std::vector<V> const& values, RoundingKey const& key,
                                 Executor const& executor = inline_executor()) {
  return bytes_of<V>(format, values.size(), [&](std::span<std::byte> out) {
    qsgd_quantize<V>(kernels, format, values, key, out, executor);
  });
}

// The sets of other codecs, and those whose ends lie anywhere in a vector or a bucket.
template <class V>
std::vector<ValueSet<V>> inputs() {
  auto sets = value_sets<V>();
  std::mt19937_64 generator(29);
  std::normal_distribution<double> normal;
  std::vector<std::size_t> sizes{255, 256, 257, 511, 512, 513, 767, 769, 1535, 2049};
  for (std::size_t size = 1; size <= 70; ++size) sizes.push_back(size);
  for (std::size_t const size : sizes) {
    ValueSet<V> set{concat("sized_", size), {}};
    for (std::size_t i = 0; i < size; ++i) {
      // Some are zeros, of both signs.
      set.values.push_back(V(i % 7 == 3 ? std::copysign(0.0, normal(generator))
                                        : std::ldexp(normal(generator), int(size % 5) * 20 - 40)));
    }
    sets.push_back(set);
  }
  return sets;
}

std::array<RoundingKey, 2> const keys{{{}, {~0ull - 5, 1ull << 40 | 3, 77}}};

template <class V>
class Qsgd : public testing::Test {};
using ValueTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(Qsgd, ValueTypes);

TYPED_TEST(Qsgd, TheBestTargetOfThisMachineRuns) {
  using V = TypeParam;
  auto const tables = qsgd_kernel_tables<V>();
  EXPECT_EQ(tables.front().target, "scalar");
  EXPECT_EQ(tables.back().target, qsgd_kernels<V>().target);
  std::string const best(qsgd_kernels<V>().target.substr(0, 4));
#if defined(__x86_64__)
  bool const avx2 = __builtin_cpu_supports("avx2");
  bool const avx512 = __builtin_cpu_supports("avx512vl");
  EXPECT_EQ(best, avx512 ? "AVX3" : avx2 ? "AVX2" : "SSE4");
  auto const runs = [&](std::string_view target) {
    return std::ranges::count(tables, target, &QsgdKernels<V>::target) == 1;
  };
  EXPECT_TRUE(runs("SSE4"));
  EXPECT_EQ(runs("AVX2"), avx2);
  EXPECT_EQ(runs("AVX3"), avx512);
#elif defined(__aarch64__)
  EXPECT_EQ(best, "NEON");
#endif
}

TYPED_TEST(Qsgd, TheScalarLoopsRoundAsDefined) {
  using V = TypeParam;
  auto const& scalar = qsgd_kernel_tables<V>().front();
  for (QsgdFormat const format : formats) {
    for (auto const& set : inputs<V>()) {
      SCOPED_TRACE(concat(set.name, ", bits ", format.bits, ", bucket ", format.bucket));
      for (RoundingKey const& key : keys) {
        EXPECT_TRUE(same_bits(rounded<V>(scalar, format, set.values, key),
                              definition(format, set.values, key)));
      }
    }
  }
}

TYPED_TEST(Qsgd, EveryTargetHasTheBitsOfTheScalarLoops) {
  using V = TypeParam;
  auto const tables = qsgd_kernel_tables<V>();
  auto const& scalar = tables.front();
  for (QsgdFormat const format : formats) {
    for (auto const& set : inputs<V>()) {
      for (RoundingKey const& key : keys) {
        auto const expected = rounded<V>(scalar, format, set.values, key);
        auto const codes = encoded<V>(scalar, format, expected);
        std::vector<V> sums(set.values);
        qsgd_add<V>(scalar, format, codes, sums, inline_executor());
        for (auto const& table : tables) {
          SCOPED_TRACE(concat(table.target, ", ", set.name, ", bits ", format.bits, ", bucket ",
                              format.bucket));
          ASSERT_TRUE(same_bits(rounded<V>(table, format, set.values, key), expected));
          ASSERT_TRUE(same_bits(rounded<V>(table, format, expected, {1, 2, 3}), expected));
          ASSERT_EQ(encoded<V>(table, format, expected), codes);
          ASSERT_EQ(quantized<V>(table, format, set.values, key), codes);
          std::vector<V> values(set.values.size(), V(-1));
          qsgd_decode<V>(table, format, codes, values, inline_executor());
          ASSERT_TRUE(same_bits(values, expected));
          values = set.values;
          qsgd_add<V>(table, format, codes, values, inline_executor());
          ASSERT_TRUE(same_bits(values, sums));
        }
      }
    }
  }
}

TYPED_TEST(Qsgd, EveryTargetRefusesWhatTheScalarLoopsRefuse) {
  using V = TypeParam;
  using Limits = std::numeric_limits<V>;
  for (auto const& table : qsgd_kernel_tables<V>()) {
    SCOPED_TRACE(table.target);
    for (QsgdFormat const format : formats) {
      for (V const bad : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
        for (std::size_t const at : {0u, 511u, 512u, 1023u, 1024u, 2000u}) {
          std::vector<V> values(2001, V(0.3));
          values[at] = bad;
          auto const before = values;
          auto const is_named = [&](auto&& call) {
            try {
              call();
              ADD_FAILURE() << "accepted";
            } catch (InvalidArgument const& error) {
              EXPECT_NE(std::string(error.what()).find(concat("value ", at, " of 2001 is ")),
                        std::string::npos)
                  << error.what();
            }
          };
          is_named([&] { qsgd_round<V>(table, format, values, {}); });
          is_named([&] { quantized<V>(table, format, values, {}); });
          EXPECT_TRUE(same_bits(values, before));
          EXPECT_THROW(encoded<V>(table, format, values), InvalidArgument);
        }
      }
      // One value that is no level's, or a zero with a sign.
      for (V const wrong : {V(0.7123), V(-0.0)}) {
        for (std::size_t const at : {0u, 3u, 500u, 900u, 1499u}) {
          std::vector<V> values(1500, V(1));
          values[at] = wrong;
          EXPECT_THROW(encoded<V>(table, format, values), InvalidArgument);
        }
      }
    }
  }
}

// A byte of all ones in any place: a code that is too large, in 2 and 4 bits also padding, or a
// scale that is a NaN.
TYPED_TEST(Qsgd, EveryTargetRefusesMalformedCodes) {
  using V = TypeParam;
  std::vector<V> values;
  for (int i = 0; i < 1531; ++i) values.push_back(V(std::sin(i)));
  for (auto const& table : qsgd_kernel_tables<V>()) {
    SCOPED_TRACE(table.target);
    for (QsgdFormat const format : formats) {
      auto const codes = quantized<V>(table, format, values, {1, 2, 3});
      std::size_t const step = format.bucket * std::size_t(format.bits) / 8 + sizeof(V);
      for (std::size_t at = sizeof(V); at < codes.size(); at += 1 + at % 17) {
        auto broken = codes;
        bool const in_scale = at % step < sizeof(V);
        std::size_t const first = in_scale ? at / step * step : at;
        for (std::size_t i = first; i < (in_scale ? first + sizeof(V) : at + 1); ++i) {
          broken[i] = std::byte{0xff};
        }
        for (auto const call : {qsgd_decode<V>, qsgd_add<V>}) {
          auto out = values;
          EXPECT_THROW(call(table, format, broken, out, inline_executor()), MalformedFrame) << at;
          EXPECT_TRUE(same_bits(out, values));
        }
      }
    }
  }
}

TYPED_TEST(Qsgd, ThreadsChangeNoBit) {
  using V = TypeParam;
  std::vector<V> values;
  for (int i = 0; i < 300'000; ++i) values.push_back(V(std::sin(i)));
  auto const& table = qsgd_kernels<V>();
  for (QsgdFormat const format : {QsgdFormat{4, 512}, QsgdFormat{8, 1024}}) {
    auto const codes = quantized<V>(table, format, values, {1, 2, 3});
    std::vector<V> sums(values);
    qsgd_add<V>(table, format, codes, sums, inline_executor());
    auto const decoded = rounded<V>(table, format, values, {1, 2, 3});
    for (auto const& executor : executors()) {
      EXPECT_EQ(quantized<V>(table, format, values, {1, 2, 3}, *executor), codes);
      std::vector<V> own(values);
      qsgd_add<V>(table, format, codes, own, *executor);
      EXPECT_TRUE(same_bits(own, sums));
      qsgd_decode<V>(table, format, codes, own, *executor);
      EXPECT_TRUE(same_bits(own, decoded));
      auto broken = values;
      broken[200'000] = std::numeric_limits<V>::quiet_NaN();
      EXPECT_THROW(quantized<V>(table, format, broken, {1, 2, 3}, *executor), InvalidArgument);
    }
  }
}

TYPED_TEST(Qsgd, EveryPartOfTheKeyMatters) {
  using V = TypeParam;
  std::vector<V> values;
  for (int i = 0; i < 3000; ++i) values.push_back(V(std::sin(i)));
  for (auto const& table : qsgd_kernel_tables<V>()) {
    SCOPED_TRACE(table.target);
    for (QsgdFormat const format : formats) {
      auto const at = [&](RoundingKey const& key) {
        return rounded<V>(table, format, values, key);
      };
      auto const base = at({1, 1, 1});
      EXPECT_EQ(base, at({1, 1, 1}));
      for (RoundingKey const& key : {RoundingKey{2, 1, 1},
                                     {1, 2, 1},
                                     {1, 1, 2},
                                     {1 + (1ull << 32), 1, 1},
                                     {1, 1 + (1ull << 32), 1}}) {
        EXPECT_NE(base, at(key));
      }
      // Buckets of the same values are rounded differently.
      auto const end = values.begin() + std::ptrdiff_t(format.bucket);
      std::vector<V> twice(values.begin(), end);
      twice.insert(twice.end(), values.begin(), end);
      qsgd_round<V>(table, format, twice, {1, 1, 1});
      EXPECT_FALSE(std::equal(twice.begin(), twice.begin() + std::ptrdiff_t(format.bucket),
                              twice.begin() + std::ptrdiff_t(format.bucket)));
    }
  }
}

// Over many keys: the error of each value has mean 0 (bounded by 5.5 standard errors, which one of
// 1,024 values exceeds once in 25,000 seeds), and the variance of a choice between two levels,
// which is at most (scale / s)^2 / 4.
TYPED_TEST(Qsgd, EveryTargetIsUnbiasedWithTheVarianceOfAChoiceBetweenTwoLevels) {
  using V = TypeParam;
  constexpr int rounds = 2000;
  std::mt19937_64 generator(23);
  std::normal_distribution<double> normal;
  for (auto const& table : qsgd_kernel_tables<V>()) {
    for (QsgdFormat const format : formats) {
      SCOPED_TRACE(concat(table.target, ", bits ", format.bits, ", bucket ", format.bucket));
      std::vector<V> values(format.bucket);
      for (V& value : values) value = V(normal(generator));
      double scale = 0;
      for (V value : values) scale = std::max(scale, std::abs(double(value)));
      double const step = scale / format.top();
      std::vector<double> sum(values.size());
      std::vector<V> result(values.size());
      double squares = 0;
      for (int round = 0; round < rounds; ++round) {
        auto const codes = quantized<V>(table, format, values, {99, std::uint64_t(round), 0});
        qsgd_decode<V>(table, format, codes, result, inline_executor());
        for (std::size_t i = 0; i < values.size(); ++i) {
          double const error = double(result[i]) - double(values[i]);
          ASSERT_LE(std::abs(error), step * 1.00001);
          sum[i] += error;
          squares += error * error;
        }
      }
      double expected_squares = 0;
      double total = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        double const position = std::abs(double(values[i])) / step;
        double const fraction = position - std::floor(position);
        double const variance = fraction * (1 - fraction) * step * step;
        expected_squares += rounds * variance;
        total += sum[i];
        // A value very close to a level moves too seldom for the normal law.
        if (fraction * (1 - fraction) * rounds < 20) continue;
        EXPECT_LE(std::abs(sum[i]) / std::sqrt(rounds * variance), 5.5) << "value " << i;
      }
      EXPECT_LE(std::abs(total) / std::sqrt(expected_squares), 4.0);
      EXPECT_NEAR(squares / expected_squares, 1, 0.01);
      EXPECT_LE(squares, rounds * double(values.size()) * step * step / 4);
    }
  }
}

}  // namespace
}  // namespace sparsecomm
