#include "ina/element_type.h"

#include <cstring>
#include <type_traits>

namespace sparsecomm {
namespace {

// The type of a single combination: integers below 32 bits are combined in 32, where nothing
// overflows, and cut afterwards, which wraps around.
template <class Sum>
using Wide = std::conditional_t<std::is_integral_v<Sum> && (sizeof(Sum) < 4), std::int32_t, Sum>;

template <class T>
constexpr std::size_t in_line = line_bytes / sizeof(T);

// partial[i] = f(partial[i], element i of the block), a line at a time. No block: one of zeros.
template <class T, class Function>
void update_lines(std::byte* partial, std::byte const* block, std::size_t bytes, Function f) {
  using Sum = accumulate_t<T>;
  std::array<T, in_line<T>> elements{};
  std::array<Sum, in_line<T>> sums;
  for (std::size_t at = 0; at < bytes; at += line_bytes, partial += sizeof(sums)) {
    if (block != nullptr) std::memcpy(elements.data(), block + at, line_bytes);
    std::memcpy(sums.data(), partial, sizeof(sums));
    for (std::size_t i = 0; i < in_line<T>; ++i) {
      auto const element = static_cast<Sum>(elements[i]);
      sums[i] = static_cast<Sum>(f(Wide<Sum>{sums[i]}, Wide<Sum>{element}));
    }
    std::memcpy(partial, sums.data(), sizeof(sums));
  }
}

template <class T, Reduction R>
void combine(std::byte* partial, std::byte const* block, std::size_t bytes) {
  update_lines<T>(partial, block, bytes, Combine<R, Wide<accumulate_t<T>>>{});
}

template <class T, Reduction R>
void combine_zero(std::byte* partial, std::size_t bytes) {
  update_lines<T>(partial, nullptr, bytes, Combine<R, Wide<accumulate_t<T>>>{});
}

template <class T>
void widen(std::byte* partial, std::byte const* block, std::size_t bytes) {
  using Sum = accumulate_t<T>;
  if constexpr (std::is_same_v<T, Sum>) {
    std::memcpy(partial, block, bytes);
  } else {
    std::array<T, in_line<T>> elements;
    std::array<Sum, in_line<T>> sums;
    for (std::size_t at = 0; at < bytes; at += line_bytes, partial += sizeof(sums)) {
      std::memcpy(elements.data(), block + at, line_bytes);
      for (std::size_t i = 0; i < in_line<T>; ++i) sums[i] = static_cast<Sum>(elements[i]);
      std::memcpy(partial, sums.data(), sizeof(sums));
    }
  }
}

template <class T>
void round(std::byte* block, std::byte const* partial, std::size_t bytes) {
  using Sum = accumulate_t<T>;
  if constexpr (std::is_same_v<T, Sum>) {
    if (block != partial) std::memmove(block, partial, bytes);
  } else {
    std::array<T, in_line<T>> elements;
    std::array<Sum, in_line<T>> sums;
    for (std::size_t at = 0; at < bytes; at += line_bytes, partial += sizeof(sums)) {
      std::memcpy(sums.data(), partial, sizeof(sums));
      for (std::size_t i = 0; i < in_line<T>; ++i) elements[i] = static_cast<T>(sums[i]);
      std::memcpy(block + at, elements.data(), line_bytes);
    }
  }
}

template <class T, Reduction R>
constexpr BlockReduction block_reduction() {
  return {combine<T, R>, combine_zero<T, R>};
}

template <class T>
constexpr ElementTypeEntry line(ElementType id, std::string_view name) {
  return {id,
          name,
          sizeof(T),
          sizeof(accumulate_t<T>),
          widen<T>,
          round<T>,
          {block_reduction<T, Reduction::sum>(), block_reduction<T, Reduction::product>(),
           block_reduction<T, Reduction::min>(), block_reduction<T, Reduction::max>()}};
}

constexpr ElementTypeEntry table[] = {
    line<float>(ElementType::f32, "f32"),        line<double>(ElementType::f64, "f64"),
    line<Half>(ElementType::f16, "f16"),         line<BFloat16>(ElementType::bf16, "bf16"),
    line<std::int32_t>(ElementType::i32, "i32"), line<std::int64_t>(ElementType::i64, "i64"),
    line<std::int8_t>(ElementType::i8, "i8"),    line<std::int16_t>(ElementType::i16, "i16"),
    line<std::uint8_t>(ElementType::u8, "u8"),
};

}  // namespace

std::span<ElementTypeEntry const> element_types() { return table; }

}  // namespace sparsecomm
