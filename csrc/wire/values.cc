#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/dtype.h"
#include "base/error.h"
#include "base/magnitude.h"
#include "wire/carried.h"
#include "wire/codecs.h"
#include "wire/qsgd.h"

namespace sparsecomm {
namespace {

constexpr std::size_t bucket_size = value_bucket;

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
  if (largest_bits<V>(values) > largest_finite_bits<V>) refuse_not_finite<V>(values);
  for (V& value : values) value = static_cast<V>(Format::round(narrow(value)));
}

template <class V, class Format>
void encode_half(std::span<const V> values, std::span<std::byte> out) {
  std::array<std::uint16_t, bucket_size> packed;
  for (std::size_t first = 0; first < values.size(); first += bucket_size) {
    auto const part = values.subspan(first, std::min(bucket_size, values.size() - first));
    magnitude_bits_t<V> wrong = 0;
    for (std::size_t i = 0; i < part.size(); ++i) {
      packed[i] = Format::pack(static_cast<float>(part[i]));
      V const carried = static_cast<V>(Format::unpack(packed[i]));
      wrong |=
          std::bit_cast<magnitude_bits_t<V>>(carried) ^ std::bit_cast<magnitude_bits_t<V>>(part[i]);
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

// ---- QSGD

template <class V, QsgdFormat Format>
void round_qsgd(std::span<V> values, RoundingKey const& key) {
  qsgd_round(qsgd_kernels<V>(), Format, values, key);
}

template <class V, QsgdFormat Format>
void encode_qsgd(std::span<const V> values, std::span<std::byte> out) {
  qsgd_encode(qsgd_kernels<V>(), Format, values, out);
}

template <class V, QsgdFormat Format>
void decode_qsgd(std::span<const std::byte> in, std::span<V> values) {
  qsgd_decode(qsgd_kernels<V>(), Format, in, values, inline_executor());
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

template <QsgdFormat Format>
std::size_t qsgd_bytes(std::size_t count, std::size_t value_size) {
  return Format.bytes(count, value_size);
}

template <class V>
constexpr ValueFunctions<V> raw{keep<std::span<V>>, encode_raw<V>, decode_raw<V>};
template <class V, class Format>
constexpr ValueFunctions<V> half{round_half<V, Format>, encode_half<V, Format>,
                                 decode_half<V, Format>};
template <class V, QsgdFormat Format>
constexpr ValueFunctions<V> qsgd{round_qsgd<V, Format>, encode_qsgd<V, Format>,
                                 decode_qsgd<V, Format>};

template <int Bits, std::size_t Bucket>
constexpr ValueCodecEntry qsgd_entry(ValueCodec id, std::string_view name,
                                     std::string_view description) {
  constexpr QsgdFormat format{Bits, Bucket};
  return {id,
          name,
          description,
          true,
          true,
          qsgd_bytes<format>,
          qsgd<float, format>,
          qsgd<double, format>};
}

constexpr std::array<ValueCodecEntry, 9> table{{
    {ValueCodec::raw, "raw", "the element type's own bits", false, false, raw_bytes, raw<float>,
     raw<double>},
    {ValueCodec::f16, "f16", "IEEE binary16, to nearest", true, false, half_bytes,
     half<float, HalfFormat>, half<double, HalfFormat>},
    {ValueCodec::bf16, "bf16", "the upper half of a binary32, to nearest", true, false, half_bytes,
     half<float, BFloat16Format>, half<double, BFloat16Format>},
    qsgd_entry<2, 1024>(ValueCodec::qsgd2, "qsgd2", "QSGD, 3 levels in 2 bits"),
    qsgd_entry<4, 1024>(ValueCodec::qsgd4, "qsgd4", "QSGD, 15 levels in 4 bits"),
    qsgd_entry<8, 1024>(ValueCodec::qsgd8, "qsgd8", "QSGD, 255 levels in 8 bits"),
    qsgd_entry<2, 512>(ValueCodec::qsgd2_512, "qsgd2_512", "qsgd2, a scale for 512 values"),
    qsgd_entry<4, 512>(ValueCodec::qsgd4_512, "qsgd4_512", "qsgd4, a scale for 512 values"),
    qsgd_entry<8, 512>(ValueCodec::qsgd8_512, "qsgd8_512", "qsgd8, a scale for 512 values"),
}};

}  // namespace

std::span<const ValueCodecEntry> value_codecs() { return table; }

}  // namespace sparsecomm
