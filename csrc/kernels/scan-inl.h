// The kernels over vectors that read and do not write. Included once per instruction set.
#if defined(SPARSECOMM_KERNELS_SCAN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_KERNELS_SCAN_INL_H_
#undef SPARSECOMM_KERNELS_SCAN_INL_H_
#else
#define SPARSECOMM_KERNELS_SCAN_INL_H_
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/scan.h"
#include "kernels/sources-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

// An element's own bits, which for the 16-bit types order as the widened ones do.
template <class T>
using Word = std::conditional_t<sizeof(T) == 2, std::int16_t,
                                std::make_signed_t<magnitude_bits_t<accumulate_t<T>>>>;

template <class D, class T>
HWY_INLINE hn::Vec<D> load_magnitudes(D d, T const* p) {
  hn::RebindToUnsigned<D> const du;
  auto const mask = hn::Set(d, hwy::LimitsMax<hn::TFromD<D>>());
  if constexpr (sizeof(T) == 2) {
    return hn::And(hn::BitCast(d, hn::LoadU(du, words(p))), mask);
  } else {
    hn::ScalableTag<T> const dt;
    return hn::And(hn::BitCast(d, hn::LoadU(dt, p)), mask);
  }
}

template <class T>
bool all_finite(std::span<const T> x) {
  hn::ScalableTag<Word<T>> const d;
  std::size_t const lanes = hn::Lanes(d);
  auto const infinity =
      hn::Set(d, std::bit_cast<Word<T>>(T(std::numeric_limits<accumulate_t<T>>::infinity())));
  auto most = hn::Zero(d);
  T const* p = x.data();
  std::size_t i = 0;
  for (; x.size() - i >= 4 * lanes; i += 4 * lanes) {
    most = hn::Max(
        most, max4(d, load_magnitudes(d, p + i), load_magnitudes(d, p + i + lanes),
                   load_magnitudes(d, p + i + 2 * lanes), load_magnitudes(d, p + i + 3 * lanes)));
  }
  return hn::AllTrue(d, hn::Lt(most, infinity)) && all_finite_range(x.subspan(i));
}

template <class Source>
void histogram_of(Source const& source, std::size_t size, unsigned shift, std::uint64_t base,
                  std::span<std::uint64_t> counts) {
  using V = typename Source::V;
  if (base > std::uint64_t{magnitude_mask<V>} >> shift) return;
  hn::ScalableTag<V> const d;
  hn::RebindToUnsigned<decltype(d)> const du;
  using Bits = hn::TFromD<decltype(du)>;
  std::size_t const lanes = hn::Lanes(d);
  auto const lowest = hn::Set(du, static_cast<Bits>(base));
  auto const outside = hn::Set(du, static_cast<Bits>(counts.size()));
  // Neighbours often share a bin, and in one table each increment would wait for the one before it.
  // The last bin of each table takes what lies outside.
  constexpr std::size_t ways = 4;
  std::array<std::array<std::uint32_t, histogram_bins + 1>, ways> tables;
  HWY_ALIGN std::array<Bits, hn::MaxLanes(d)> bins;
  std::size_t i = 0;
  while (size - i >= lanes) {
    // In blocks that 32 bits can count.
    std::size_t const left = std::min<std::size_t>(size - i, std::size_t{1} << 31);
    std::size_t const end = i + left - left % lanes;
    for (auto& table : tables) std::fill_n(table.begin(), counts.size() + 1, 0);
    for (; i < end; i += lanes) {
      auto const bits = magnitudes(d, load_values(d, source, i));
      auto const bin =
          hn::Sub(hn::ShiftRightSame(hn::BitCast(du, bits), static_cast<int>(shift)), lowest);
      hn::Store(hn::Min(bin, outside), du, bins.data());
      for (std::size_t lane = 0; lane < lanes; ++lane) ++tables[lane % ways][bins[lane]];
    }
    for (std::size_t bin = 0; bin < counts.size(); ++bin) {
      for (auto const& table : tables) counts[bin] += table[bin];
    }
  }
  count_range(source, i, size, shift, base, counts);
}

template <class T>
void magnitude_histogram(std::span<const T> gradient, std::span<const accumulate_t<T>> residual,
                         unsigned shift, std::uint64_t base, std::span<std::uint64_t> counts) {
  require_bins(counts.size());
  visit_sum(gradient, residual, [&](auto const& source) {
    histogram_of(source, gradient.size(), shift, base, counts);
  });
}

// The largest signed bit pattern less than `bound`, as far as magnitudes go.
template <class V>
std::make_signed_t<magnitude_bits_t<V>> last_below(std::uint64_t bound) {
  using Bits = std::make_signed_t<magnitude_bits_t<V>>;
  if (bound > magnitude_mask<V>) return std::numeric_limits<Bits>::max();
  return static_cast<Bits>(static_cast<Bits>(bound) - 1);
}

// Stores the magnitudes that are more than `below` and no more than `last`, returns how many they
// are, and takes one from those lanes of `above` that are more than `last`.
template <class D>
HWY_INLINE std::size_t collect_vector(D d, hn::Vec<Signed<D>> bits, hn::Vec<Signed<D>> below,
                                      hn::Vec<Signed<D>> last, hn::Vec<Signed<D>>& above,
                                      hn::TFromD<D>* out) {
  Signed<D> const di;
  auto const over = hn::Gt(bits, last);
  auto const within = hn::AndNot(over, hn::Gt(bits, below));
  above = hn::Add(above, hn::VecFromMask(di, over));
  hn::StoreU(compress(d, hn::BitCast(d, bits), hn::RebindMask(d, within)), d, out);
  return hn::CountTrue(di, within);
}

template <class Source, class V>
std::uint64_t collect_from(Source const& source, std::size_t size, std::uint64_t low,
                           std::uint64_t high, std::vector<V>& out) {
  hn::ScalableTag<V> const d;
  Signed<decltype(d)> const di;
  std::size_t const lanes = hn::Lanes(d);
  auto const below = hn::Set(di, last_below<V>(std::min(low, high)));
  auto const last = hn::Set(di, last_below<V>(high));
  std::uint64_t count_above = 0;
  std::size_t used = out.size();
  std::size_t i = 0;
  while (size - i >= 4 * lanes) {
    // In blocks: there is room for all of a block, and a vector stored whole, before it starts.
    std::size_t const left = std::min<std::size_t>(size - i, 16384);
    std::size_t const end = i + left - left % (4 * lanes);
    if (out.size() < used + left + lanes) {
      out.resize(std::max(2 * out.size(), used + left + lanes));
    }
    auto above = hn::Zero(di);
    for (; i < end; i += 4 * lanes) {
      prefetch(source, i);
      auto const b0 = magnitudes(d, load_values(d, source, i));
      auto const b1 = magnitudes(d, load_values(d, source, i + lanes));
      auto const b2 = magnitudes(d, load_values(d, source, i + 2 * lanes));
      auto const b3 = magnitudes(d, load_values(d, source, i + 3 * lanes));
      if (hn::AllFalse(di, hn::Gt(max4(di, b0, b1, b2, b3), below))) continue;
      used += collect_vector(d, b0, below, last, above, out.data() + used);
      used += collect_vector(d, b1, below, last, above, out.data() + used);
      used += collect_vector(d, b2, below, last, above, out.data() + used);
      used += collect_vector(d, b3, below, last, above, out.data() + used);
    }
    count_above +=
        static_cast<std::uint64_t>(-std::int64_t{hn::GetLane(hn::SumOfLanes(di, above))});
  }
  out.resize(used);
  return count_above + collect_range(source, i, size, low, high, out);
}

template <class T>
std::uint64_t collect_magnitudes(std::span<const T> gradient,
                                 std::span<const accumulate_t<T>> residual, std::uint64_t low,
                                 std::uint64_t high, std::vector<accumulate_t<T>>& out) {
  return visit_sum(gradient, residual, [&](auto const& source) {
    return collect_from(source, gradient.size(), low, high, out);
  });
}

template <class Source, class V>
void gather_from(Source const& source, std::span<const std::size_t> starts, std::size_t run,
                 V* out) {
  hn::ScalableTag<V> const d;
  std::size_t const lanes = hn::Lanes(d);
  // Each run is a cache miss, or two.
  constexpr std::size_t lookahead = 24;
  std::size_t const known = std::min(lookahead, starts.size());
  for (std::size_t const start : starts.first(known)) prefetch_run(source, start, run);
  for (std::size_t i = 0; i < starts.size(); ++i) {
    if (i + lookahead < starts.size()) prefetch_run(source, starts[i + lookahead], run);
    std::size_t const start = starts[i];
    std::size_t j = 0;
    for (; run - j >= lanes; j += lanes) {
      hn::StoreU(hn::Abs(load_values(d, source, start + j)), d, out + j);
    }
    for (; j < run; ++j) out[j] = std::abs(source.value(start + j));
    out += run;
  }
}

template <class T>
void gather_magnitudes(std::span<const T> gradient, std::span<const accumulate_t<T>> residual,
                       std::span<const std::size_t> starts, std::size_t run,
                       std::span<accumulate_t<T>> out) {
  visit_sum(gradient, residual,
            [&](auto const& source) { gather_from(source, starts, run, out.data()); });
}

// The next Lanes(d) entries, as double.
template <class D, class Source>
HWY_INLINE hn::Vec<D> load_wide(D d, Source const& source, std::size_t i) {
  if constexpr (std::is_same_v<typename Source::V, double>) {
    return load_values(d, source, i);
  } else {
    return hn::PromoteTo(d, load_values(hn::Rebind<float, D>(), source, i));
  }
}

template <class Source>
Moments moments_of(Source const& source, std::size_t size) {
  hn::CappedTag<double, moment_lanes / 4> const d;
  std::size_t const lanes = hn::Lanes(d);
  MomentLanes all;
  std::size_t const blocks = size - size % moment_lanes;
  // Four vectors of lanes at a time: one pass but for the narrowest vectors.
  for (std::size_t lane = 0; lane < moment_lanes; lane += 4 * lanes) {
    auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    auto squares0 = sum0, squares1 = sum0, squares2 = sum0, squares3 = sum0;
    auto const add = [&](std::size_t i, auto& sum, auto& squares) HWY_ATTR {
      auto const value = load_wide(d, source, i);
      sum = hn::Add(sum, value);
      squares = hn::Add(squares, hn::Mul(value, value));
    };
    for (std::size_t i = lane; i < blocks; i += moment_lanes) {
      add(i, sum0, squares0);
      add(i + lanes, sum1, squares1);
      add(i + 2 * lanes, sum2, squares2);
      add(i + 3 * lanes, sum3, squares3);
    }
    auto const store = [&](std::size_t at, auto sum, auto squares) HWY_ATTR {
      hn::StoreU(sum, d, all.sum.data() + at);
      hn::StoreU(squares, d, all.squares.data() + at);
    };
    store(lane, sum0, squares0);
    store(lane + lanes, sum1, squares1);
    store(lane + 2 * lanes, sum2, squares2);
    store(lane + 3 * lanes, sum3, squares3);
  }
  all.add_range(source, blocks, size);
  return all.total();
}

template <class T>
Moments moments(std::span<const T> gradient, std::span<const accumulate_t<T>> residual) {
  return visit_sum(gradient, residual,
                   [&](auto const& source) { return moments_of(source, gradient.size()); });
}

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();
#endif
