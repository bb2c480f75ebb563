// The delta codec: gaps between sorted indices in blocks of 128 (the last may be shorter), each
// block Golomb-Rice coded with the parameter that suits it, so that clustered indices cost less
// than random ones.
//
// A gap is index - previous - 1, the first one's previous being first_index - 1. A block of n gaps
// is
//   1 byte     parameter b, 0 to 31; bit 7 is set when the block has exceptions
//   exceptions (only then) their number e, e positions in the block, e high parts of 4 bytes
//   low parts  the low b bits of every gap, packed: ceil(n b / 8) bytes
//   high parts gap >> b in unary, zeros ended by a one, n ones in all, padded with zeros to a byte
// An exception is a gap whose high part exceeds max_unary; it stands as 0 among the unary ones. It
// bounds what one wide gap between clusters costs. Random indices take 0.1 to 0.2 bits more than
// their entropy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sparsecomm {

struct IndexKernels;

namespace delta {

inline constexpr std::size_t block_size = 128;
// The bits that an exception takes: its position and its high part. A unary code longer than that
// is one.
inline constexpr std::uint32_t max_unary = 40;

std::size_t encode(IndexKernels const& kernels, std::span<const std::uint32_t> indices,
                   std::uint32_t first_index, std::uint32_t extent, std::span<std::byte> out);
void decode(IndexKernels const& kernels, std::span<const std::byte> in, std::uint32_t first_index,
            std::uint32_t extent, std::span<std::uint32_t> indices);
std::size_t min_bytes(std::size_t count, std::size_t extent);
std::size_t max_bytes(std::size_t count, std::size_t extent);
double expected_bits(double density);

}  // namespace delta
}  // namespace sparsecomm
