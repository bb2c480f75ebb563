#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "value_sets.h"
#include "wire/codecs.h"
#include "wire/frame.h"
#include "wire/philox.h"

namespace sparsecomm {
namespace {

using test::same_bits;
using test::value_sets;

template <class V>
std::vector<std::byte> encoded(ValueCodecEntry const& codec, std::vector<V> const& values) {
  std::size_t const bytes = codec.encoded_bytes(values.size(), sizeof(V));
  std::vector<std::byte> out(bytes + 16, std::byte{0xab});
  functions<V>(codec).encode(values, std::span(out).first(bytes));
  for (std::size_t i = bytes; i < out.size(); ++i) EXPECT_EQ(out[i], std::byte{0xab});
  out.resize(bytes);
  out.shrink_to_fit();
  return out;
}

template <class V>
std::vector<V> rounded(ValueCodec codec, std::vector<V> values, RoundingKey const& key) {
  round_values<V>(codec, values, key);
  return values;
}

class ValueCodecs : public testing::TestWithParam<ValueCodecEntry const*> {
 protected:
  ValueCodecEntry const& codec() const { return *GetParam(); }

  template <class V>
  void rounded_values_are_carried_exactly() {
    for (auto const& set : value_sets<V>()) {
      SCOPED_TRACE(set.name);
      auto const values = rounded<V>(codec().id, set.values, {1, 2, 3});
      if (!codec().lossy) {
        ASSERT_TRUE(same_bits(values, set.values));
      }
      ASSERT_TRUE(same_bits(rounded<V>(codec().id, values, {4, 5, 6}), values));
      auto const bytes = encoded(codec(), values);
      std::vector<V> decoded(values.size());
      functions<V>(codec()).decode(bytes, decoded);
      ASSERT_TRUE(same_bits(decoded, values));
      frames_carry(values);
    }
  }

  template <class V>
  void frames_carry(std::vector<V> const& values) {
    auto const extent = static_cast<std::uint32_t>(values.size());
    std::vector<std::byte> out(max_dense_frame_bytes<V>(extent));
    out.resize(encode_dense<V>(7, 10, values, out, codec().id));
    std::vector<V> dense(values.size());
    decode_dense<V>(parse_frame(out, 7), 10, dense);
    EXPECT_TRUE(same_bits(dense, values));

    std::vector<std::uint32_t> indices;
    std::vector<V> nonzeros;
    decode_sparse<V>(parse_frame(out, 7), 0, extent + 10, indices, nonzeros);
    std::size_t at = 0;
    for (std::uint32_t i = 0; i < extent; ++i) {
      if (values[i] == 0) continue;
      ASSERT_LT(at, indices.size());
      EXPECT_EQ(indices[at], i + 10);
      EXPECT_EQ(nonzeros[at++], values[i]);
    }
    EXPECT_EQ(at, indices.size());

    for (std::uint32_t step : {1u, 3u}) {
      std::vector<std::uint32_t> positions(values.size());
      for (std::uint32_t i = 0; i < extent; ++i) positions[i] = i * step;
      FrameOptions const options{.allow_dense = false, .value_codec = codec().id};
      out.resize(max_sparse_frame_bytes<V>(values.size(), values.size() * step));
      std::size_t const length =
          encode_sparse<V>(7, 0, extent * step, positions, values, options, out);
      std::vector<std::uint32_t> got_indices;
      std::vector<V> got_values;
      decode_sparse<V>(parse_frame(std::span(out).first(length), 7), 0, extent * step, got_indices,
                       got_values);
      EXPECT_EQ(got_indices, positions);
      EXPECT_TRUE(same_bits(got_values, values));
    }
  }

  template <class V>
  void values_that_would_change_are_refused() {
    for (auto const& set : value_sets<V>()) {
      SCOPED_TRACE(set.name);
      auto const values = rounded<V>(codec().id, set.values, {1, 2, 3});
      if (same_bits(values, set.values)) continue;
      EXPECT_THROW(encoded(codec(), set.values), InvalidArgument);
    }
  }

  template <class V>
  void values_that_are_not_finite_are_refused() {
    using Limits = std::numeric_limits<V>;
    for (V bad : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
      for (std::size_t at : {0u, 1023u, 1024u, 2000u}) {
        std::vector<V> values(2001, V(0.3));
        values[at] = bad;
        auto const before = values;
        try {
          round_values<V>(codec().id, values, {});
          FAIL() << "accepted";
        } catch (InvalidArgument const& error) {
          EXPECT_NE(std::string(error.what()).find(concat("value ", at, " of 2001 is ")),
                    std::string::npos)
              << error.what();
        }
        EXPECT_TRUE(same_bits(values, before));
        EXPECT_THROW(encoded(codec(), values), InvalidArgument);
      }
    }
  }

  template <class V>
  void corrupted_bytes_are_refused_or_values() {
    std::uint64_t const seed = std::random_device{}();
    SCOPED_TRACE(concat("seed ", seed));
    std::mt19937_64 generator(seed);
    for (auto const& set : value_sets<V>()) {
      SCOPED_TRACE(set.name);
      auto const values = rounded<V>(codec().id, set.values, {1, 2, 3});
      auto bytes = encoded(codec(), values);
      for (int round = 0; round < 50 && !bytes.empty(); ++round) {
        bytes[generator() % bytes.size()] = std::byte(generator());
        std::vector<V> decoded(values.size());
        try {
          functions<V>(codec()).decode(bytes, decoded);
        } catch (MalformedFrame const& error) {
          EXPECT_EQ(std::string(error.what()).find("values: "), 0u) << error.what();
          continue;
        }
        if (!codec().lossy) continue;
        for (V const value : decoded) ASSERT_TRUE(std::isfinite(value));
        round_values<V>(codec().id, decoded, {7, 8, 9});
        std::vector<V> again(decoded.size());
        functions<V>(codec()).decode(encoded(codec(), decoded), again);
        ASSERT_TRUE(same_bits(again, decoded));
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Wire, ValueCodecs,
    [] {
      std::vector<ValueCodecEntry const*> all;
      for (auto const& codec : value_codecs()) all.push_back(&codec);
      return testing::ValuesIn(all);
    }(),
    [](auto const& info) { return std::string(info.param->name); });

TEST_P(ValueCodecs, RoundedValuesAreCarriedExactly) {
  rounded_values_are_carried_exactly<float>();
  rounded_values_are_carried_exactly<double>();
}

TEST_P(ValueCodecs, ValuesThatWouldChangeAreRefused) {
  values_that_would_change_are_refused<float>();
  values_that_would_change_are_refused<double>();
}

TEST_P(ValueCodecs, ValuesThatAreNotFiniteAreRefused) {
  if (!codec().lossy) {
    std::vector<float> const values{std::numeric_limits<float>::signaling_NaN(), -INFINITY};
    EXPECT_TRUE(same_bits(rounded<float>(codec().id, values, {}), values));
    return;
  }
  values_that_are_not_finite_are_refused<float>();
  values_that_are_not_finite_are_refused<double>();
}

TEST_P(ValueCodecs, CorruptedBytesAreRefusedOrValues) {
  corrupted_bytes_are_refused_or_values<float>();
  corrupted_bytes_are_refused_or_values<double>();
}

TEST_P(ValueCodecs, IntegersTravelRawOnly) {
  std::vector<std::int32_t> values{1, -2, std::numeric_limits<std::int32_t>::min()};
  std::vector<std::byte> out(1000);
  if (codec().id != ValueCodec::raw) {
    EXPECT_THROW(round_values<std::int32_t>(codec().id, values, {}), InvalidArgument);
    EXPECT_THROW(encode_dense<std::int32_t>(1, 0, values, out, codec().id), InvalidArgument);
    EXPECT_THROW(encode_dense<Half>(1, 0, std::vector<Half>(3), out, codec().id), InvalidArgument);
    return;
  }
  round_values<std::int32_t>(codec().id, values, {});
  EXPECT_EQ(values[1], -2);
}

TEST_P(ValueCodecs, IsFoundByItsName) {
  EXPECT_EQ(value_codec_named(codec().name), codec().id);
  try {
    value_codec_named("f12");
    FAIL() << "accepted";
  } catch (InvalidArgument const& error) {
    EXPECT_NE(std::string(error.what()).find(codec().name), std::string::npos) << error.what();
  }
}

// Known answers of the authors' library.
TEST(Philox, GivesTheKnownAnswers) {
  using Block = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(HalfCodecs, RoundAsTheElementTypesDo) {
  std::mt19937 generator(5);
  for (std::uint32_t i = 0; i < 30 * 65536; ++i) {
    // Every upper half of a float, with random lower halves and the one of a tie.
    std::uint32_t const low = i < 65536 ? 0x8000u : static_cast<std::uint32_t>(generator()) >> 16;
    auto const value = std::bit_cast<float>(i << 16 | low);
    if (!std::isfinite(value)) continue;
    std::vector<float> f16{value};
    std::vector<float> bf16{value};
    round_values<float>(ValueCodec::f16, f16, {});
    round_values<float>(ValueCodec::bf16, bf16, {});
    auto const as_half = float(Half(value));
    auto const as_bfloat = float(BFloat16(value));
    ASSERT_EQ(f16[0], std::isinf(as_half) ? std::copysign(65504.0f, value) : as_half) << value;
    ASSERT_EQ(bf16[0], std::isinf(as_bfloat) ? std::copysign(0x1.fep127f, value) : as_bfloat);
    ASSERT_EQ(std::signbit(f16[0]), std::signbit(value));
  }
}

// Rounding a double to a float first would round ties twice.
TEST(HalfCodecs, RoundDoublesOnce) {
  auto const check = [](ValueCodec codec, double value, double expected) {
    std::vector<double> values{value, -value};
    round_values<double>(codec, values, {});
    EXPECT_EQ(values[0], expected) << value;
    EXPECT_EQ(values[1], -expected) << value;
  };
  check(ValueCodec::f16, 1 + 0x1p-11 + 0x1p-40, 1 + 0x1p-10);
  check(ValueCodec::f16, 1 + 0x1p-11, 1);
  check(ValueCodec::f16, 1 + 3 * 0x1p-11 - 0x1p-40, 1 + 0x1p-10);
  check(ValueCodec::f16, 0x1p-25 + 0x1p-60, 0x1p-24);
  check(ValueCodec::f16, 0x1p-25, 0);
  check(ValueCodec::f16, 1e300, 65504);
  check(ValueCodec::bf16, 1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-7);
  check(ValueCodec::bf16, 1 + 0x1p-8, 1);
  check(ValueCodec::bf16, 0x1p-134 + 0x1p-170, 0x1p-133);
  check(ValueCodec::bf16, 1e-300, 0);
  check(ValueCodec::bf16, 1e300, 0x1.fep127);
}

constexpr std::array quantisers{ValueCodec::qsgd2, ValueCodec::qsgd4, ValueCodec::qsgd8};

int top_level(ValueCodec codec) {
  return codec == ValueCodec::qsgd2 ? 1 : codec == ValueCodec::qsgd4 ? 7 : 127;
}

TEST(QsgdFormat, IsAsDocumented) {
  // Scale 2, levels 1, -1, 0, 1: codes 2, 0, 1, 2, lowest bits first.
  std::vector<float> const values{2, -2, 0, 2, -2};
  auto const bytes = encoded(*find_value_codec(ValueCodec::qsgd2), values);
  std::vector<std::uint8_t> const expected{0, 0, 0, 0x40, 0b10'01'00'10, 0};
  EXPECT_TRUE(std::ranges::equal(bytes, std::as_bytes(std::span(expected))));

  struct Case {
    ValueCodec codec;
    std::size_t count;
    std::vector<std::uint8_t> bytes;
    std::string text;
  };
  std::vector<Case> const cases{
      {ValueCodec::qsgd2, 1, {0, 0, 0, 0x40, 3}, "values: code of a level is 3, must be at most 2"},
      {ValueCodec::qsgd4, 1, {0, 0, 0, 0x40, 15}, "values: code of a level is 15, must be at most"},
      {ValueCodec::qsgd8, 1, {0, 0, 0, 0x40, 255}, "values: code of a level is 255, must be at"},
      {ValueCodec::qsgd2, 1, {0, 0, 0, 0x40, 4}, "values: padding of levels is not 0"},
      {ValueCodec::qsgd4, 1, {0, 0, 0, 0x40, 0xf0}, "values: padding of levels is not 0"},
      {ValueCodec::qsgd8, 1, {0, 0, 0, 0xc0, 1}, "values: scale is -2, must be finite and not"},
      {ValueCodec::qsgd8, 1, {0, 0, 0x80, 0x7f, 1}, "values: scale is inf, must be finite"},
      {ValueCodec::qsgd8, 1, {1, 0, 0x80, 0x7f, 1}, "values: scale is nan, must be finite"},
      {ValueCodec::f16, 2, {0, 0, 0, 0xfc}, "values: one has the bits 64512, must be finite"},
      {ValueCodec::bf16, 2, {0, 0, 0x80, 0x7f}, "values: one has the bits 32640, must be finite"},
  };
  for (Case const& c : cases) {
    std::vector<float> out(c.count);
    try {
      find_value_codec(c.codec)->f32.decode(std::as_bytes(std::span(c.bytes)), out);
      ADD_FAILURE() << "accepted: " << c.text;
    } catch (MalformedFrame const& error) {
      EXPECT_EQ(std::string(error.what()).find(c.text), 0u) << error.what();
    }
  }
}

TEST(QsgdFormat, CarriesMultiplesOfAStepExactly) {
  for (ValueCodec codec : quantisers) {
    for (float step : {1.0f, 3.0f, 0.25f, 1000.0f}) {
      std::vector<float> values;
      for (int level = -top_level(codec); level <= top_level(codec); ++level) {
        values.push_back(float(level) * step);
      }
      EXPECT_EQ(rounded(codec, values, {}), values);
    }
  }
}

// Values that were rounded together must be sent together.
TEST(QsgdFormat, RefusesAPartOfABucket) {
  std::vector<float> values{8, 1, 3, 2};
  round_values<float>(ValueCodec::qsgd4, values, {1, 1, 1});
  auto const& codec = *find_value_codec(ValueCodec::qsgd4);
  EXPECT_NO_THROW(encoded(codec, values));
  values[0] = 7;
  EXPECT_THROW(encoded(codec, values), InvalidArgument);
}

}  // namespace
}  // namespace sparsecomm
