// Which lanes of a vector a mask selects, for instruction sets that cannot compress a vector.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sparsecomm {

inline constexpr std::size_t table_lanes = 8;

// Row m: the numbers of the bits set in m, lowest first, and zeros after them.
inline constexpr auto set_lanes_table = [] {
  std::array<std::array<std::uint32_t, table_lanes>, 1u << table_lanes> table{};
  for (std::uint32_t bits = 0; bits < table.size(); ++bits) {
    std::size_t count = 0;
    for (std::uint32_t lane = 0; lane < table_lanes; ++lane) {
      if (bits >> lane & 1u) table[bits][count++] = lane;
    }
  }
  return table;
}();

}  // namespace sparsecomm
