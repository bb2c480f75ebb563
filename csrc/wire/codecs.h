// Index and value codecs: spans of numbers <-> bytes. No sockets, no allocation; every byte read is
// validated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "base/dtype.h"
#include "base/error.h"

namespace sparsecomm {

enum class IndexCodec : std::uint8_t { none = 0, raw32 = 1, delta = 2, bitmap = 3 };
enum class ValueCodec : std::uint8_t {
  none = 0,
  raw = 1,
  f16 = 2,
  bf16 = 3,
  qsgd2 = 4,
  qsgd4 = 5,
  qsgd8 = 6,
  qsgd2_512 = 7,
  qsgd4_512 = 8,
  qsgd8_512 = 9,
};

// A codec by name, or the one that takes the fewest bytes (the same numbers as IndexCodec).
enum class IndexCodecChoice : std::uint8_t { smallest, raw32, delta, bitmap };

inline constexpr std::size_t does_not_fit = std::numeric_limits<std::size_t>::max();

struct IndexKernels;  // of index_kernels.h

// One line per index codec; tests, frames and docs iterate the table index_codecs.
struct IndexCodecEntry {
  IndexCodec id;
  std::string_view name;
  std::string_view description;
  // Encodes strictly increasing positions of [first_index, first_index + extent), which encode()
  // does not check (encode_sparse() does), to the front of `out`. Returns their length in bytes, or
  // does_not_fit, having written anything to `out`. The bytes are the same whatever the kernels.
  std::size_t (*encode)(IndexKernels const& kernels, std::span<const std::uint32_t> indices,
                        std::uint32_t first_index, std::uint32_t extent, std::span<std::byte> out);
  // Fills `indices` (its size is the count) from all of `in`; throws MalformedFrame unless the
  // bytes decode to strictly increasing positions of [first_index, first_index + extent) and are
  // used up exactly.
  void (*decode)(IndexKernels const& kernels, std::span<const std::byte> in,
                 std::uint32_t first_index, std::uint32_t extent, std::span<std::uint32_t> indices);
  // The least and the most bytes that `count` > 0 positions of `extent` can take: equal where that
  // does not depend on the positions.
  std::size_t (*min_bytes)(std::size_t count, std::size_t extent);
  std::size_t (*max_bytes)(std::size_t count, std::size_t extent);
  // Bits that an index is expected to take where a share `density` in (0, 1] of all positions, at
  // random, is taken; for many indices.
  double (*expected_bits)(double density);
};

// The most bytes that a frame spends on `count` indices, whatever the choice: where a bitmap would
// take more, the indices go raw.
constexpr std::size_t max_index_bytes(std::size_t count) {
  return 4 * count + 4 * (count / 128 + 1);
}

std::span<const IndexCodecEntry> index_codecs();

// What a stochastic rounding depends on besides the values. The same key gives the same result, on
// any number of threads; spans that are rounded under one seed need keys that differ.
struct RoundingKey {
  std::uint64_t seed = 0;
  std::uint64_t operation = 0;
  std::uint32_t stream = 0;  // tells the spans of one operation apart: by rank, region, phase
};

// V is float or double.
template <class V>
struct ValueFunctions {
  // Rounds in place to what the codec can carry.
  void (*round)(std::span<V> values, RoundingKey const& key);
  // Writes exactly encoded_bytes() bytes; throws InvalidArgument for a value that `round` would
  // change.
  void (*encode)(std::span<const V> values, std::span<std::byte> out);
  // `in` is exactly encoded_bytes() long; throws MalformedFrame.
  void (*decode)(std::span<const std::byte> in, std::span<V> values);
};

// One line per value codec. An element type that is neither f32 nor f64 always travels raw.
struct ValueCodecEntry {
  ValueCodec id;
  std::string_view name;
  std::string_view description;
  bool lossy;
  // Neighbouring values are carried together: rounded values must be encoded in the very span in
  // which they were rounded, neither cut nor joined.
  bool bucketed;
  std::size_t (*encoded_bytes)(std::size_t count, std::size_t value_size);
  ValueFunctions<float> f32;
  ValueFunctions<double> f64;
};

std::span<const ValueCodecEntry> value_codecs();

// The values of the largest bucket of QSGD; a payload is a whole number of bytes, and of buckets,
// for every so many values in any codec.
inline constexpr std::size_t value_bucket = 1024;

template <class V>
ValueFunctions<V> const& functions(ValueCodecEntry const& entry) {
  if constexpr (sizeof(V) == sizeof(float)) {
    return entry.f32;
  } else {
    return entry.f64;
  }
}

constexpr bool carries(ValueCodecEntry const& entry, DType dtype) {
  return entry.id == ValueCodec::raw || dtype == DType::f32 || dtype == DType::f64;
}

// Nullptr where the tables have no such id.
IndexCodecEntry const* find_index_codec(IndexCodec id);
ValueCodecEntry const* find_value_codec(ValueCodec id);

// What users name, "smallest" among it; throw InvalidArgument, listing the names there are.
IndexCodecChoice index_codec_named(std::string_view name);
ValueCodec value_codec_named(std::string_view name);

// Throws InvalidArgument unless the table has `id` and it carries `dtype`.
ValueCodecEntry const& value_codec_for(ValueCodec id, DType dtype);

// Rounds values in place to what `codec` carries: afterwards encoding them is exact, so that the
// receivers will see these very bits. V is float, double, std::int32_t or std::int64_t; integers
// travel raw only. Throws InvalidArgument, and leaves all values as they were, when a lossy codec
// meets a value that is not finite. O(n).
//
// f16 and bf16 round to nearest even; what would become infinite becomes the largest finite value.
// QSGD quantises buckets of 1,024 (qsgd4) or 512 (qsgd4_512) consecutive values, each by the
// largest magnitude in it, to s = 1, 7 or 127 levels of either sign. A value between two levels
// becomes either, so that its expectation is the value itself, with a variance of at most (scale /
// s)^2 / 4; -0 becomes 0. What is rounded already stays as it is.
template <class V>
void round_values(ValueCodec codec, std::span<V> values, RoundingKey const& key);

}  // namespace sparsecomm
