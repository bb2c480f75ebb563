// The element types of blocks and how blocks of two workers are combined: one line a type.
//
// These are the types that torch reduces. The element types of gradients, base/dtype.h, come first
// and keep their codes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/dtype.h"
#include "sparse/reduction.h"

namespace sparsecomm {

enum class ElementType : std::uint8_t { f32, f64, f16, bf16, i32, i64, i8, i16, u8 };
static_assert(std::uint8_t(ElementType::f32) == std::uint8_t(DType::f32) &&
              std::uint8_t(ElementType::f64) == std::uint8_t(DType::f64) &&
              std::uint8_t(ElementType::f16) == std::uint8_t(DType::f16) &&
              std::uint8_t(ElementType::bf16) == std::uint8_t(DType::bf16) &&
              std::uint8_t(ElementType::i32) == std::uint8_t(DType::i32) &&
              std::uint8_t(ElementType::i64) == std::uint8_t(DType::i64));

// Block sizes are multiples of it, which compilers are told, so that vectors leave no elements
// over.
inline constexpr std::size_t line_bytes = 64;

// `bytes`: of the block as it travels, a multiple of line_bytes. Partial results are as wide as the
// type's sum_bytes says and lie at an address that is aligned for them; travelling blocks need no
// alignment.
struct BlockReduction {
  void (*combine)(std::byte* partial, std::byte const* block, std::size_t bytes);
  // Combines with a block of zeros.
  void (*combine_zero)(std::byte* partial, std::size_t bytes);
};

struct ElementTypeEntry {
  ElementType id;
  std::string_view name;
  std::size_t bytes;      // of an element
  std::size_t sum_bytes;  // of an element of a partial result: f16 and bf16 are summed in f32
  // The partial result of one block.
  void (*widen)(std::byte* partial, std::byte const* block, std::size_t bytes);
  // The block that travels, rounded once. `block` may start at or before `partial`.
  void (*round)(std::byte* block, std::byte const* partial, std::size_t bytes);
  std::array<BlockReduction, std::size(reduction_table)> reductions;  // [Reduction]

  BlockReduction const& of(Reduction reduction) const {
    return reductions[static_cast<std::size_t>(reduction)];
  }
};

// In the order of their codes.
std::span<ElementTypeEntry const> element_types();
inline ElementTypeEntry const& entry_of(ElementType type) {
  return element_types()[static_cast<std::size_t>(type)];
}
inline std::string_view name(ElementType type) { return entry_of(type).name; }

}  // namespace sparsecomm
