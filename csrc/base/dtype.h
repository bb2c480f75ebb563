// Element types. f16 and bf16 are storage only: arithmetic happens in accumulate_t. Gradients are
// of the floating types; i32 and i64 occur in the lossless collectives.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>

#include "base/error.h"

namespace sparsecomm {

enum class DType : std::uint8_t { f32 = 0, f64 = 1, f16 = 2, bf16 = 3, i32 = 4, i64 = 5 };

// IEEE binary16, rounded to nearest even.
struct Half {
  std::uint16_t bits = 0;

  Half() = default;
  explicit Half(float value) : bits(from_float(value)) {}
  explicit operator float() const { return to_float(bits); }
  friend bool operator==(Half a, Half b) { return float(a) == float(b); }

  static float to_float(std::uint16_t bits) {
    std::uint32_t const sign = std::uint32_t{bits & 0x8000u} << 16;
    std::uint32_t const exponent = (bits >> 10) & 0x1fu;
    std::uint32_t const mantissa = bits & 0x3ffu;
    if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) {
      float const magnitude = std::ldexp(static_cast<float>(mantissa), -24);
      return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
    }
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  }

  static std::uint16_t from_float(float value) {
    std::uint32_t const word = std::bit_cast<std::uint32_t>(value);
    std::uint32_t const sign = (word >> 16) & 0x8000u;
    std::uint32_t const magnitude = word & 0x7fffffffu;
    std::uint32_t result = 0;
    if (magnitude > 0x7f800000u) {
      result = 0x7e00u;  // NaN
    } else if (magnitude >= 0x477ff000u) {
      result = 0x7c00u;  // rounds to infinity
    } else if (magnitude < 0x38800000u) {
      // Subnormal: adding 0.5 aligns the mantissa so that the sum's low bits are the rounded
      // result.
      float const aligned = std::bit_cast<float>(magnitude) + 0.5f;
      result = std::bit_cast<std::uint32_t>(aligned) - std::bit_cast<std::uint32_t>(0.5f);
    } else {
      std::uint32_t const odd = (magnitude >> 13) & 1u;
      result = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;
    }
    return static_cast<std::uint16_t>(sign | result);
  }
};

// The upper half of a binary32, rounded to nearest even.
struct BFloat16 {
  std::uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) : bits(from_float(value)) {}
  explicit operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
  friend bool operator==(BFloat16 a, BFloat16 b) { return float(a) == float(b); }

  static std::uint16_t from_float(float value) {
    std::uint32_t const word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;  // NaN
    return static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
};

// The type in which sums, residuals and packed values of T are kept.
template <class T>
using accumulate_t =
    std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float, T>;

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) {
    return DType::f32;
  } else if constexpr (std::is_same_v<T, double>) {
    return DType::f64;
  } else if constexpr (std::is_same_v<T, Half>) {
    return DType::f16;
  } else if constexpr (std::is_same_v<T, std::int32_t>) {
    return DType::i32;
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return DType::i64;
  } else {
    static_assert(std::is_same_v<T, BFloat16>, "not an element type of sparsecomm");
    return DType::bf16;
  }
}

constexpr std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
  }
  return "unknown";
}

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    default:
      return 2;
  }
}

// Calls f.template operator()<T>() with the C++ type of `dtype`, a floating one.
template <class F>
decltype(auto) visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f.template operator()<float>();
    case DType::f64:
      return f.template operator()<double>();
    case DType::f16:
      return f.template operator()<Half>();
    case DType::bf16:
      return f.template operator()<BFloat16>();
    default:
      throw InvalidArgument(concat("dtype ", name(dtype), " is none of f32, f64, f16, bf16"));
  }
}

}  // namespace sparsecomm
