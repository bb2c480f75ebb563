#include "wire/index_kernels.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "base/never_destroyed.h"
#include "wire/simd.h"

namespace sparsecomm {
namespace {

bool strictly_increasing(std::span<const std::uint32_t> indices) {
  return std::ranges::adjacent_find(indices, std::greater_equal()) == indices.end();
}

Ones ones(std::span<const std::byte> in, std::uint32_t base, std::size_t enough,
          std::uint32_t* out) {
  Ones found;
  while (found.count < enough && found.bytes < in.size()) {
    std::uint64_t word = 0;
    std::memcpy(&word, in.data() + found.bytes, std::min(sizeof(word), in.size() - found.bytes));
    auto const first = base + static_cast<std::uint32_t>(found.bytes * 8);
    for (; word != 0; word &= word - 1) {
      out[found.count++] = first + static_cast<std::uint32_t>(std::countr_zero(word));
    }
    found.bytes = std::min(found.bytes + sizeof(word), in.size());
  }
  return found;
}

std::uint32_t gaps(std::uint32_t const* indices, std::uint32_t next, std::uint32_t* gap) {
  gap[0] = indices[0] - next;
  std::uint32_t all = gap[0];
  for (std::size_t i = 1; i < delta::block_size; ++i) {
    gap[i] = indices[i] - indices[i - 1] - 1;
    all |= gap[i];
  }
  return all;
}

std::uint32_t high_bits(std::uint32_t const* gap, std::uint32_t parameter) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < delta::block_size; ++i) {
    sum += std::min(gap[i] >> parameter, delta::max_unary);
  }
  return sum;
}

std::uint32_t join(std::byte const* lows, std::uint32_t parameter, std::uint32_t next,
                   std::uint32_t const* ones, std::uint32_t* indices) {
  std::uint32_t sum = 0;
  for (std::uint32_t i = 0; i < delta::block_size; ++i) {
    std::uint32_t low;
    std::memcpy(&low, lows + i * parameter / 8, sizeof(low));
    sum += low >> i * parameter % 8 & ((1u << parameter) - 1);
    indices[i] = next + sum + ((ones[i] - i) << parameter) + i;
  }
  return sum;
}

std::vector<IndexKernels> make_tables() {
  std::vector<IndexKernels> tables{{"scalar", strictly_increasing, ones, gaps, high_bits, join}};
  auto const simd = simd_codecs().index;
  tables.insert(tables.end(), simd.rbegin(), simd.rend());
  return tables;
}

}  // namespace

std::span<IndexKernels const> index_kernel_tables() {
  static auto const* const tables = never_destroyed(make_tables());
  return *tables;
}

IndexKernels const& index_kernels() { return index_kernel_tables().back(); }

}  // namespace sparsecomm
