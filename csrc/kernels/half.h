// f16 and bf16, whose arithmetic is done in f32.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>

#include "base/dtype.h"

namespace sparsecomm {

// One instruction set's kernels for T, Half or BFloat16. As many elements as `wide` has; they need
// no alignment, as they may lie in a message.
template <class T>
struct HalfKernelTable {
  std::string_view target;

  // wide[i] = element i, but for the payload of a NaN.
  void (*widen)(std::span<float> wide, std::byte const* elements);

  // Element i = wide[i], rounded to nearest even; a NaN has no payload. `elements` may start at or
  // before `wide`; nothing else overlaps here.
  void (*narrow)(std::byte* elements, std::span<const float> wide);

  // wide[i] = wide[i] + element i, and so on. A NaN wins over numbers.
  using Combine = void (*)(std::span<float> wide, std::byte const* elements);
  Combine sum, product, min, max;
};

// The fastest table this machine can run, and all that it can run (scalar first).
template <class T>
HalfKernelTable<T> const& half_kernels();
template <class T>
std::span<HalfKernelTable<T> const> half_kernel_tables();

// What the scalar and the SIMD kernels share: an element, and the combinations of two numbers.
template <class T>
T load_element(std::byte const* elements, std::size_t i) {
  T element;
  std::memcpy(&element, elements + i * sizeof(T), sizeof(T));
  return element;
}

struct WideSum {
  static float of(float a, float b) { return a + b; }
};
struct WideProduct {
  static float of(float a, float b) { return a * b; }
};
struct WideMin {
  static float of(float a, float b) { return a != a || a < b ? a : b; }
};
struct WideMax {
  static float of(float a, float b) { return a != a || a > b ? a : b; }
};

// From element `begin` on.
template <class T>
void widen_range(std::span<float> wide, std::byte const* elements, std::size_t begin) {
  for (std::size_t i = begin; i < wide.size(); ++i) wide[i] = float(load_element<T>(elements, i));
}

template <class T>
void narrow_range(std::byte* elements, std::span<const float> wide, std::size_t begin) {
  for (std::size_t i = begin; i < wide.size(); ++i) {
    T const element(wide[i]);
    std::memcpy(elements + i * sizeof(T), &element, sizeof(T));
  }
}

template <class T, class Combination>
void combine_range(std::span<float> wide, std::byte const* elements, std::size_t begin) {
  for (std::size_t i = begin; i < wide.size(); ++i) {
    wide[i] = Combination::of(wide[i], float(load_element<T>(elements, i)));
  }
}

}  // namespace sparsecomm
