// Magnitudes as integers. Without its sign, the bit pattern of an IEEE number orders as the
// magnitude does, with Inf above every finite value and NaN above Inf: a comparison that no NaN can
// fall through.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace sparsecomm {

template <class V>
using magnitude_bits_t =
    std::conditional_t<std::is_same_v<V, double>, std::uint64_t, std::uint32_t>;

template <class V>
inline constexpr magnitude_bits_t<V> magnitude_mask = static_cast<magnitude_bits_t<V>>(-1) >> 1;

template <class V>
inline constexpr magnitude_bits_t<V> largest_finite_bits =
    std::bit_cast<magnitude_bits_t<V>>(std::numeric_limits<V>::max());

template <class V>
constexpr magnitude_bits_t<V> magnitude_bits(V value) {
  return std::bit_cast<magnitude_bits_t<V>>(value) & magnitude_mask<V>;
}

template <class V>
constexpr V from_magnitude_bits(magnitude_bits_t<V> bits) {
  return std::bit_cast<V>(bits);
}

}  // namespace sparsecomm
