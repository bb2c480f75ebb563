// This file is compiled once per instruction set: foreach_target.h includes it again for each.
#include "wire/simd.h"

#include "base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "wire/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR
#include "wire/index-inl.h"
#include "wire/qsgd-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
// One lane at a time the project's own scalar loops are the better ones.
void append_codecs(SimdCodecs&) {}
#else
template <class V>
constexpr QsgdKernels<V> qsgd_table() {
  return {hwy::TargetName(HWY_TARGET), largest_of<V>,       round_bucket<V>,   encode_bucket<V>,
          quantize_bucket<V>,          decode_to<V, false>, decode_to<V, true>};
}

void append_codecs(SimdCodecs& all) {
  all.qsgd_f32.push_back(qsgd_table<float>());
  all.qsgd_f64.push_back(qsgd_table<double>());
  all.index.push_back(
      {hwy::TargetName(HWY_TARGET), increasing, ones_of, gaps_of, high_bits_of, join_of});
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sparsecomm {

HWY_EXPORT(append_codecs);

SimdCodecs simd_codecs() {
  SimdCodecs all;
  for (std::int64_t const target : hwy::SupportedAndGeneratedTargets()) {
    // The bit of a target in this format is its place in Highway's dispatch table. Scalar has none.
    std::int64_t const place = HWY_CHOSEN_TARGET_SHIFT(target);
    if (place == 0) continue;
    HWY_DISPATCH_TABLE(append_codecs)
    [hwy::Num0BitsBelowLS1Bit_Nonzero64(static_cast<std::uint64_t>(place))](all);
  }
  return all;
}

}  // namespace sparsecomm
#endif
