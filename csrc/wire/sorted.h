#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sparsecomm {

// Looks at blocks without leaving early: a loop of fixed length is one that compilers vectorise.
inline bool strictly_increasing(std::span<const std::uint32_t> indices) {
  constexpr std::size_t block = 64;
  std::size_t i = 1;
  for (; i + block <= indices.size(); i += block) {
    std::uint32_t descents = 0;
    for (std::size_t j = i; j < i + block; ++j) descents |= indices[j - 1] >= indices[j];
    if (descents != 0) return false;
  }
  for (; i < indices.size(); ++i) {
    if (indices[i - 1] >= indices[i]) return false;
  }
  return true;
}

}  // namespace sparsecomm
