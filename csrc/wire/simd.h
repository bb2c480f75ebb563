// The codecs' SIMD loops of every instruction set that this machine supports.
#pragma once

#include <vector>

#include "wire/index_kernels.h"
#include "wire/qsgd.h"

namespace sparsecomm {

struct SimdCodecs {
  std::vector<QsgdKernels<float>> qsgd_f32;
  std::vector<QsgdKernels<double>> qsgd_f64;
  std::vector<IndexKernels> index;
};

// Fastest first; empty where Highway knows only its own scalar emulation.
SimdCodecs simd_codecs();

}  // namespace sparsecomm
