// The scalar kernels: the oracle of the SIMD ones, and what runs where there is no SIMD.
#pragma once

#include "kernels/block_scan.h"
#include "kernels/half.h"
#include "kernels/intersect.h"
#include "kernels/kernels.h"

namespace sparsecomm {

template <class T>
KernelTable<T> scalar_kernels();

BlockKernelTable scalar_block_kernels();
IntersectKernelTable scalar_intersect_kernels();
template <class T>
HalfKernelTable<T> scalar_half_kernels();

}  // namespace sparsecomm
