// QSGD: one block per bucket. The arithmetic, operation for operation, is that of wire/qsgd.h,
// where the format is described.
#include <bit>

#include "kernels/cuda/device.h"
#include "kernels/cuda/tables.h"
#include "kernels/magnitude.h"
#include "wire/philox.h"

namespace sparsecomm::cuda {
namespace {

constexpr unsigned largest_bucket = 1024;

template <class V>
__device__ V with_sign(V magnitude, V sign) {
  using Bits = magnitude_bits_t<V>;
  return std::bit_cast<V>(static_cast<Bits>(magnitude_bits(magnitude) |
                                            (std::bit_cast<Bits>(sign) & ~magnitude_mask<V>)));
}

// The levels of a bucket: top level `top`, largest magnitude `scale`.
template <class V>
struct Levels {
  V scale, divisor, shift;
  int top;

  __device__ Levels(V largest, int top_level)
      : scale(largest),
        divisor(largest == 0 ? V{1} : largest),
        shift(largest > 1 ? V{128} : V{1}),
        top(top_level) {}

  __device__ V position(V value) const {
    return from_magnitude_bits<V>(magnitude_bits(value)) / divisor * static_cast<V>(top);
  }
  __device__ V value(int magnitude, V sign) const {
    V const inner = scale / shift * static_cast<V>(magnitude) / static_cast<V>(top) * shift;
    return with_sign(magnitude == top ? scale : inner, sign) + V{0};
  }
};

__device__ inline int top_level(int bits) { return (1 << (bits - 1)) - 1; }

template <class V>
struct QuantizeShared {
  magnitude_bits_t<V> largest[block_warps];
  std::uint8_t codes[largest_bucket];
};

template <class V>
__device__ std::byte* bucket_bytes(std::byte* out, std::size_t bucket, unsigned entries, int bits) {
  return out + bucket * (sizeof(V) + entries * static_cast<unsigned>(bits) / 8);
}

// Thread t of the block draws for the entries t, t + bucket / 4, t + bucket / 2, ...
template <class V>
__global__ void __launch_bounds__(block_threads)
    quantize_bucket(V const* values, std::size_t size, int bits, unsigned bucket, RoundingKey key,
                    std::byte* out, V* rounded, std::uint32_t* not_finite) {
  using Bits = magnitude_bits_t<V>;
  SPARSECOMM_SHARED(QuantizeShared<V>, shared);
  std::size_t const number = blockIdx.x;
  std::size_t const first = number * bucket;
  std::size_t const left = size - first;
  unsigned const entries = left < bucket ? static_cast<unsigned>(left) : bucket;
  unsigned const draws = bucket / 4;
  unsigned const thread = threadIdx.x;

  V mine[4] = {};
  Bits largest = 0;
  for (unsigned j = 0; j < 4; ++j) {
    unsigned const i = thread + j * draws;
    if (thread < draws && i < entries) mine[j] = values[first + i];
    Bits const magnitude = magnitude_bits(mine[j]);
    largest = magnitude > largest ? magnitude : largest;
  }
  largest = warp_max(largest);
  if (thread % warp_lanes == 0) shared.largest[thread / warp_lanes] = largest;
  __syncthreads();
  for (unsigned w = 0; w < block_warps; ++w) {
    largest = shared.largest[w] > largest ? shared.largest[w] : largest;
  }
  if (largest > largest_finite_bits<V>) {
    if (thread == 0) *not_finite = 1;
    return;
  }

  Levels<V> const levels(from_magnitude_bits<V>(largest), top_level(bits));
  constexpr int unused = sizeof(V) == 4 ? 8 : 1;  // beyond the mantissa, or beyond an int32
  constexpr V unit = V{1} / static_cast<V>(1ull << (32 - unused));
  if (thread < draws) {
    auto const words = philox4x32(
        {static_cast<std::uint32_t>(number) * draws + thread, key.stream,
         static_cast<std::uint32_t>(key.operation),
         static_cast<std::uint32_t>(key.operation >> 32)},
        {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)});
    for (unsigned j = 0; j < 4; ++j) {
      unsigned const i = thread + j * draws;
      V const uniform = static_cast<V>(static_cast<std::int32_t>(words[j] >> unused)) * unit;
      V const position = levels.position(mine[j]);
      int const below = static_cast<int>(position);
      int const level = below + (uniform < position - static_cast<V>(below) ? 1 : 0);
      V const random = levels.value(level, mine[j]);
      V const nearest = levels.value(static_cast<int>(position + V{0.5}), mine[j]);
      V const value = nearest == mine[j] ? nearest : random;
      int const carried = static_cast<int>(levels.position(value) + V{0.5});
      int const code = top_level(bits) + (value < 0 ? -carried : carried);
      shared.codes[i] = i < entries ? static_cast<std::uint8_t>(code) : std::uint8_t{0};
      if (rounded != nullptr && i < entries) rounded[first + i] = value;
    }
  }
  __syncthreads();
  std::byte* const to = bucket_bytes<V>(out, number, bucket, bits);
  if (thread < sizeof(V)) {
    to[thread] = static_cast<std::byte>(std::uint64_t{largest} >> 8 * thread & 0xffu);
  }
  unsigned const per_byte = 8u / static_cast<unsigned>(bits);
  for (unsigned b = thread; b < divided_up(entries, per_byte); b += block_threads) {
    unsigned byte = 0;
    for (unsigned j = 0; j < per_byte; ++j) {
      byte |= unsigned{shared.codes[b * per_byte + j]} << j * static_cast<unsigned>(bits);
    }
    to[sizeof(V) + b] = static_cast<std::byte>(byte);
  }
}

template <class V>
__global__ void __launch_bounds__(block_threads)
    dequantize_bucket(std::byte const* codes, std::size_t size, int bits, unsigned bucket,
                      V* dense) {
  std::size_t const number = blockIdx.x;
  std::size_t const first = number * bucket;
  std::byte const* const from =
      codes + number * (sizeof(V) + bucket * static_cast<unsigned>(bits) / 8);
  std::uint64_t scale = 0;
  for (unsigned b = 0; b < sizeof(V); ++b) scale |= static_cast<std::uint64_t>(from[b]) << 8 * b;
  int const top = top_level(bits);
  Levels<V> const levels(from_magnitude_bits<V>(static_cast<magnitude_bits_t<V>>(scale)), top);
  unsigned const per_byte = 8u / static_cast<unsigned>(bits);
  for (unsigned i = threadIdx.x; i < bucket && first + i < size; i += block_threads) {
    auto const byte = static_cast<unsigned>(from[sizeof(V) + i / per_byte]);
    int const code =
        static_cast<int>(byte >> i % per_byte * static_cast<unsigned>(bits) & ((1u << bits) - 1));
    int const level = code - top;
    dense[first + i] += levels.value(level < 0 ? -level : level, static_cast<V>(level));
  }
}

template <class V>
__global__ void __launch_bounds__(block_threads)
    check_bucket(std::byte const* codes, std::size_t size, int bits, unsigned bucket,
                 std::uint32_t* invalid) {
  std::size_t const number = blockIdx.x;
  std::size_t const left = size - number * bucket;
  auto const entries = left < bucket ? static_cast<unsigned>(left) : bucket;
  std::byte const* const from =
      codes + number * (sizeof(V) + bucket * static_cast<unsigned>(bits) / 8);
  unsigned const per_byte = 8u / static_cast<unsigned>(bits);
  for (unsigned i = threadIdx.x; i < divided_up(entries, per_byte) * per_byte; i += block_threads) {
    auto const byte = static_cast<unsigned>(from[sizeof(V) + i / per_byte]);
    unsigned const code = byte >> i % per_byte * static_cast<unsigned>(bits) & ((1u << bits) - 1);
    if (code > (i < entries ? 2u * static_cast<unsigned>(top_level(bits)) : 0u)) *invalid = 1;
  }
  if (threadIdx.x > 0) return;
  std::uint64_t scale = 0;
  for (unsigned b = 0; b < sizeof(V); ++b) scale |= static_cast<std::uint64_t>(from[b]) << 8 * b;
  if (scale > largest_finite_bits<V>) *invalid = 1;
}

void check(char const* call, int bits, std::size_t bucket) {
  require(bits == 2 || bits == 4 || bits == 8, call, ": codes of ", bits,
          " bits: there are 2, 4 and 8");
  require(bucket == 512 || bucket == largest_bucket, call, ": buckets of ", bucket,
          " values: there are 512 and 1024");
}

template <class V>
void qsgd_quantize(V const* values, std::size_t size, int bits, std::size_t bucket,
                   RoundingKey const& key, std::byte* out, V* rounded, std::uint32_t* not_finite,
                   Stream stream) {
  check("qsgd_quantize", bits, bucket);
  if (size == 0) return;
  launch("qsgd_quantize", quantize_bucket<V>, divided_up(size, bucket), block_threads, stream,
         values, size, bits, bucket, key, out, rounded, not_finite);
}

template <class V>
void qsgd_check(std::byte const* codes, std::size_t size, int bits, std::size_t bucket,
                std::uint32_t* invalid, Stream stream) {
  check("qsgd_check", bits, bucket);
  if (size == 0) return;
  launch("qsgd_check", check_bucket<V>, divided_up(size, bucket), block_threads, stream, codes,
         size, bits, bucket, invalid);
}

template <class V>
void qsgd_dequantize_add(std::byte const* codes, std::size_t size, int bits, std::size_t bucket,
                         V* dense, Stream stream) {
  check("qsgd_dequantize_add", bits, bucket);
  if (size == 0) return;
  launch("qsgd_dequantize_add", dequantize_bucket<V>, divided_up(size, bucket), block_threads,
         stream, codes, size, bits, bucket, dense);
}

}  // namespace

template <class V>
void add_qsgd_kernels(ValueKernels<V>& table) {
  table.qsgd_quantize = qsgd_quantize<V>;
  table.qsgd_check = qsgd_check<V>;
  table.qsgd_dequantize_add = qsgd_dequantize_add<V>;
}

template void add_qsgd_kernels(ValueKernels<float>&);
template void add_qsgd_kernels(ValueKernels<double>&);

}  // namespace sparsecomm::cuda
