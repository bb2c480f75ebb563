// Which of Highway's instruction sets are not compiled for; to be included before foreach_target.h.
#pragma once

// The first two have no instruction that would be used over the targets below them. On the others
// GCC 12 crashes; their processors have NEON too.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
