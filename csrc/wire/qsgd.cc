#include "wire/qsgd.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/never_destroyed.h"
#include "wire/carried.h"
#include "wire/philox.h"
#include "wire/simd.h"

namespace sparsecomm {
namespace {

// ---- the scalar oracle

using Codes = std::array<std::uint8_t, largest_qsgd_bucket>;

void pack(Codes const& codes, std::size_t count, int bits, std::byte* out) {
  std::size_t const per_byte = 8 / static_cast<std::size_t>(bits);
  for (std::size_t i = 0; i < count; i += per_byte) {
    unsigned byte = 0;
    for (std::size_t j = 0; j < per_byte && i + j < count; ++j) {
      byte |= unsigned{codes[i + j]} << j * static_cast<unsigned>(bits);
    }
    *out++ = static_cast<std::byte>(byte);
  }
}

std::uint8_t code_at(std::byte const* codes, std::size_t i, int bits) {
  std::size_t const bit = i * static_cast<std::size_t>(bits);
  return static_cast<std::uint8_t>(static_cast<unsigned>(codes[bit / 8]) >> bit % 8 &
                                   ((1u << bits) - 1));
}

// Uniform in [0, 1).
template <class V>
V uniform(QsgdDraws const& draws, std::size_t i) {
  constexpr int unused = sizeof(V) == 4 ? 8 : 1;  // beyond the mantissa, or beyond an int32
  constexpr V unit = V{1} / V(1ull << (32 - unused));
  auto const block = static_cast<std::uint32_t>(i % draws.count);
  RoundingKey const& key = draws.key;
  auto const words = philox4x32(
      {draws.first + block, key.stream, static_cast<std::uint32_t>(key.operation),
       static_cast<std::uint32_t>(key.operation >> 32)},
      {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)});
  return static_cast<V>(words[i / draws.count] >> unused) * unit;
}

template <class V>
V rounded(QsgdLevels<V> const& levels, V value, V random) {
  V const position = levels.position(value);
  int const below = static_cast<int>(position);
  int const level = below + (random < position - static_cast<V>(below));
  // The value of a level may lie beside its position by a rounding error.
  V const nearest = levels.value(static_cast<int>(position + V{0.5}), value);
  return nearest == value ? nearest : levels.value(level, value);
}

template <class V>
std::uint8_t code_of(QsgdLevels<V> const& levels, V rounded) {
  int const level = levels.nearest(rounded);
  return static_cast<std::uint8_t>(levels.top + (rounded < 0 ? -level : level));
}

template <class V>
void round(QsgdLevels<V> const& levels, QsgdDraws const& draws, std::span<V> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = rounded(levels, values[i], uniform<V>(draws, i));
  }
}

template <class V>
bool encode(QsgdLevels<V> const& levels, std::span<const V> values, std::byte* out) {
  using Bits = magnitude_bits_t<V>;
  Codes codes;
  bool exact = true;
  for (std::size_t i = 0; i < values.size(); ++i) {
    codes[i] = code_of(levels, values[i]);
    V const carried = levels.value(codes[i]);
    exact &= std::bit_cast<Bits>(carried) == std::bit_cast<Bits>(values[i]);
  }
  pack(codes, values.size(), levels.bits, out);
  return exact;
}

template <class V>
void quantize(QsgdLevels<V> const& levels, QsgdDraws const& draws, std::span<const V> values,
              std::byte* out) {
  Codes codes;
  for (std::size_t i = 0; i < values.size(); ++i) {
    codes[i] = code_of(levels, rounded(levels, values[i], uniform<V>(draws, i)));
  }
  pack(codes, values.size(), levels.bits, out);
}

template <class V>
void decode(QsgdLevels<V> const& levels, std::byte const* codes, std::span<V> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = levels.value(code_at(codes, i, levels.bits));
  }
}

template <class V>
void add(QsgdLevels<V> const& levels, std::byte const* codes, std::span<V> dense) {
  for (std::size_t i = 0; i < dense.size(); ++i) {
    dense[i] += levels.value(code_at(codes, i, levels.bits));
  }
}

template <class V>
constexpr QsgdKernels<V> scalar_kernels{"scalar",    largest_bits<V>, round<V>, encode<V>,
                                        quantize<V>, decode<V>,       add<V>};

template <class V>
std::vector<QsgdKernels<V>> make_tables() {
  SimdCodecs const all = simd_codecs();
  auto const& simd = [&]() -> auto const& {
    if constexpr (sizeof(V) == sizeof(float)) {
      return all.qsgd_f32;
    } else {
      return all.qsgd_f64;
    }
  }();
  std::vector<QsgdKernels<V>> tables{scalar_kernels<V>};
  tables.insert(tables.end(), simd.rbegin(), simd.rend());
  return tables;
}

// ---- bucket for bucket

// 64 buckets: of 2 bits, still in the first cache when they are packed.
constexpr std::size_t part_buckets = 64;

// One bucket's share of values and bytes.
template <class V>
struct Bucket {
  Bucket(QsgdFormat format, std::size_t number, std::size_t values)
      : first(number * format.bucket),
        size(std::min(format.bucket, values - first)),
        offset(number * (sizeof(V) + format.code_bytes(format.bucket))) {}

  std::size_t first;
  std::size_t size;
  std::size_t offset;
};

// Calls f(number, bucket) for each, on all threads.
template <class V, class F>
void for_each_bucket(QsgdFormat format, std::size_t values, Executor const& executor, F&& f) {
  std::size_t const buckets = part_count(values, format.bucket);
  for_each_part(executor, part_count(buckets, part_buckets), [&](std::size_t part, std::size_t) {
    std::size_t const end = std::min(buckets, (part + 1) * part_buckets);
    for (std::size_t i = part * part_buckets; i < end; ++i) f(i, Bucket<V>(format, i, values));
  });
}

template <class V>
V scale_at(std::byte const* bytes) {
  V scale;
  std::memcpy(&scale, bytes, sizeof(scale));
  return scale;
}

// Only the code of all ones is above 2s.
bool some_code_is_too_large(std::span<const std::byte> codes, int bits) {
  std::uint64_t const lowest = bits == 2   ? 0x5555555555555555u
                               : bits == 4 ? 0x1111111111111111u
                                           : 0x0101010101010101u;
  auto const all_ones = [&](std::uint64_t word) {
    for (int by = 1; by < bits; by *= 2) word &= word >> by;
    return word & lowest;
  };
  std::uint64_t found = 0;
  std::size_t i = 0;
  for (; i + sizeof(found) <= codes.size(); i += sizeof(found)) {
    std::uint64_t word;
    std::memcpy(&word, codes.data() + i, sizeof(word));
    found |= all_ones(word);
  }
  for (; i < codes.size(); ++i) found |= all_ones(static_cast<std::uint64_t>(codes[i]));
  return found != 0;
}

template <class V>
void require_valid(QsgdFormat format, std::byte const* bytes, std::size_t count) {
  V const scale = scale_at<V>(bytes);
  require<MalformedFrame>(std::bit_cast<magnitude_bits_t<V>>(scale) <= largest_finite_bits<V>,
                          "values: scale is ", scale, ", must be finite and not negative");
  std::span const codes(bytes + sizeof(V), format.code_bytes(count));
  std::size_t const used = count * static_cast<std::size_t>(format.bits) % 8;
  require<MalformedFrame>(used == 0 || static_cast<unsigned>(codes.back()) >> used == 0,
                          "values: padding of levels is not 0");
  require<MalformedFrame>(!some_code_is_too_large(codes, format.bits),
                          "values: code of a level is ", 2 * format.top() + 1, ", must be at most ",
                          2 * format.top());
}

// Looks at all codes before it changes the first value.
template <class V>
void for_each_code_bucket(decltype(QsgdKernels<V>::decode) apply, QsgdFormat format,
                          std::span<const std::byte> codes, std::span<V> values,
                          Executor const& executor) {
  for_each_bucket<V>(format, values.size(), inline_executor(), [&](std::size_t, auto bucket) {
    require_valid<V>(format, codes.data() + bucket.offset, bucket.size);
  });
  for_each_bucket<V>(format, values.size(), executor, [&](std::size_t, auto bucket) {
    std::byte const* const from = codes.data() + bucket.offset;
    apply({scale_at<V>(from), format}, from + sizeof(V), values.subspan(bucket.first, bucket.size));
  });
}

}  // namespace

template <class V>
std::span<QsgdKernels<V> const> qsgd_kernel_tables() {
  static auto const* const tables = never_destroyed(make_tables<V>());
  return *tables;
}

template <class V>
QsgdKernels<V> const& qsgd_kernels() {
  return qsgd_kernel_tables<V>().back();
}

template <class V>
void qsgd_round(QsgdKernels<V> const& kernels, QsgdFormat format, std::span<V> values,
                RoundingKey const& key) {
  if (kernels.largest(values) > largest_finite_bits<V>) refuse_not_finite<V>(values);
  for_each_bucket<V>(
      format, values.size(), inline_executor(), [&](std::size_t number, auto bucket) {
        auto const part = values.subspan(bucket.first, bucket.size);
        QsgdLevels<V> const levels(from_magnitude_bits<V>(kernels.largest(part)), format);
        kernels.round(levels, {key, format, number}, part);
      });
}

template <class V>
void qsgd_encode(QsgdKernels<V> const& kernels, QsgdFormat format, std::span<const V> values,
                 std::span<std::byte> codes) {
  for_each_bucket<V>(format, values.size(), inline_executor(), [&](std::size_t, auto bucket) {
    auto const part = values.subspan(bucket.first, bucket.size);
    auto const largest = kernels.largest(part);
    QsgdLevels<V> const levels(from_magnitude_bits<V>(largest), format);
    std::byte* const to = codes.data() + bucket.offset;
    std::memcpy(to, &levels.scale, sizeof(V));
    if (largest > largest_finite_bits<V> || !kernels.encode(levels, part, to + sizeof(V))) {
      refuse_unrounded(part, [&](V v) { return levels.value(levels.nearest(v), v); });
    }
  });
}

template <class V>
void qsgd_quantize(QsgdKernels<V> const& kernels, QsgdFormat format, std::span<const V> values,
                   RoundingKey const& key, std::span<std::byte> codes, Executor const& executor) {
  std::atomic<bool> finite = true;
  for_each_bucket<V>(format, values.size(), executor, [&](std::size_t number, auto bucket) {
    auto const part = values.subspan(bucket.first, bucket.size);
    auto const largest = kernels.largest(part);
    if (largest > largest_finite_bits<V>) {
      finite.store(false, std::memory_order_relaxed);
      return;
    }
    QsgdLevels<V> const levels(from_magnitude_bits<V>(largest), format);
    std::byte* const to = codes.data() + bucket.offset;
    std::memcpy(to, &levels.scale, sizeof(V));
    kernels.quantize(levels, {key, format, number}, part, to + sizeof(V));
  });
  if (!finite) refuse_not_finite(values);
}

template <class V>
void qsgd_decode(QsgdKernels<V> const& kernels, QsgdFormat format, std::span<const std::byte> codes,
                 std::span<V> values, Executor const& executor) {
  for_each_code_bucket(kernels.decode, format, codes, values, executor);
}

template <class V>
void qsgd_add(QsgdKernels<V> const& kernels, QsgdFormat format, std::span<const std::byte> codes,
              std::span<V> dense, Executor const& executor) {
  for_each_code_bucket(kernels.add, format, codes, dense, executor);
}

#define SPARSECOMM_QSGD(V)                                                                       \
  template std::span<QsgdKernels<V> const> qsgd_kernel_tables();                                 \
  template QsgdKernels<V> const& qsgd_kernels();                                                 \
  template void qsgd_round(QsgdKernels<V> const&, QsgdFormat, std::span<V>, RoundingKey const&); \
  template void qsgd_encode(QsgdKernels<V> const&, QsgdFormat, std::span<const V>,               \
                            std::span<std::byte>);                                               \
  template void qsgd_quantize(QsgdKernels<V> const&, QsgdFormat, std::span<const V>,             \
                              RoundingKey const&, std::span<std::byte>, Executor const&);        \
  template void qsgd_decode(QsgdKernels<V> const&, QsgdFormat, std::span<const std::byte>,       \
                            std::span<V>, Executor const&);                                      \
  template void qsgd_add(QsgdKernels<V> const&, QsgdFormat, std::span<const std::byte>,          \
                         std::span<V>, Executor const&);
SPARSECOMM_QSGD(float)
SPARSECOMM_QSGD(double)
#undef SPARSECOMM_QSGD

}  // namespace sparsecomm
