// QSGD's loops over a bucket, with vectors. Included once per instruction set, as Highway's own
// -inl.h files are.
#if defined(SPARSECOMM_WIRE_QSGD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_WIRE_QSGD_INL_H_
#undef SPARSECOMM_WIRE_QSGD_INL_H_
#else
#define SPARSECOMM_WIRE_QSGD_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "hwy/highway.h"
#include "wire/philox.h"
#include "wire/qsgd.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class V>
using ValueTag = hn::ScalableTag<V>;
using WordTag = hn::ScalableTag<std::uint64_t>;
using HalfWordTag = hn::Repartition<std::uint32_t, WordTag>;

// What no bucket is longer than is a whole number of vectors, and so is a quarter of the shortest.
static_assert(hn::MaxLanes(ValueTag<float>()) <= 128);

// A bucket that is not whole is worked on in a copy, so that all loops are of whole vectors.
constexpr std::size_t whole = 512;

template <class V>
struct Padded {
  explicit Padded(std::span<const V> values) {
    std::copy(values.begin(), values.end(), entry.begin());
    std::fill(entry.begin() + std::ptrdiff_t(values.size()), entry.end(), V{0});
  }
  std::array<V, largest_qsgd_bucket> entry;
};

using CodeArray = std::array<std::uint8_t, largest_qsgd_bucket>;

// ---- random numbers

struct PhiloxKeys {
  explicit PhiloxKeys(std::uint64_t seed) {
    auto k = static_cast<std::uint32_t>(seed);
    auto l = static_cast<std::uint32_t>(seed >> 32);
    for (std::size_t round = 0; round < left.size(); ++round) {
      left[round] = k;
      right[round] = l;
      k += philox_left_step;
      l += philox_right_step;
    }
  }
  std::array<std::uint64_t, philox_rounds> left;
  std::array<std::uint64_t, philox_rounds> right;
};

// A block of the generator in each lane, its words in the lower halves. What is in the upper halves
// meets nothing but itself.
HWY_INLINE void philox_lanes(PhiloxKeys const& keys, hn::Vec<WordTag>& a, hn::Vec<WordTag>& b,
                             hn::Vec<WordTag>& c, hn::Vec<WordTag>& d) {
  WordTag const word;
  HalfWordTag const half;
  auto const left_factor = hn::Set(half, philox_left_factor);
  auto const right_factor = hn::Set(half, philox_right_factor);
#pragma GCC unroll 10
  for (std::size_t round = 0; round < philox_rounds; ++round) {
    auto const left = hn::MulEven(hn::BitCast(half, a), left_factor);
    auto const right = hn::MulEven(hn::BitCast(half, c), right_factor);
    a = hn::Xor3(hn::ShiftRight<32>(right), b, hn::Set(word, keys.left[round]));
    b = right;
    c = hn::Xor3(hn::ShiftRight<32>(left), d, hn::Set(word, keys.right[round]));
    d = left;
  }
}

// Uniform in [0, 1): of the words of two vectors of blocks, even and odd lanes.
HWY_INLINE hn::Vec<ValueTag<float>> uniform_floats(hn::Vec<WordTag> even, hn::Vec<WordTag> odd) {
  HalfWordTag const half;
  ValueTag<float> const d;
  auto const both = hn::OddEven(hn::BitCast(half, hn::ShiftLeft<32>(odd)), hn::BitCast(half, even));
  auto const bits = hn::BitCast(hn::RebindToSigned<ValueTag<float>>(), hn::ShiftRight<8>(both));
  return hn::Mul(hn::ConvertTo(d, bits), hn::Set(d, 0x1p-24f));
}
// Below 2^31 * 2^-31; the exponent of 2^52 makes a double of an integer.
HWY_INLINE hn::Vec<ValueTag<double>> uniform_doubles(hn::Vec<WordTag> words) {
  WordTag const word;
  ValueTag<double> const d;
  auto const bits = hn::And(hn::ShiftRight<1>(words), hn::Set(word, 0x7fffffffu));
  auto const shifted = hn::BitCast(d, hn::Or(bits, hn::Set(word, 0x4330000000000000u)));
  return hn::Mul(hn::Sub(shifted, hn::Set(d, 0x1p52)), hn::Set(d, 0x1p-31));
}

// The random numbers of the first `size` values at least. Of a whole bucket at most: it has as many
// as there are values.
template <class V>
HWY_INLINE void draw(QsgdDraws const& draws, std::size_t size,
                     std::array<V, largest_qsgd_bucket>& uniform) {
  WordTag const word;
  ValueTag<V> const value;
  PhiloxKeys const keys(draws.key.seed);
  std::size_t const count = draws.count;
  auto const stream = hn::Set(word, draws.key.stream);
  auto const operation = hn::Set(word, draws.key.operation);
  auto const later = hn::ShiftRight<32>(operation);
  for (std::size_t i = 0; i < std::min(count, size); i += hn::Lanes(value)) {
    V* const out = uniform.data() + i;
    auto const first = hn::Set(word, draws.first + i);
    auto b = stream, c = operation, d = later;
    if constexpr (sizeof(V) == sizeof(float)) {
      auto a = hn::Add(first, hn::ShiftLeft<1>(hn::Iota(word, 0)));
      auto odd_a = hn::Add(a, hn::Set(word, 1));
      auto odd_b = stream, odd_c = operation, odd_d = later;
      philox_lanes(keys, a, b, c, d);
      philox_lanes(keys, odd_a, odd_b, odd_c, odd_d);
      hn::StoreU(uniform_floats(a, odd_a), value, out);
      hn::StoreU(uniform_floats(b, odd_b), value, out + count);
      hn::StoreU(uniform_floats(c, odd_c), value, out + 2 * count);
      hn::StoreU(uniform_floats(d, odd_d), value, out + 3 * count);
    } else {
      auto a = hn::Add(first, hn::Iota(word, 0));
      philox_lanes(keys, a, b, c, d);
      hn::StoreU(uniform_doubles(a), value, out);
      hn::StoreU(uniform_doubles(b), value, out + count);
      hn::StoreU(uniform_doubles(c), value, out + 2 * count);
      hn::StoreU(uniform_doubles(d), value, out + 3 * count);
    }
  }
}

// ---- levels: operation for operation the arithmetic of QsgdLevels

template <class V, class Vector>
HWY_INLINE Vector positions(QsgdLevels<V> const& levels, Vector v) {
  ValueTag<V> const d;
  return hn::Mul(hn::Div(hn::Abs(v), hn::Set(d, levels.divisor)),
                 hn::Set(d, static_cast<V>(levels.top)));
}

// The values of levels that are floats themselves, of magnitude and sign.
template <class V, class Vector>
HWY_INLINE Vector level_values(QsgdLevels<V> const& levels, Vector magnitude, Vector sign) {
  ValueTag<V> const d;
  auto const top = hn::Set(d, static_cast<V>(levels.top));
  auto const inner =
      hn::Mul(hn::Div(hn::Mul(hn::Set(d, levels.unit), magnitude), top), hn::Set(d, levels.shift));
  auto const value = hn::IfThenElse(hn::Eq(magnitude, top), hn::Set(d, levels.scale), inner);
  return hn::Add(hn::CopySign(value, sign), hn::Zero(d));
}

template <class V, class Vector>
HWY_INLINE Vector nearest_levels(QsgdLevels<V> const& levels, Vector v) {
  return hn::Floor(hn::Add(positions(levels, v), hn::Set(ValueTag<V>(), V{0.5})));
}

// The magnitudes of the levels that the values become.
template <class V, class Vector>
HWY_INLINE Vector drawn_levels(QsgdLevels<V> const& levels, Vector v, Vector uniform) {
  ValueTag<V> const d;
  auto const position = positions(levels, v);
  auto const below = hn::Floor(position);
  auto const up = hn::Lt(uniform, hn::Sub(position, below));
  auto const level = hn::Add(below, hn::IfThenElseZero(up, hn::Set(d, V{1})));
  // What is a level's value already is rare unless all are, and close to its position. Of 0 the
  // level is right already.
  auto const nearest = hn::Floor(hn::Add(position, hn::Set(d, V{0.5})));
  auto const distance = hn::Set(d, levels.normal ? V{0x1p-13} : V{1});
  auto const close =
      hn::And(hn::Le(hn::Abs(hn::Sub(position, nearest)), distance), hn::Gt(position, hn::Zero(d)));
  if (hn::AllFalse(d, close)) [[likely]]
    return level;
  auto const exact = hn::Eq(level_values(levels, nearest, v), v);
  return hn::IfThenElse(exact, nearest, level);
}

// Codes of levels of the signs of `sign`: the low bits of a sum that has no bits below 1.
template <class V, class Vector>
HWY_INLINE void store_codes(QsgdLevels<V> const& levels, Vector level, Vector sign,
                            std::uint8_t* out) {
  ValueTag<V> const d;
  hn::RebindToUnsigned<ValueTag<V>> const bits;
  hn::Rebind<std::uint8_t, ValueTag<V>> const byte;
  constexpr V integers = sizeof(V) == sizeof(float) ? V{0x1p23} : V{0x1p52};
  auto const zero_code = hn::Set(d, integers + static_cast<V>(levels.top));
  auto const codes = hn::BitCast(bits, hn::Add(zero_code, hn::CopySign(level, sign)));
  hn::StoreU(hn::TruncateTo(byte, codes), byte, out);
}

template <class V>
HWY_INLINE hn::Vec<ValueTag<V>> load_levels(QsgdLevels<V> const& levels,
                                            std::uint8_t const* codes) {
  ValueTag<V> const d;
  hn::Rebind<std::int32_t, ValueTag<V>> const integer;
  auto const code =
      hn::PromoteTo(integer, hn::LoadU(hn::Rebind<std::uint8_t, ValueTag<V>>(), codes));
  auto const level = hn::Sub(code, hn::Set(integer, levels.top));
  if constexpr (sizeof(V) == sizeof(float)) {
    return hn::ConvertTo(d, level);
  } else {
    return hn::PromoteTo(d, level);
  }
}

// ---- codes of 2 and 4 bits: `Word` holds those of a byte, one in each of its bytes

template <class Word, class Vector>
HWY_INLINE Vector squeezed(hn::ScalableTag<Word> d, Vector v) {
  if constexpr (sizeof(Word) == 2) {
    v = hn::Or(v, hn::ShiftRight<4>(v));
  } else {
    v = hn::Or(v, hn::ShiftRight<6>(v));
    v = hn::Or(v, hn::ShiftRight<12>(v));
  }
  return hn::And(v, hn::Set(d, Word{0xff}));
}

template <class Word, class Vector>
HWY_INLINE Vector spread(hn::ScalableTag<Word> d, Vector v) {
  if constexpr (sizeof(Word) == 2) {
    return hn::And(hn::Or(v, hn::ShiftLeft<4>(v)), hn::Set(d, Word{0x0f0f}));
  } else {
    v = hn::Or(v, hn::ShiftLeft<12>(v));
    return hn::And(hn::Or(v, hn::ShiftLeft<6>(v)), hn::Set(d, Word{0x03030303}));
  }
}

template <class Word>
HWY_INLINE void squeeze_all(CodeArray const& codes, std::size_t bytes, std::uint8_t* out) {
  hn::ScalableTag<Word> const d;
  hn::Rebind<std::uint8_t, decltype(d)> const byte;
  for (std::size_t i = 0; i < bytes; i += hn::Lanes(d)) {
    auto const wide = hn::BitCast(d, hn::LoadU(hn::Repartition<std::uint8_t, decltype(d)>(),
                                               codes.data() + i * sizeof(Word)));
    hn::StoreU(hn::TruncateTo(byte, squeezed<Word>(d, wide)), byte, out + i);
  }
}

template <class Word>
HWY_INLINE void spread_all(std::uint8_t const* in, std::size_t bytes, CodeArray& codes) {
  hn::ScalableTag<Word> const d;
  hn::Repartition<std::uint8_t, decltype(d)> const wide_bytes;
  for (std::size_t i = 0; i < bytes; i += hn::Lanes(d)) {
    auto const wide = hn::PromoteTo(d, hn::LoadU(hn::Rebind<std::uint8_t, decltype(d)>(), in + i));
    hn::StoreU(hn::BitCast(wide_bytes, spread<Word>(d, wide)), wide_bytes,
               codes.data() + i * sizeof(Word));
  }
}

// Of `size` codes; those behind them become zeros.
HWY_INLINE void pack_codes(CodeArray& codes, std::size_t size, int bits, std::byte* out) {
  std::fill(codes.begin() + std::ptrdiff_t(size),
            codes.begin() + std::ptrdiff_t(std::min(size + 3, codes.size())), std::uint8_t{0});
  std::size_t const bytes = QsgdFormat{bits}.code_bytes(size);
  if (bits == 8) {
    std::memcpy(out, codes.data(), bytes);
    return;
  }
  CodeArray copy;
  std::uint8_t* const to = size % whole == 0 ? reinterpret_cast<std::uint8_t*>(out) : copy.data();
  if (bits == 4) {
    squeeze_all<std::uint16_t>(codes, bytes, to);
  } else {
    squeeze_all<std::uint32_t>(codes, bytes, to);
  }
  if (size % whole != 0) std::memcpy(out, copy.data(), bytes);
}

HWY_INLINE void unpack_codes(std::byte const* in, std::size_t size, int bits, CodeArray& codes) {
  std::size_t const bytes = QsgdFormat{bits}.code_bytes(size);
  if (bits == 8) {
    std::memcpy(codes.data(), in, bytes);
    return;
  }
  // All of the copy, of which some is read beyond the codes.
  std::array<std::uint8_t, largest_qsgd_bucket / 2> copy{};
  if (size % whole != 0) std::memcpy(copy.data(), in, bytes);
  auto const* const from =
      size % whole == 0 ? reinterpret_cast<std::uint8_t const*>(in) : copy.data();
  if (bits == 4) {
    spread_all<std::uint16_t>(from, bytes, codes);
  } else {
    spread_all<std::uint32_t>(from, bytes, codes);
  }
}

// ---- the table's functions

template <class V>
magnitude_bits_t<V> largest_of(std::span<const V> values) {
  using Bits = magnitude_bits_t<V>;
  ValueTag<V> const d;
  hn::RebindToSigned<ValueTag<V>> const bits;
  std::size_t const lanes = hn::Lanes(d);
  auto const magnitudes = [&](std::size_t i) HWY_ATTR {
    return hn::BitCast(bits, hn::Abs(hn::LoadU(d, values.data() + i)));
  };
  auto first = hn::Zero(bits), second = first, third = first, fourth = first;
  std::size_t i = 0;
  for (; i + 4 * lanes <= values.size(); i += 4 * lanes) {
    first = hn::Max(first, magnitudes(i));
    second = hn::Max(second, magnitudes(i + lanes));
    third = hn::Max(third, magnitudes(i + 2 * lanes));
    fourth = hn::Max(fourth, magnitudes(i + 3 * lanes));
  }
  for (; i + lanes <= values.size(); i += lanes) first = hn::Max(first, magnitudes(i));
  auto const most = hn::MaxOfLanes(bits, hn::Max(hn::Max(first, second), hn::Max(third, fourth)));
  auto largest = static_cast<Bits>(hn::GetLane(most));
  for (; i < values.size(); ++i) largest = std::max(largest, magnitude_bits(values[i]));
  return largest;
}

template <class V>
HWY_INLINE void round_whole(QsgdLevels<V> const& levels, QsgdDraws const& draws, std::size_t size,
                            V* values) {
  ValueTag<V> const d;
  std::array<V, largest_qsgd_bucket> uniform;
  draw(draws, size, uniform);
  for (std::size_t i = 0; i < size; i += hn::Lanes(d)) {
    auto const v = hn::LoadU(d, values + i);
    auto const level = drawn_levels(levels, v, hn::LoadU(d, uniform.data() + i));
    hn::StoreU(level_values(levels, level, v), d, values + i);
  }
}

template <class V>
void round_bucket(QsgdLevels<V> const& levels, QsgdDraws const& draws, std::span<V> values) {
  if (values.size() % whole == 0) {
    round_whole(levels, draws, values.size(), values.data());
  } else {
    Padded<V> copy(values);
    round_whole(levels, draws, values.size(), copy.entry.data());
    std::copy_n(copy.entry.begin(), values.size(), values.begin());
  }
}

template <class V>
HWY_INLINE void quantize_whole(QsgdLevels<V> const& levels, QsgdDraws const& draws,
                               std::size_t size, V const* values, std::byte* out) {
  ValueTag<V> const d;
  std::array<V, largest_qsgd_bucket> uniform;
  CodeArray codes;
  draw(draws, size, uniform);
  for (std::size_t i = 0; i < size; i += hn::Lanes(d)) {
    auto const v = hn::LoadU(d, values + i);
    auto level = drawn_levels(levels, v, hn::LoadU(d, uniform.data() + i));
    if (!levels.normal) level = nearest_levels(levels, level_values(levels, level, v));
    store_codes(levels, level, v, codes.data() + i);
  }
  pack_codes(codes, size, levels.bits, out);
}

template <class V>
void quantize_bucket(QsgdLevels<V> const& levels, QsgdDraws const& draws, std::span<const V> values,
                     std::byte* out) {
  if (values.size() % whole == 0) {
    quantize_whole(levels, draws, values.size(), values.data(), out);
  } else {
    quantize_whole(levels, draws, values.size(), Padded<V>(values).entry.data(), out);
  }
}

template <class V>
HWY_INLINE bool encode_whole(QsgdLevels<V> const& levels, std::size_t size, V const* values,
                             std::byte* out) {
  ValueTag<V> const d;
  hn::RebindToUnsigned<ValueTag<V>> const bits;
  CodeArray codes;
  auto wrong = hn::Zero(bits);
  for (std::size_t i = 0; i < size; i += hn::Lanes(d)) {
    auto const v = hn::LoadU(d, values + i);
    auto const level = nearest_levels(levels, v);
    auto const carried = level_values(levels, level, v);
    wrong = hn::Or(wrong, hn::Xor(hn::BitCast(bits, carried), hn::BitCast(bits, v)));
    store_codes(levels, level, v, codes.data() + i);
  }
  pack_codes(codes, size, levels.bits, out);
  return hn::AllTrue(bits, hn::Eq(wrong, hn::Zero(bits)));
}

template <class V>
bool encode_bucket(QsgdLevels<V> const& levels, std::span<const V> values, std::byte* out) {
  if (values.size() % whole == 0) return encode_whole(levels, values.size(), values.data(), out);
  return encode_whole(levels, values.size(), Padded<V>(values).entry.data(), out);
}

template <class V, bool Add>
HWY_INLINE void decode_to(QsgdLevels<V> const& levels, std::byte const* in, std::span<V> values) {
  ValueTag<V> const d;
  CodeArray codes;
  unpack_codes(in, values.size(), levels.bits, codes);
  std::size_t const lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= values.size(); i += lanes) {
    auto const level = load_levels(levels, codes.data() + i);
    auto value = level_values(levels, hn::Abs(level), level);
    if constexpr (Add) value = hn::Add(hn::LoadU(d, values.data() + i), value);
    hn::StoreU(value, d, values.data() + i);
  }
  for (; i < values.size(); ++i) {
    V const value = levels.value(codes[i]);
    values[i] = Add ? values[i] + value : value;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();
#endif
