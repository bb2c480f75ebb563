#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/dtype.h"
#include "base/error.h"
#include "wire/codecs.h"
#include "wire/philox.h"

namespace sparsecomm {
namespace {

constexpr std::size_t bucket_size = value_bucket;

template <class V>
using bits_t = std::conditional_t<sizeof(V) == 4, std::uint32_t, std::uint64_t>;

template <class V>
constexpr bits_t<V> infinity_bits = std::bit_cast<bits_t<V>>(std::numeric_limits<V>::infinity());

template <class V>
bits_t<V> magnitude_bits(V value) {
  return std::bit_cast<bits_t<V>>(value) & (~bits_t<V>{0} >> 1);
}

// The bits of the largest magnitude: above infinity_bits where there is a NaN.
template <class V>
bits_t<V> largest_bits(std::span<const V> values) {
  bits_t<V> largest = 0;
  for (V const value : values) largest = std::max(largest, magnitude_bits(value));
  return largest;
}

template <class V>
void check_finite(std::span<const V> values) {
  if (largest_bits(values) < infinity_bits<V>) [[likely]]
    return;
  auto const at =
      std::find_if_not(values.begin(), values.end(), [](V v) { return std::isfinite(v); });
  throw InvalidArgument(concat("round_values: value ", at - values.begin(), " of ", values.size(),
                               " is ", *at, ", a lossy codec carries finite values only; use raw"));
}

template <class V>
bool same_bits(V a, V b) {
  return std::bit_cast<bits_t<V>>(a) == std::bit_cast<bits_t<V>>(b);
}

// Names the first value that is not what would arrive of it.
template <class V, class F>
[[noreturn]] void refuse_unrounded(std::span<const V> values, F&& arriving) {
  auto const at = std::ranges::find_if(
      values, [&](V v) { return !std::isfinite(v) || !same_bits(arriving(v), v); });
  throw InvalidArgument(concat("encode: value ", at - values.begin(), " of its bucket is ", *at,
                               ", which the codec cannot carry; call round_values() on exactly "
                               "the values of this frame first"));
}

// The nearest float towards zero, its last bit set unless exact: rounding that to fewer bits is
// rounding the double itself.
float narrow(double value) {
  auto const nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value) return nearest;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  bits -= std::abs(static_cast<double>(nearest)) > std::abs(value) ? 1 : 0;
  return std::bit_cast<float>(bits | 1u);
}
float narrow(float value) { return value; }

// The formats of 2 bytes, on finite values and without branches, so that loops over them vectorise.
struct HalfFormat {
  static constexpr float largest = 65504.0f;
  static constexpr std::uint16_t exponent = 0x7c00;

  static float round(float value) {
    std::uint32_t const word = std::bit_cast<std::uint32_t>(value);
    std::uint32_t const magnitude = word & 0x7fffffffu;
    std::uint32_t const normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & ~0x1fffu;
    // Adding 0.5 aligns the mantissa of a subnormal so that the sum is rounded where it must be.
    std::uint32_t const subnormal =
        std::bit_cast<std::uint32_t>((std::bit_cast<float>(magnitude) + 0.5f) - 0.5f);
    std::uint32_t const rounded = magnitude < 0x38800000u ? subnormal : normal;
    return std::bit_cast<float>((word & 0x80000000u) |
                                std::min(rounded, std::bit_cast<std::uint32_t>(largest)));
  }
  // A multiplication moves between the ranges of exponents, subnormals included.
  static std::uint16_t pack(float value) {
    std::uint32_t const word = std::bit_cast<std::uint32_t>(value);
    float const scaled = std::bit_cast<float>(word & 0x7fffffffu) * 0x1p-112f;
    return static_cast<std::uint16_t>(((word >> 16) & 0x8000u) |
                                      (std::bit_cast<std::uint32_t>(scaled) >> 13));
  }
  static float unpack(std::uint16_t half) {
    float const magnitude = std::bit_cast<float>((half & 0x7fffu) << 13) * 0x1p112f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) |
                                (std::uint32_t{half} & 0x8000u) << 16);
  }
};

struct BFloat16Format {
  static constexpr std::uint16_t exponent = 0x7f80;

  static float round(float value) {
    std::uint32_t const word = std::bit_cast<std::uint32_t>(value);
    std::uint32_t const magnitude = word & 0x7fffffffu;
    std::uint32_t const rounded = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) & 0xffff0000u;
    return std::bit_cast<float>((word & 0x80000000u) | std::min(rounded, 0x7f7f0000u));
  }
  static std::uint16_t pack(float value) {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
  static float unpack(std::uint16_t half) {
    return std::bit_cast<float>(std::uint32_t{half} << 16);
  }
};

template <class V, class Format>
void round_half(std::span<V> values, RoundingKey const&) {
  check_finite<V>(values);
  for (V& value : values) value = static_cast<V>(Format::round(narrow(value)));
}

template <class V, class Format>
void encode_half(std::span<const V> values, std::span<std::byte> out) {
  std::array<std::uint16_t, bucket_size> packed;
  for (std::size_t first = 0; first < values.size(); first += bucket_size) {
    auto const part = values.subspan(first, std::min(bucket_size, values.size() - first));
    bits_t<V> wrong = 0;
    for (std::size_t i = 0; i < part.size(); ++i) {
      packed[i] = Format::pack(static_cast<float>(part[i]));
      V const carried = static_cast<V>(Format::unpack(packed[i]));
      wrong |= std::bit_cast<bits_t<V>>(carried) ^ std::bit_cast<bits_t<V>>(part[i]);
      wrong |= (packed[i] & Format::exponent) == Format::exponent;
    }
    if (wrong != 0) {
      refuse_unrounded(part, [](V v) { return static_cast<V>(Format::round(narrow(v))); });
    }
    std::memcpy(out.data() + first * 2, packed.data(), part.size() * 2);
  }
}

template <class V, class Format>
void decode_half(std::span<const std::byte> in, std::span<V> values) {
  std::array<std::uint16_t, bucket_size> packed;
  for (std::size_t first = 0; first < values.size(); first += bucket_size) {
    auto const part = values.subspan(first, std::min(bucket_size, values.size() - first));
    std::memcpy(packed.data(), in.data() + first * 2, part.size() * 2);
    std::uint32_t special = 0;
    for (std::size_t i = 0; i < part.size(); ++i) {
      special |= (packed[i] & Format::exponent) == Format::exponent;
      part[i] = static_cast<V>(Format::unpack(packed[i]));
    }
    if (special != 0) {
      auto const at = std::ranges::find_if(
          packed, [](auto p) { return (p & Format::exponent) == Format::exponent; });
      throw MalformedFrame(concat("values: one has the bits ", *at, ", must be finite"));
    }
  }
}

// ---- QSGD (Alistarh et al., NIPS 2017, as in SparCML section 6): a bucket is its scale, the
// largest magnitude in it, and for each value a level l of -s .. s in `Bits` bits, stored as l + s,
// lowest bits first, zeros after the last; s = 2^(Bits-1) - 1. The value of a level is scale * (l /
// s).

template <int Bits>
constexpr int top_level = (1 << (Bits - 1)) - 1;

using Codes = std::array<std::uint8_t, bucket_size>;

// The levels of a bucket and their values: scale * l / s, never -0. The top level is the scale
// itself, and where s divides the scale all values are exact.
template <class V, int Bits>
struct Levels {
  static constexpr int top = top_level<Bits>;

  explicit Levels(V largest)
      : scale(largest),
        divisor(largest == 0 ? V{1} : largest),
        shift(largest > 1 ? V{128} : V{1}) {}

  // Where the value lies between levels; 0 to s.
  V position(V value) const { return std::abs(value) / divisor * top; }

  V value(int magnitude, V sign) const {
    // The shift keeps the product from overflowing.
    V const inner = scale / shift * static_cast<V>(magnitude) / top * shift;
    return std::copysign(magnitude == top ? scale : inner, sign) + V{0};
  }

  V scale;
  V divisor;
  V shift;
};

// Uniform numbers of [0, 1) for one bucket: value i takes word i / 256 of the generator's block
// i % 256.
template <class V>
void draw(RoundingKey const& key, std::uint32_t bucket, std::array<V, bucket_size>& uniform) {
  constexpr std::size_t blocks = bucket_size / 4;
  constexpr int unused = sizeof(V) == 4 ? 8 : 1;  // beyond the mantissa, or beyond an int32
  constexpr V unit = V{1} / V(1ull << (32 - unused));
  auto const number = [](std::uint32_t word) {
    return static_cast<V>(static_cast<std::int32_t>(word >> unused)) * unit;
  };
  for (std::uint32_t i = 0; i < blocks; ++i) {
    auto const words = philox4x32(
        {bucket * std::uint32_t{blocks} + i, key.stream, static_cast<std::uint32_t>(key.operation),
         static_cast<std::uint32_t>(key.operation >> 32)},
        {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)});
    uniform[i] = number(words[0]);
    uniform[i + blocks] = number(words[1]);
    uniform[i + 2 * blocks] = number(words[2]);
    uniform[i + 3 * blocks] = number(words[3]);
  }
}

template <class V, int Bits>
void round_qsgd(std::span<V> values, RoundingKey const& key) {
  check_finite<V>(values);
  std::array<V, bucket_size> uniform;
  for (std::size_t first = 0; first < values.size(); first += bucket_size) {
    auto const part = values.subspan(first, std::min(bucket_size, values.size() - first));
    Levels<V, Bits> const levels(std::bit_cast<V>(largest_bits<V>(part)));
    draw(key, static_cast<std::uint32_t>(first / bucket_size), uniform);
    for (std::size_t i = 0; i < part.size(); ++i) {
      V const position = levels.position(part[i]);
      int const below = static_cast<int>(position);
      int const level = below + (uniform[i] < position - static_cast<V>(below));
      V const rounded = levels.value(level, part[i]);
      // The value of a level may lie beside its position by a rounding error.
      V const nearest = levels.value(static_cast<int>(position + V{0.5}), part[i]);
      part[i] = nearest == part[i] ? nearest : rounded;
    }
  }
}

template <int Bits>
void pack(Codes const& codes, std::size_t bytes, std::byte* out) {
  constexpr std::size_t per_byte = 8 / Bits;
  for (std::size_t i = 0; i < bytes; ++i) {
    unsigned byte = 0;
    for (std::size_t j = 0; j < per_byte; ++j)
      byte |= unsigned{codes[i * per_byte + j]} << j * Bits;
    out[i] = static_cast<std::byte>(byte);
  }
}

template <int Bits>
void unpack(std::byte const* in, std::size_t bytes, Codes& codes) {
  constexpr std::size_t per_byte = 8 / Bits;
  for (std::size_t i = 0; i < bytes; ++i) {
    auto const byte = static_cast<unsigned>(in[i]);
    for (std::size_t j = 0; j < per_byte; ++j) {
      codes[i * per_byte + j] = static_cast<std::uint8_t>(byte >> j * Bits & ((1u << Bits) - 1));
    }
  }
}

template <class V, int Bits>
void encode_qsgd(std::span<const V> values, std::span<std::byte> out) {
  Codes codes;
  std::byte* to = out.data();
  for (std::size_t first = 0; first < values.size(); first += bucket_size) {
    auto const part = values.subspan(first, std::min(bucket_size, values.size() - first));
    bits_t<V> const largest = largest_bits(part);
    V const scale = std::bit_cast<V>(largest);
    Levels<V, Bits> const levels(scale);
    auto const level_of = [&](V v) { return static_cast<int>(levels.position(v) + V{0.5}); };
    auto const arriving = [&](V v) { return levels.value(level_of(v), v); };
    if (largest >= infinity_bits<V>) refuse_unrounded(part, arriving);
    bits_t<V> wrong = 0;
    for (std::size_t i = 0; i < part.size(); ++i) {
      int const level = level_of(part[i]);
      V const carried = levels.value(level, part[i]);
      wrong |= std::bit_cast<bits_t<V>>(carried) ^ std::bit_cast<bits_t<V>>(part[i]);
      codes[i] = static_cast<std::uint8_t>(top_level<Bits> + (part[i] < 0 ? -level : level));
    }
    if (wrong != 0) refuse_unrounded(part, arriving);
    std::fill(codes.begin() + std::ptrdiff_t(part.size()), codes.end(), std::uint8_t{0});
    std::memcpy(to, &scale, sizeof(scale));
    std::size_t const bytes = (part.size() * Bits + 7) / 8;
    pack<Bits>(codes, bytes, to + sizeof(scale));
    to += sizeof(scale) + bytes;
  }
}

template <class V, int Bits>
void decode_qsgd(std::span<const std::byte> in, std::span<V> values) {
  constexpr int most = 2 * top_level<Bits>;
  Codes codes;
  std::byte const* from = in.data();
  for (std::size_t first = 0; first < values.size(); first += bucket_size) {
    auto const part = values.subspan(first, std::min(bucket_size, values.size() - first));
    V scale;
    std::memcpy(&scale, from, sizeof(scale));
    require<MalformedFrame>(std::bit_cast<bits_t<V>>(scale) < infinity_bits<V>, "values: scale is ",
                            scale, ", must be finite and not negative");
    std::size_t const bytes = (part.size() * Bits + 7) / 8;
    unpack<Bits>(from + sizeof(scale), bytes, codes);
    std::uint8_t largest = 0;
    for (std::size_t i = 0; i < part.size(); ++i) largest = std::max(largest, codes[i]);
    require<MalformedFrame>(largest <= most, "values: code of a level is ", int{largest},
                            ", must be at most ", most);
    for (std::size_t i = part.size(); i < bytes * 8 / Bits; ++i) {
      require<MalformedFrame>(codes[i] == 0, "values: padding of levels is not 0");
    }
    Levels<V, Bits> const levels(scale);
    for (std::size_t i = 0; i < part.size(); ++i) {
      int const level = int{codes[i]} - top_level<Bits>;
      part[i] = levels.value(std::abs(level), static_cast<V>(level));
    }
    from += sizeof(scale) + bytes;
  }
}

// ---- the table

void keep(auto, RoundingKey const&) {}

template <class V>
void encode_raw(std::span<const V> values, std::span<std::byte> out) {
  if (!values.empty()) std::memcpy(out.data(), values.data(), values.size_bytes());
}

template <class V>
void decode_raw(std::span<const std::byte> in, std::span<V> values) {
  if (!values.empty()) std::memcpy(values.data(), in.data(), values.size_bytes());
}

std::size_t raw_bytes(std::size_t count, std::size_t value_size) { return count * value_size; }

std::size_t half_bytes(std::size_t count, std::size_t) { return count * 2; }

template <int Bits>
std::size_t qsgd_bytes(std::size_t count, std::size_t value_size) {
  return (count + bucket_size - 1) / bucket_size * value_size + (count * Bits + 7) / 8;
}

template <class V>
constexpr ValueFunctions<V> raw{keep<std::span<V>>, encode_raw<V>, decode_raw<V>};
template <class V, class Format>
constexpr ValueFunctions<V> half{round_half<V, Format>, encode_half<V, Format>,
                                 decode_half<V, Format>};
template <class V, int Bits>
constexpr ValueFunctions<V> qsgd{round_qsgd<V, Bits>, encode_qsgd<V, Bits>, decode_qsgd<V, Bits>};

constexpr std::array<ValueCodecEntry, 6> table{{
    {ValueCodec::raw, "raw", "the element type's own bits", false, false, raw_bytes, raw<float>,
     raw<double>},
    {ValueCodec::f16, "f16", "IEEE binary16, to nearest", true, false, half_bytes,
     half<float, HalfFormat>, half<double, HalfFormat>},
    {ValueCodec::bf16, "bf16", "the upper half of a binary32, to nearest", true, false, half_bytes,
     half<float, BFloat16Format>, half<double, BFloat16Format>},
    {ValueCodec::qsgd2, "qsgd2", "QSGD, 3 levels in 2 bits", true, true, qsgd_bytes<2>,
     qsgd<float, 2>, qsgd<double, 2>},
    {ValueCodec::qsgd4, "qsgd4", "QSGD, 15 levels in 4 bits", true, true, qsgd_bytes<4>,
     qsgd<float, 4>, qsgd<double, 4>},
    {ValueCodec::qsgd8, "qsgd8", "QSGD, 255 levels in 8 bits", true, true, qsgd_bytes<8>,
     qsgd<float, 8>, qsgd<double, 8>},
}};

}  // namespace

std::span<const ValueCodecEntry> value_codecs() { return table; }

}  // namespace sparsecomm
