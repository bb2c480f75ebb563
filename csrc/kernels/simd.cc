// This file is compiled once per instruction set: foreach_target.h includes it again for each.
#include "kernels/simd.h"

#include "base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR
#include "kernels/blocks-inl.h"
#include "kernels/buckets-inl.h"
#include "kernels/half-inl.h"
#include "kernels/intersect-inl.h"
#include "kernels/scan-inl.h"
#include "kernels/select-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
// One lane at a time the project's own scalar kernels are the better ones.
void append_kernels(SimdKernels&) {}
#else
template <class T>
void append(std::vector<KernelTable<T>>& tables) {
  tables.push_back({hwy::TargetName(HWY_TARGET), all_finite<T>,
                    fused_error_feedback_by<T, VectorLoop>, send_all_by<T, VectorLoop>,
                    select_by<T, VectorLoop>, top_k_of_buckets<T>, magnitude_histogram<T>,
                    collect_magnitudes<T>, gather_magnitudes<T>, moments<T>});
}

void append_kernels(SimdKernels& all) {
  append(all.f32);
  append(all.f64);
  append(all.f16);
  append(all.bf16);
  all.blocks.push_back({hwy::TargetName(HWY_TARGET), nonzero_blocks, copy_nonzero_blocks});
  all.intersections.push_back({hwy::TargetName(HWY_TARGET), intersect});
  all.half_f16.push_back(half_table<Half>());
  all.half_bf16.push_back(half_table<BFloat16>());
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsecomm {

HWY_EXPORT(append_kernels);

SimdKernels simd_kernels() {
  SimdKernels all;
  for (std::int64_t const target : hwy::SupportedAndGeneratedTargets()) {
    // The bit of a target in this format is its place in Highway's dispatch table. Scalar has none.
    std::int64_t const place = HWY_CHOSEN_TARGET_SHIFT(target);
    if (place == 0) continue;
    HWY_DISPATCH_TABLE(append_kernels)
    [hwy::Num0BitsBelowLS1Bit_Nonzero64(static_cast<std::uint64_t>(place))](all);
  }
  return all;
}

}  // namespace sparsecomm
#endif
