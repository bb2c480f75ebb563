// Vectors of magnitudes. Included once per instruction set, as Highway's own -inl.h files are.
#if defined(SPARSECOMM_KERNELS_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_KERNELS_VECTOR_INL_H_
#undef SPARSECOMM_KERNELS_VECTOR_INL_H_
#else
#define SPARSECOMM_KERNELS_VECTOR_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "base/lanes.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/magnitude.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class D>
using Signed = hn::RebindToSigned<D>;

// The 16-bit types as words.
HWY_INLINE std::uint16_t const* words(Half const* p) { return &p->bits; }
HWY_INLINE std::uint16_t* words(Half* p) { return &p->bits; }
HWY_INLINE std::uint16_t const* words(BFloat16 const* p) { return &p->bits; }
HWY_INLINE std::uint16_t* words(BFloat16* p) { return &p->bits; }

template <class D, class V>
HWY_INLINE hn::Vec<D> load(D d, V const* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> widened(D d, Half, hn::Vec<hn::Rebind<std::uint16_t, D>> half) {
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_ARCH_ARM_A64
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), half));
#else
  // Highway's emulation takes an Inf for 2^16.
  hn::RebindToUnsigned<D> const du;
  auto const wide = hn::PromoteTo(du, half);
  auto const exponents = hn::Set(du, 0x0f800000);
  auto const rebias = hn::Set(du, 112u << 23);
  auto const unsigned_half = hn::ShiftLeft<13>(hn::And(wide, hn::Set(du, 0x7fff)));
  auto const exponent = hn::And(unsigned_half, exponents);
  auto const finite = hn::Add(unsigned_half, rebias);
  auto const normal = hn::Add(finite, hn::IfThenElseZero(hn::Eq(exponent, exponents), rebias));
  // A subnormal has an implicit 1 added to it and taken off again.
  auto const one = hn::Set(du, 113u << 23);
  auto const subnormal = hn::Sub(hn::BitCast(d, hn::Add(unsigned_half, one)), hn::BitCast(d, one));
  auto const magnitude =
      hn::IfThenElse(hn::Eq(exponent, hn::Zero(du)), hn::BitCast(du, subnormal), normal);
  auto const sign = hn::ShiftLeft<16>(hn::And(wide, hn::Set(du, 0x8000)));
  return hn::BitCast(d, hn::Or(magnitude, sign));
#endif
}
template <class D>
HWY_INLINE hn::Vec<D> widened(D d, BFloat16, hn::Vec<hn::Rebind<std::uint16_t, D>> half) {
  hn::RebindToUnsigned<D> const wide;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(wide, half)));
}
template <class D>
HWY_INLINE hn::Vec<D> load(D d, Half const* p) {
  return widened(d, Half(), hn::LoadU(hn::Rebind<std::uint16_t, D>(), words(p)));
}
template <class D>
HWY_INLINE hn::Vec<D> load(D d, BFloat16 const* p) {
  return widened(d, BFloat16(), hn::LoadU(hn::Rebind<std::uint16_t, D>(), words(p)));
}

// residual + gradient, the operands in the order of the scalar kernels.
template <class D, class T>
HWY_INLINE hn::Vec<D> load_sum(D d, hn::TFromD<D> const* residual, T const* gradient) {
  return hn::Add(hn::LoadU(d, residual), load(d, gradient));
}

template <class D, class T>
HWY_INLINE void store_zeros(D d, T* p) {
  if constexpr (sizeof(T) == 2) {
    hn::Rebind<std::uint16_t, D> const word;
    hn::StoreU(hn::Zero(word), word, words(p));
  } else {
    hn::StoreU(hn::Zero(d), d, p);
  }
}

// Signed, since no bit pattern of a magnitude has the highest bit and signed comparisons are
// cheaper.
template <class D>
HWY_INLINE hn::Vec<Signed<D>> magnitudes(D /*tag*/, hn::Vec<D> v) {
  Signed<D> const bits;
  return hn::And(hn::BitCast(bits, v), hn::Set(bits, hwy::LimitsMax<hn::TFromD<Signed<D>>>()));
}

// Where Highway's Compress is not an instruction (of 32-bit lanes on AVX-512), a table: Highway's
// own emulation copies its table to the stack at each call with some compilers.
template <class D>
constexpr bool compresses() {
  return (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3 && sizeof(hn::TFromD<D>) == 4) ||
         hn::MaxLanes(D()) > table_lanes;
}

// A bit for each lane that is set, the first lane's lowest.
template <class D>
HWY_INLINE std::uint64_t mask_bits(D d, hn::Mask<D> mask) {
  std::uint8_t bytes[8];  // that StoreMaskBits may write
  hn::StoreMaskBits(d, mask, bytes);
  // As wide as what it stores, so that it need not pass through memory.
  std::conditional_t<(hn::MaxLanes(D()) > 8), std::uint16_t, std::uint8_t> bits;
  static_assert(hn::MaxLanes(D()) <= 8 * sizeof(bits));
  std::memcpy(&bits, bytes, sizeof(bits));
  return bits;
}

// The numbers of the lanes that are set, in the first lanes.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> set_lanes(D d, hn::Mask<D> mask) {
  hn::RebindToUnsigned<D> const du;
  if constexpr (compresses<D>()) {
    return hn::Compress(hn::Iota(du, 0), hn::RebindMask(du, mask));
  } else {
    auto const row =
        hn::LoadU(hn::Rebind<std::uint32_t, D>(), set_lanes_table[mask_bits(d, mask)].data());
    if constexpr (sizeof(hn::TFromD<D>) == sizeof(std::uint32_t)) {
      return row;
    } else {
      return hn::PromoteTo(du, row);
    }
  }
}

// Stores base + the number of each lane that is set. Writes a whole vector, in a register first: a
// compressing store is microcoded on some processors.
template <class D>
HWY_INLINE void store_set_lanes(D d, hn::Mask<D> mask, std::uint32_t base, std::uint32_t* out) {
  hn::Rebind<std::uint32_t, D> const d32;
  auto const lanes = set_lanes(d, mask);
  if constexpr (sizeof(hn::TFromD<D>) == sizeof(std::uint32_t)) {
    hn::StoreU(hn::Add(lanes, hn::Set(d32, base)), d32, out);
  } else {
    hn::StoreU(hn::Add(hn::TruncateTo(d32, lanes), hn::Set(d32, base)), d32, out);
  }
}

template <class D>
HWY_INLINE hn::Vec<D> compress(D d, hn::Vec<D> v, hn::Mask<D> mask) {
  if constexpr (compresses<D>()) {
    return hn::Compress(v, mask);
  } else {
    return hn::TableLookupLanes(v, hn::IndicesFromVec(d, set_lanes(d, mask)));
  }
}

// Asks for what a loop over `bytes` at a time reaches 2 KiB later: the processor's own prefetching
// falls behind when the loop has work besides loading.
HWY_INLINE void prefetch_bytes(void const* p, std::size_t bytes) {
  constexpr std::uintptr_t ahead = 2048;
  constexpr std::uintptr_t line = 64;
  std::uintptr_t const begin = reinterpret_cast<std::uintptr_t>(p) + ahead;
  HWY_UNROLL(4)
  for (std::size_t i = 0; i < bytes; i += line) {
    hwy::Prefetch(reinterpret_cast<char const*>(begin + i));
  }
}

// The same for loops over groups of four vectors.
template <class T>
HWY_INLINE void prefetch_group(T const* p) {
  prefetch_bytes(p, 4 * hn::Lanes(hn::ScalableTag<accumulate_t<T>>()) * sizeof(T));
}

template <class D>
HWY_INLINE hn::Vec<D> max4(D, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c, hn::Vec<D> d) {
  return hn::Max(hn::Max(a, b), hn::Max(c, d));
}

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();
#endif
