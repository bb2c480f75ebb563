// The intersection of sorted lists, with vectors. Included once per instruction set.
#if defined(SPARSECOMM_KERNELS_INTERSECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_KERNELS_INTERSECT_INL_H_
#undef SPARSECOMM_KERNELS_INTERSECT_INL_H_
#else
#define SPARSECOMM_KERNELS_INTERSECT_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <span>

#include "hwy/highway.h"
#include "kernels/intersect.h"
#include "kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

// A vector of `one` against as many of `other`, each with each; the one that ends first moves on.
// What is equal in two vectors is larger than all that was found before.
inline std::size_t intersect(std::span<const std::uint32_t> one,
                             std::span<const std::uint32_t> other, std::uint32_t* positions) {
  hn::ScalableTag<std::uint32_t> const d;
  std::size_t const lanes = hn::Lanes(d);
  std::size_t i = 0;
  std::size_t j = 0;
  std::size_t found = 0;
  while (i + lanes <= one.size() && j + lanes <= other.size()) {
    auto const indices = hn::LoadU(d, one.data() + i);
    auto shared = hn::Eq(indices, hn::Set(d, other[j]));
    for (std::size_t k = 1; k < lanes; ++k) {
      shared = hn::Or(shared, hn::Eq(indices, hn::Set(d, other[j + k])));
    }
    store_set_lanes(d, shared, static_cast<std::uint32_t>(i), positions + found);
    found += hn::CountTrue(d, shared);
    std::uint32_t const last_of_one = one[i + lanes - 1];
    std::uint32_t const last_of_other = other[j + lanes - 1];
    i += last_of_one <= last_of_other ? lanes : 0;
    j += last_of_other <= last_of_one ? lanes : 0;
  }
  return intersect_range(one, other, i, j, positions, found);
}

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();

#endif  // SPARSECOMM_KERNELS_INTERSECT_INL_H_
