#include <algorithm>
#include <span>
#include <vector>

#include "base/never_destroyed.h"
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

// The scalar one, then the others, the fastest last.
template <class Table>
std::vector<Table> in_order(Table const& scalar, std::vector<Table> const& simd) {
  std::vector<Table> tables{scalar};
  tables.insert(tables.end(), simd.rbegin(), simd.rend());
  return tables;
}

}  // namespace

std::span<BlockKernelTable const> block_kernel_tables() {
  static auto const* const tables =
      never_destroyed(in_order(scalar_block_kernels(), simd_kernels().blocks));
  return *tables;
}

BlockKernelTable const& block_kernels() { return block_kernel_tables().back(); }

std::span<IntersectKernelTable const> intersect_kernel_tables() {
  static auto const* const tables =
      never_destroyed(in_order(scalar_intersect_kernels(), simd_kernels().intersections));
  return *tables;
}

IntersectKernelTable const& intersect_kernels() { return intersect_kernel_tables().back(); }

template <>
std::span<HalfKernelTable<Half> const> half_kernel_tables() {
  static auto const* const tables =
      never_destroyed(in_order(scalar_half_kernels<Half>(), simd_kernels().half_f16));
  return *tables;
}
template <>
std::span<HalfKernelTable<BFloat16> const> half_kernel_tables() {
  static auto const* const tables =
      never_destroyed(in_order(scalar_half_kernels<BFloat16>(), simd_kernels().half_bf16));
  return *tables;
}

template <>
HalfKernelTable<Half> const& half_kernels() {
  return half_kernel_tables<Half>().back();
}
template <>
HalfKernelTable<BFloat16> const& half_kernels() {
  return half_kernel_tables<BFloat16>().back();
}

template <class T>
std::span<KernelTable<T> const> kernel_tables() {
  static auto const* const tables =
      never_destroyed(in_order(scalar_kernels<T>(), simd_kernels_of<T>(simd_kernels())));
  return *tables;
}

template <class T>
KernelTable<T> const& kernels() {
  return kernel_tables<T>().back();
}

template <class T>
KernelTable<accumulate_t<T>> const& packed_kernels(KernelTable<T> const& kernel) {
  auto const tables = kernel_tables<accumulate_t<T>>();
  return *std::ranges::find(tables, kernel.target, &KernelTable<accumulate_t<T>>::target);
}

template std::span<KernelTable<float> const> kernel_tables();
template std::span<KernelTable<double> const> kernel_tables();
template std::span<KernelTable<Half> const> kernel_tables();
template std::span<KernelTable<BFloat16> const> kernel_tables();
template KernelTable<float> const& kernels();
template KernelTable<double> const& kernels();
template KernelTable<Half> const& kernels();
template KernelTable<BFloat16> const& kernels();
template KernelTable<float> const& packed_kernels(KernelTable<float> const&);
template KernelTable<double> const& packed_kernels(KernelTable<double> const&);
template KernelTable<float> const& packed_kernels(KernelTable<Half> const&);
template KernelTable<float> const& packed_kernels(KernelTable<BFloat16> const&);

}  // namespace sparsecomm
