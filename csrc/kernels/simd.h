// The SIMD kernels of every instruction set that this machine supports.
#pragma once

#include <vector>

#include "kernels/block_scan.h"
#include "kernels/half.h"
#include "kernels/intersect.h"
#include "kernels/kernels.h"

namespace sparsecomm {

struct SimdKernels {
  std::vector<KernelTable<float>> f32;
  std::vector<KernelTable<double>> f64;
  std::vector<KernelTable<Half>> f16;
  std::vector<KernelTable<BFloat16>> bf16;
  std::vector<BlockKernelTable> blocks;
  std::vector<IntersectKernelTable> intersections;
  std::vector<HalfKernelTable<Half>> half_f16;
  std::vector<HalfKernelTable<BFloat16>> half_bf16;
};

// Fastest first; empty where Highway knows only its own scalar emulation.
SimdKernels simd_kernels();

}  // namespace sparsecomm
