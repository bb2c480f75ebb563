// QSGD (Alistarh et al., NIPS 2017, as in SparCML section 6): a bucket is its scale, the largest
// magnitude in it, and for each value a level l of -s .. s in `bits` bits, stored as the code
// l + s, lowest bits first, zeros after the last; s = 2^(bits-1) - 1. The value of a level is
// scale * (l / s), never -0. A value between two levels becomes either, at random.
//
// Each loop over a bucket has a scalar oracle and a SIMD version (Highway, dispatched at run time)
// with the same bits as a result; one table holds both, and one differential test covers all.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "base/executor.h"
#include "base/magnitude.h"
#include "wire/codecs.h"

namespace sparsecomm {

inline constexpr std::size_t largest_qsgd_bucket = value_bucket;

struct QsgdFormat {
  int bits = 4;                              // 2, 4 or 8
  std::size_t bucket = largest_qsgd_bucket;  // values that share a scale: 512 or 1,024

  constexpr int top() const { return (1 << (bits - 1)) - 1; }
  constexpr std::size_t code_bytes(std::size_t count) const {
    return (count * static_cast<std::size_t>(bits) + 7) / 8;
  }
  constexpr std::size_t bytes(std::size_t count, std::size_t value_size) const {
    return part_count(count, bucket) * value_size + code_bytes(count);
  }
};

// The levels of a bucket, and what their values are.
template <class V>
struct QsgdLevels {
  QsgdLevels(V largest, QsgdFormat format)
      : bits(format.bits),
        top(format.top()),
        scale(largest),
        divisor(largest == 0 ? V{1} : largest),
        shift(largest > 1 ? V{128} : V{1}),
        unit(largest / shift),
        normal(largest >= std::numeric_limits<V>::min() * V{1 << 20}) {}

  // Where the value lies between levels; 0 to s.
  V position(V value) const { return std::abs(value) / divisor * static_cast<V>(top); }
  int nearest(V value) const { return static_cast<int>(position(value) + V{0.5}); }

  // Of a level's magnitude and a value of its sign. The top level is the scale itself, and where s
  // divides the scale all are exact. The shift keeps the product from overflowing.
  V value(int magnitude, V sign) const {
    V const inner = unit * static_cast<V>(magnitude) / static_cast<V>(top) * shift;
    return std::copysign(magnitude == top ? scale : inner, sign) + V{0};
  }
  V value(std::uint8_t code) const {
    int const level = int{code} - top;
    return value(std::abs(level), static_cast<V>(level));
  }

  int bits;
  int top;
  V scale;
  V divisor;
  V shift;
  V unit;  // scale / shift
  // No value but 0 is subnormal. Then rounding errors are small beside a step: nearest(value(l))
  // is l, and position(value(l)) differs from l by less than 2^-13.
  bool normal;
};

// The random numbers of a bucket: value i takes word i / count of the generator's block first +
// i % count.
struct QsgdDraws {
  QsgdDraws(RoundingKey const& rounding_key, QsgdFormat format, std::size_t bucket)
      : key(rounding_key),
        count(static_cast<std::uint32_t>(format.bucket / 4)),
        first(static_cast<std::uint32_t>(bucket) * count) {}

  RoundingKey key;
  std::uint32_t count;
  std::uint32_t first;
};

// One instruction set's loops over a bucket of at most 1,024 finite values, of which `levels` has
// the largest magnitude. V is float or double. Codes take
// format.code_bytes(values.size()) bytes.
template <class V>
struct QsgdKernels {
  std::string_view target;

  // The bits of the largest magnitude; also of values that are not finite.
  magnitude_bits_t<V> (*largest)(std::span<const V> values);

  // Each value becomes that of a level.
  void (*round)(QsgdLevels<V> const& levels, QsgdDraws const& draws, std::span<V> values);
  // Returns false, having written anything, where a value is not that of a level.
  bool (*encode)(QsgdLevels<V> const& levels, std::span<const V> values, std::byte* codes);
  // Both at once.
  void (*quantize)(QsgdLevels<V> const& levels, QsgdDraws const& draws, std::span<const V> values,
                   std::byte* codes);

  // Of codes that are none above 2s.
  void (*decode)(QsgdLevels<V> const& levels, std::byte const* codes, std::span<V> values);
  void (*add)(QsgdLevels<V> const& levels, std::byte const* codes, std::span<V> dense);
};

// Scalar first, the fastest last.
template <class V>
std::span<QsgdKernels<V> const> qsgd_kernel_tables();
template <class V>
QsgdKernels<V> const& qsgd_kernels();  // the fastest that this machine supports

// Of any number of values, bucket for bucket; `codes` are format.bytes(values.size(), sizeof(V))
// long. What is random depends on key and position alone. Source: as above. O(n).
//
// round and quantize throw InvalidArgument for values that are not finite, of which round then
// leaves all as they were; encode, for a value that is not rounded; decode and add throw
// MalformedFrame, having changed nothing.
template <class V>
void qsgd_round(QsgdKernels<V> const& kernels, QsgdFormat format, std::span<V> values,
                RoundingKey const& key);
template <class V>
void qsgd_encode(QsgdKernels<V> const& kernels, QsgdFormat format, std::span<const V> values,
                 std::span<std::byte> codes);
// The bytes of encoding what rounding gives, in one pass: reads N, writes N * bits / 8.
template <class V>
void qsgd_quantize(QsgdKernels<V> const& kernels, QsgdFormat format, std::span<const V> values,
                   RoundingKey const& key, std::span<std::byte> codes, Executor const& executor);
template <class V>
void qsgd_decode(QsgdKernels<V> const& kernels, QsgdFormat format, std::span<const std::byte> codes,
                 std::span<V> values, Executor const& executor);
// dense[i] += value i.
template <class V>
void qsgd_add(QsgdKernels<V> const& kernels, QsgdFormat format, std::span<const std::byte> codes,
              std::span<V> dense, Executor const& executor);

}  // namespace sparsecomm
