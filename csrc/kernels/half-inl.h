// The kernels over f16 and bf16, with vectors. Included once per instruction set.
#if defined(SPARSECOMM_KERNELS_HALF_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_KERNELS_HALF_INL_H_
#undef SPARSECOMM_KERNELS_HALF_INL_H_
#else
#define SPARSECOMM_KERNELS_HALF_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/half.h"
#include "kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

// Elements as words, at any address.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, D>> load_halves(D, std::byte const* p) {
  hn::Rebind<std::uint16_t, D> const word;
  hn::Repartition<std::uint8_t, decltype(word)> const byte;
  return hn::BitCast(word, hn::LoadU(byte, reinterpret_cast<std::uint8_t const*>(p)));
}
template <class D>
HWY_INLINE void store_halves(D, hn::Vec<hn::Rebind<std::uint16_t, D>> halves, std::byte* p) {
  hn::Repartition<std::uint8_t, hn::Rebind<std::uint16_t, D>> const byte;
  hn::StoreU(hn::BitCast(byte, halves), byte, reinterpret_cast<std::uint8_t*>(p));
}

// As Half::from_float rounds.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, D>> round_to(Half, D d, hn::Vec<D> v) {
  Signed<D> const di;
  hn::Rebind<std::uint16_t, D> const word;
  auto const magnitude = magnitudes(d, v);
  auto const sign = hn::Xor(hn::BitCast(di, v), magnitude);
  auto const nan = hn::Gt(magnitude, hn::Set(di, 0x7f800000));
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_ARCH_ARM_A64
  auto const canonical = hn::Or(sign, hn::IfThenElse(nan, hn::Set(di, 0x7fc00000), magnitude));
  hn::Rebind<hwy::float16_t, D> const half;
  return hn::BitCast(word, hn::DemoteTo(half, hn::BitCast(d, canonical)));
#else
  auto const one_half = hn::Set(d, 0.5f);
  auto const aligned = hn::Add(hn::BitCast(d, magnitude), one_half);
  auto const subnormal = hn::Sub(hn::BitCast(di, aligned), hn::BitCast(di, one_half));
  auto const odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 1));
  auto const rounded_up = hn::Add(hn::Add(magnitude, odd), hn::Set(di, 0xfff - 0x38000000));
  auto const normal = hn::ShiftRight<13>(rounded_up);
  auto const special = hn::IfThenElse(nan, hn::Set(di, 0x7e00), hn::Set(di, 0x7c00));
  auto const small = hn::Lt(magnitude, hn::Set(di, 0x38800000));
  auto const finite = hn::IfThenElse(small, subnormal, normal);
  auto const in_range = hn::Lt(magnitude, hn::Set(di, 0x477ff000));
  hn::RebindToUnsigned<D> const du;
  auto const result = hn::BitCast(du, hn::IfThenElse(in_range, finite, special));
  auto const sign_bit = hn::ShiftRight<16>(hn::BitCast(du, sign));
  return hn::TruncateTo(word, hn::Or(result, sign_bit));
#endif
}

// As BFloat16::from_float rounds.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, D>> round_to(BFloat16, D d, hn::Vec<D> v) {
  hn::RebindToUnsigned<D> const du;
  hn::Rebind<std::uint16_t, D> const word;
  auto const bits = hn::BitCast(du, v);
  auto const odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  auto const rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, odd), hn::Set(du, 0x7fff)));
  auto const nan = hn::Gt(magnitudes(d, v), hn::Set(Signed<D>(), 0x7f800000));
  auto const result = hn::IfThenElse(hn::RebindMask(du, nan), hn::Set(du, 0x7fc0), rounded);
  return hn::TruncateTo(word, result);
}

template <class D>
HWY_INLINE hn::Vec<D> combination(WideSum, D, hn::Vec<D> a, hn::Vec<D> b) {
  return hn::Add(a, b);
}
template <class D>
HWY_INLINE hn::Vec<D> combination(WideProduct, D, hn::Vec<D> a, hn::Vec<D> b) {
  return hn::Mul(a, b);
}
template <class D>
HWY_INLINE hn::Vec<D> combination(WideMin, D, hn::Vec<D> a, hn::Vec<D> b) {
  return hn::IfThenElse(hn::Or(hn::IsNaN(a), hn::Lt(a, b)), a, b);
}
template <class D>
HWY_INLINE hn::Vec<D> combination(WideMax, D, hn::Vec<D> a, hn::Vec<D> b) {
  return hn::IfThenElse(hn::Or(hn::IsNaN(a), hn::Gt(a, b)), a, b);
}

template <class T>
void widen_elements(std::span<float> wide, std::byte const* elements) {
  hn::ScalableTag<float> const d;
  std::size_t const lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= wide.size(); i += lanes) {
    auto const halves = load_halves(d, elements + i * sizeof(T));
    hn::StoreU(widened(d, T(), halves), d, wide.data() + i);
  }
  widen_range<T>(wide, elements, i);
}

template <class T>
void narrow_elements(std::byte* elements, std::span<const float> wide) {
  hn::ScalableTag<float> const d;
  std::size_t const lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= wide.size(); i += lanes) {
    auto const halves = round_to(T(), d, hn::LoadU(d, wide.data() + i));
    store_halves(d, halves, elements + i * sizeof(T));
  }
  narrow_range<T>(elements, wide, i);
}

template <class T, class Combination>
void combine_elements(std::span<float> wide, std::byte const* elements) {
  hn::ScalableTag<float> const d;
  std::size_t const lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= wide.size(); i += lanes) {
    auto const element = widened(d, T(), load_halves(d, elements + i * sizeof(T)));
    auto const before = hn::LoadU(d, wide.data() + i);
    hn::StoreU(combination(Combination(), d, before, element), d, wide.data() + i);
  }
  combine_range<T, Combination>(wide, elements, i);
}

template <class T>
HalfKernelTable<T> half_table() {
  return {hwy::TargetName(HWY_TARGET),
          widen_elements<T>,
          narrow_elements<T>,
          combine_elements<T, WideSum>,
          combine_elements<T, WideProduct>,
          combine_elements<T, WideMin>,
          combine_elements<T, WideMax>};
}

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();
#endif
