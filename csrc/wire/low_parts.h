// Where the low parts of a delta block lie in the bytes that hold four of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "wire/index_kernels.h"

namespace sparsecomm {

// Of four parts, the four bytes that hold each, and the bits of those before it.
struct LowPartLanes {
  std::array<std::uint8_t, 16> bytes;
  std::array<std::uint32_t, 4> shifts;
};

// For each parameter: of parts 0 to 3 of eight, and of parts 4 to 7, which may begin amid a byte.
inline constexpr auto low_part_lanes = [] {
  std::array<std::array<LowPartLanes, 2>, max_join_parameter + 1> table{};
  for (std::uint32_t parameter = 0; parameter < table.size(); ++parameter) {
    for (std::uint32_t half = 0; half < 2; ++half) {
      for (std::uint32_t lane = 0; lane < 4; ++lane) {
        std::uint32_t const bit = half * 4 * parameter % 8 + lane * parameter;
        table[parameter][half].shifts[lane] = bit % 8;
        for (std::uint32_t byte = 0; byte < 4; ++byte) {
          table[parameter][half].bytes[4 * lane + byte] = static_cast<std::uint8_t>(bit / 8 + byte);
        }
      }
    }
  }
  return table;
}();

}  // namespace sparsecomm
