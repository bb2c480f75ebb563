// The range of an element type.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/dtype.h"

namespace sparsecomm {

// The largest finite value of a floating T, as the type that holds its sums.
template <class T>
constexpr accumulate_t<T> largest_finite() {
  if constexpr (std::is_same_v<T, Half>) {
    return 65504.0f;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return std::bit_cast<float>(0x7f7f0000u);
  } else {
    return std::numeric_limits<T>::max();
  }
}

}  // namespace sparsecomm
