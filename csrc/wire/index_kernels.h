// The loops of the index codecs: scalar, and in SIMD (Highway, dispatched at run time) with the
// same results; one table holds both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "wire/delta.h"

namespace sparsecomm {

// What ones() found: how many, and how many bytes of the input it looked at.
struct Ones {
  std::size_t count = 0;
  std::size_t bytes = 0;
};

struct IndexKernels {
  std::string_view target;

  bool (*strictly_increasing)(std::span<const std::uint32_t> indices);

  // Writes base + the position of each bit that is set, lowest bits first, word by word of 8 bytes
  // (zeros behind the last byte) until there are `enough` or the input ends. `out` has room for
  // ones_slack more than `enough`.
  Ones (*ones)(std::span<const std::byte> in, std::uint32_t base, std::size_t enough,
               std::uint32_t* out);

  // These work on a whole block of delta.h.
  //
  // gap[0] = indices[0] - next, others as there; returns all of them, or-ed.
  std::uint32_t (*gaps)(std::uint32_t const* indices, std::uint32_t next, std::uint32_t* gap);
  // The sum of min(gap >> parameter, max_unary).
  std::uint32_t (*high_bits)(std::uint32_t const* gap, std::uint32_t parameter);
  // Index i becomes next + the low parts up to i + ((ones[i] - i) << parameter) + i, modulo 2^32.
  // Returns the sum of the low parts, modulo 2^32. Reads 16 bytes from the start of any low part.
  std::uint32_t (*join)(std::byte const* lows, std::uint32_t parameter, std::uint32_t next,
                        std::uint32_t const* ones, std::uint32_t* indices);
};

// 64 bits of the last word, and a vector.
inline constexpr std::size_t ones_slack = 64 + 16;
// The largest parameter of join().
inline constexpr std::uint32_t max_join_parameter = 24;

// Scalar first, the fastest last.
std::span<IndexKernels const> index_kernel_tables();
IndexKernels const& index_kernels();  // the fastest that this machine supports

}  // namespace sparsecomm
