#include "ina/element_type.h"

#include <cstring>
#include <span>
#include <type_traits>

#include "kernels/half.h"

namespace sparsecomm {
namespace {

// The type of a single combination: integers below 32 bits are combined in 32, where nothing
// overflows, and cut afterwards, which wraps around.
template <class Sum>
using Wide = std::conditional_t<std::is_integral_v<Sum> && (sizeof(Sum) < 4), std::int32_t, Sum>;

// Whole lines, so that vectors leave no elements over.
template <class V>
std::size_t element_count(std::size_t bytes) {
  return bytes / line_bytes * (line_bytes / sizeof(V));
}

// sums[i] = f(sums[i], element(i)).
template <class Sum, class Element, class Function>
void update(std::byte* sums, std::size_t count, Element element, Function f) {
  for (std::size_t i = 0; i < count; ++i) {
    auto const sum =
        static_cast<Sum>(f(Wide<Sum>{load_element<Sum>(sums, i)}, Wide<Sum>{element(i)}));
    std::memcpy(sums + i * sizeof(Sum), &sum, sizeof(Sum));
  }
}

// Partial results of f16 and bf16, which lie at an address that is aligned for them.
template <class T>
std::span<float> wide_sums(std::byte* partial, std::size_t bytes) {
  return {reinterpret_cast<float*>(partial), bytes / sizeof(T)};
}

template <Reduction R, class T>
auto combine_of(HalfKernelTable<T> const& kernels) {
  if constexpr (R == Reduction::sum) return kernels.sum;
  if constexpr (R == Reduction::product) return kernels.product;
  if constexpr (R == Reduction::min) return kernels.min;
  if constexpr (R == Reduction::max) return kernels.max;
}

template <class T, Reduction R>
void combine(std::byte* partial, std::byte const* block, std::size_t bytes) {
  if constexpr (std::is_same_v<T, accumulate_t<T>>) {
    update<T>(
        partial, element_count<T>(bytes), [&](std::size_t i) { return load_element<T>(block, i); },
        Combine<R, Wide<T>>{});
  } else {
    combine_of<R>(half_kernels<T>())(wide_sums<T>(partial, bytes), block);
  }
}

template <class T, Reduction R>
void combine_zero(std::byte* partial, std::size_t bytes) {
  using Sum = accumulate_t<T>;
  update<Sum>(
      partial, element_count<T>(bytes), [](std::size_t) { return Sum{0}; },
      Combine<R, Wide<Sum>>{});
}

template <class T>
void widen(std::byte* partial, std::byte const* block, std::size_t bytes) {
  if constexpr (std::is_same_v<T, accumulate_t<T>>) {
    std::memcpy(partial, block, bytes);
  } else {
    half_kernels<T>().widen(wide_sums<T>(partial, bytes), block);
  }
}

template <class T>
void round(std::byte* block, std::byte const* partial, std::size_t bytes) {
  if constexpr (std::is_same_v<T, accumulate_t<T>>) {
    if (block != partial) std::memmove(block, partial, bytes);
  } else {
    half_kernels<T>().narrow(block, {reinterpret_cast<float const*>(partial), bytes / sizeof(T)});
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
