// The sources of entries, a vector at a time. Included once per instruction set.
#if defined(SPARSECOMM_KERNELS_SOURCES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_KERNELS_SOURCES_INL_H_
#undef SPARSECOMM_KERNELS_SOURCES_INL_H_
#else
#define SPARSECOMM_KERNELS_SOURCES_INL_H_
#endif

#include <cstddef>

#include "kernels/sources.h"
#include "kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

template <class D, class T>
HWY_INLINE hn::Vec<D> load_values(D d, FusedSource<T> const& source, std::size_t i) {
  return load_sum(d, source.residual + i, source.gradient + i);
}
template <class D, class T>
HWY_INLINE hn::Vec<D> load_values(D d, ScaledSource<T> const& source, std::size_t i) {
  return hn::Add(hn::LoadU(d, source.residual + i),
                 hn::Mul(hn::Set(d, source.scale), load(d, source.gradient + i)));
}
template <class D, class T>
HWY_INLINE hn::Vec<D> next_momentum(D d, MomentumSource<T> const& source, std::size_t i) {
  // Not MulAdd, which rounds once.
  return hn::Add(hn::Mul(hn::Set(d, source.factor), hn::LoadU(d, source.momentum + i)),
                 hn::Mul(hn::Set(d, source.scale), load(d, source.gradient + i)));
}
template <class D, class T>
HWY_INLINE hn::Vec<D> load_values(D d, MomentumSource<T> const& source, std::size_t i) {
  auto step = next_momentum(d, source, i);
  if (source.nesterov) {
    step = hn::Add(hn::Mul(hn::Set(d, source.scale), load(d, source.gradient + i)),
                   hn::Mul(hn::Set(d, source.factor), step));
  }
  return hn::Add(hn::LoadU(d, source.residual + i), step);
}
template <class D, class T>
HWY_INLINE hn::Vec<D> load_values(D d, SumSource<T> const& source, std::size_t i) {
  return load_sum(d, source.residual + i, source.gradient + i);
}
template <class D, class T>
HWY_INLINE hn::Vec<D> load_values(D d, ReadOnly<T> const& source, std::size_t i) {
  return load(d, source.x + i);
}

template <class D, class T>
HWY_INLINE void settle_vector(D d, FusedSource<T> const& source, std::size_t i, hn::Vec<D> value) {
  hn::StoreU(value, d, source.residual + i);
  store_zeros(d, source.gradient + i);
}
template <class D, class T>
HWY_INLINE void settle_vector(D d, MomentumSource<T> const& source, std::size_t i,
                              hn::Vec<D> value) {
  hn::StoreU(next_momentum(d, source, i), d, source.momentum + i);
  settle_vector(d, static_cast<FusedSource<T> const&>(source), i, value);
}
template <class D, class T>
HWY_INLINE void settle_vector(D, ReadOnly<T> const&, std::size_t, hn::Vec<D>) {}

template <class T>
HWY_INLINE void prefetch(FusedSource<T> const& source, std::size_t i) {
  prefetch_group(source.residual + i);
  prefetch_group(source.gradient + i);
}
template <class T>
HWY_INLINE void prefetch(MomentumSource<T> const& source, std::size_t i) {
  prefetch(static_cast<FusedSource<T> const&>(source), i);
  prefetch_group(source.momentum + i);
}
template <class T>
HWY_INLINE void prefetch(SumSource<T> const& source, std::size_t i) {
  prefetch_group(source.residual + i);
  prefetch_group(source.gradient + i);
}
template <class T>
HWY_INLINE void prefetch(ReadOnly<T> const& source, std::size_t i) {
  prefetch_group(source.x + i);
}

template <class T>
HWY_INLINE void prefetch_run(SumSource<T> const& source, std::size_t i, std::size_t run) {
  for (std::size_t const end : {i, i + run - 1}) {
    hwy::Prefetch(source.residual + end);
    hwy::Prefetch(source.gradient + end);
  }
}
template <class T>
HWY_INLINE void prefetch_run(ReadOnly<T> const& source, std::size_t i, std::size_t run) {
  for (std::size_t const end : {i, i + run - 1}) hwy::Prefetch(source.x + end);
}

// Leaves a vector's entries as taken.
template <class D, class T>
HWY_INLINE void settle_taken(D d, FusedSource<T> const& source, std::size_t i) {
  hn::StoreU(hn::Zero(d), d, source.residual + i);
  store_zeros(d, source.gradient + i);
}
template <class D, class T>
HWY_INLINE void settle_taken(D d, MomentumSource<T> const& source, std::size_t i) {
  hn::StoreU(source.masks() ? hn::Zero(d) : next_momentum(d, source, i), d, source.momentum + i);
  settle_taken(d, static_cast<FusedSource<T> const&>(source), i);
}

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();
#endif
