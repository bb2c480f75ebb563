#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "kernels/simd.h"

namespace sparsecomm {
namespace {

template <class T>
std::vector<KernelTable<T>> const& simd_kernels_of(SimdKernels const& all) {
  if constexpr (dtype_of<T>() == DType::f32) {
    return all.f32;
  } else if constexpr (dtype_of<T>() == DType::f64) {
    return all.f64;
  } else if constexpr (dtype_of<T>() == DType::f16) {
    return all.f16;
  } else {
    return all.bf16;
  }
}

template <class T>
std::vector<KernelTable<T>> make_tables() {
  SimdKernels const all = simd_kernels();
  std::vector<KernelTable<T>> const& simd = simd_kernels_of<T>(all);
  std::vector<KernelTable<T>> tables{scalar_kernels<T>()};
  tables.insert(tables.end(), simd.rbegin(), simd.rend());
  return tables;
}

std::vector<BlockKernelTable> make_block_tables() {
  std::vector<BlockKernelTable> tables{scalar_block_kernels()};
  std::vector<BlockKernelTable> const simd = simd_kernels().blocks;
  tables.insert(tables.end(), simd.rbegin(), simd.rend());
  return tables;
}

}  // namespace

std::span<BlockKernelTable const> block_kernel_tables() {
  static std::vector<BlockKernelTable> const tables = make_block_tables();
  return tables;
}

BlockKernelTable const& block_kernels() { return block_kernel_tables().back(); }

template <class T>
std::span<KernelTable<T> const> kernel_tables() {
  static std::vector<KernelTable<T>> const tables = make_tables<T>();
  return tables;
}

template <class T>
KernelTable<T> const& kernels() {
  return kernel_tables<T>().back();
}

template std::span<KernelTable<float> const> kernel_tables();
template std::span<KernelTable<double> const> kernel_tables();
template std::span<KernelTable<Half> const> kernel_tables();
template std::span<KernelTable<BFloat16> const> kernel_tables();
template KernelTable<float> const& kernels();
template KernelTable<double> const& kernels();
template KernelTable<Half> const& kernels();
template KernelTable<BFloat16> const& kernels();

}  // namespace sparsecomm
