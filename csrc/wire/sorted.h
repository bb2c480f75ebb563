#pragma once

#include <cstdint>
#include <span>

#include "wire/index_kernels.h"

namespace sparsecomm {

inline bool strictly_increasing(std::span<const std::uint32_t> indices) {
  return index_kernels().strictly_increasing(indices);
}

}  // namespace sparsecomm
