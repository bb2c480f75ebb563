// Which values a lossy codec carries, and the errors that name those it does not.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

#include "base/error.h"
#include "base/magnitude.h"

namespace sparsecomm {

// The bits of the largest magnitude: above largest_finite_bits where not all are finite.
template <class V>
magnitude_bits_t<V> largest_bits(std::span<const V> values) {
  magnitude_bits_t<V> largest = 0;
  for (V const value : values) largest = std::max(largest, magnitude_bits(value));
  return largest;
}

template <class V>
[[noreturn]] void refuse_not_finite(std::span<const V> values) {
  auto const at =
      std::find_if_not(values.begin(), values.end(), [](V v) { return std::isfinite(v); });
  throw InvalidArgument(concat("round_values: value ", at - values.begin(), " of ", values.size(),
                               " is ", *at, ", a lossy codec carries finite values only; use raw"));
}

// Names the first value that is not what would arrive of it.
template <class V, class F>
[[noreturn]] void refuse_unrounded(std::span<const V> values, F&& arriving) {
  using Bits = magnitude_bits_t<V>;
  auto const at = std::ranges::find_if(values, [&](V v) {
    return !std::isfinite(v) || std::bit_cast<Bits>(arriving(v)) != std::bit_cast<Bits>(v);
  });
  throw InvalidArgument(concat("encode: value ", at - values.begin(), " of its bucket is ", *at,
                               ", which the codec cannot carry; call round_values() on exactly "
                               "the values of this frame first"));
}

}  // namespace sparsecomm
