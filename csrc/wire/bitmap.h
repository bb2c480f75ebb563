// The bitmap codec: one bit for each position of [first_index, first_index + extent), lowest bit
// first, the last byte padded with zeros. For sets so dense that their entropy is close to a bit a
// position; a set of runs is left to delta, whose blocks take 17 bytes per 128 indices there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sparsecomm {

struct IndexKernels;

namespace bitmap {

constexpr std::size_t bytes(std::size_t, std::size_t extent) { return (extent + 7) / 8; }
constexpr double expected_bits(double density) { return 1 / density; }

std::size_t encode(IndexKernels const& kernels, std::span<const std::uint32_t> indices,
                   std::uint32_t first_index, std::uint32_t extent, std::span<std::byte> out);
void decode(IndexKernels const& kernels, std::span<const std::byte> in, std::uint32_t first_index,
            std::uint32_t extent, std::span<std::uint32_t> indices);

}  // namespace bitmap
}  // namespace sparsecomm
