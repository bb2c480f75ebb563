// The selection kernels over vectors. Included once per instruction set.
#if defined(SPARSECOMM_KERNELS_SELECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_KERNELS_SELECT_INL_H_
#undef SPARSECOMM_KERNELS_SELECT_INL_H_
#else
#define SPARSECOMM_KERNELS_SELECT_INL_H_
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/selection.h"
#include "kernels/sources-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

// Per block two phases, neither with a branch that depends on the data at usual densities. Vectors
// find the positions of the entries that pass; then those entries, few and in the cache, are taken
// one by one, which settles whatever is special about them: ties, values that are not finite, and
// the end of the room.
template <class Source>
class VectorSelection {
  using V = typename Source::V;
  using D = hn::ScalableTag<V>;
  using BitsVec = hn::Vec<Signed<D>>;
  static constexpr std::size_t block_entries = 2048;
  // Stored whether they are wanted or not: whether a group has any is a coin's toss.
  static constexpr std::size_t at_once = std::max<std::size_t>(hn::MaxLanes(D()) / 4, 1);

 public:
  VectorSelection(Source const& source, Selection<V>& selection, std::uint32_t first_index)
      : source_(source), selection_(selection), first_index_(first_index) {}

  void run(std::size_t size) {
    Signed<D> const di;
    std::size_t const lanes = hn::Lanes(di);
    std::size_t const group = 4 * lanes;
    BitsVec largest = hn::Zero(di);
    std::size_t i = 0;
    while (size - i >= group) {
      std::size_t const left = std::min(size - i, block_entries);
      std::size_t const end = i + left - left % group;
      BitsVec const ignored = broadcast(selection_.ignored());
      std::uint32_t* found = positions_.data();
      for (; i < end; i += group) {
        prefetch(source_, i);
        std::uint64_t const passing = find(i, ignored, largest) |
                                      find(i + lanes, ignored, largest) << lanes |
                                      find(i + 2 * lanes, ignored, largest) << 2 * lanes |
                                      find(i + 3 * lanes, ignored, largest) << 3 * lanes;
        found = store_positions(passing, static_cast<std::uint32_t>(i), found);
      }
      take(std::span(positions_.data(), found));
    }
    selection_.see(static_cast<Bits>(hn::GetLane(hn::MaxOfLanes(di, largest))));
    offer_range(source_, selection_, i, size, first_index_);
  }

 private:
  using Bits = magnitude_bits_t<V>;

  static HWY_INLINE BitsVec broadcast(Bits bits) {
    return hn::Set(Signed<D>(), static_cast<hn::TFromD<Signed<D>>>(bits));
  }

  // Settles a vector as if nothing passed; returns a bit for each entry that does.
  HWY_INLINE std::uint64_t find(std::size_t i, BitsVec ignored, BitsVec& largest) const {
    D const d;
    Signed<D> const di;
    auto const value = load_values(d, source_, i);
    BitsVec const bits = magnitudes(d, value);
    auto const pass = hn::Gt(bits, ignored);
    largest = hn::Max(largest, hn::IfThenZeroElse(pass, bits));
    settle_vector(d, source_, i, value);
    return mask_bits(di, pass);
  }

  static HWY_INLINE std::uint32_t* store_positions(std::uint64_t passing, std::uint32_t first,
                                                   std::uint32_t* out) {
    std::uint32_t* const end = out + std::popcount(passing);
    do {
      HWY_UNROLL(4)
      for (std::size_t j = 0; j < at_once; ++j) {
        // The highest bit makes up for those that are missing.
        out[j] =
            first + static_cast<std::uint32_t>(std::countr_zero(passing | std::uint64_t{1} << 63));
        passing &= passing - 1;
      }
      out += at_once;
    } while (HWY_UNLIKELY(out < end));
    return end;
  }

  // Takes the entries of a block that pass, or of the ties among them as many as are wanted.
  void take(std::span<const std::uint32_t> positions) {
    if (HWY_UNLIKELY(selection_.limit - selection_.count < positions.size())) {
      offer(positions);
      return;
    }
    std::size_t const begin = selection_.count;
    std::uint32_t* const indices = selection_.indices + begin;
    V* const values = selection_.values + begin;
    Bits const magnitude = selection_.magnitude;
    Bits most = 0;
    std::size_t ties = 0;
    for (std::size_t i = 0; i < positions.size(); ++i) {
      std::uint32_t const position = positions[i];
      V const value = source_.settled(position);
      Bits const bits = magnitude_bits(value);
      most = std::max(most, bits);
      ties += bits == magnitude;
      indices[i] = first_index_ + position;
      values[i] = value;
      source_.take(position);
    }
    selection_.count += positions.size();
    if (HWY_LIKELY(most <= largest_finite_bits<V>)) {
      selection_.see(most);
    } else {
      for (V const value : std::span(values, positions.size())) {
        selection_.see(magnitude_bits(value));
      }
    }
    if (HWY_UNLIKELY(ties > selection_.ties)) {
      give_back_ties(begin);
    } else {
      selection_.ties -= ties;
    }
    if (source_.masks()) {
      for (std::size_t i = begin; i < selection_.count; ++i)
        source_.mask(selection_.indices[i] - first_index_);
    }
  }

  // The same where there is no room for all.
  void offer(std::span<const std::uint32_t> positions) {
    for (std::uint32_t const position : positions) {
      V const value = source_.settled(position);
      if (!selection_.offer(value, first_index_ + position)) continue;
      source_.take(position);
      if (source_.masks()) source_.mask(position);
    }
  }

  // Keeps, of the ties packed from `begin` on, the first that are wanted.
  void give_back_ties(std::size_t begin) {
    std::uint32_t* const indices = selection_.indices;
    V* const values = selection_.values;
    std::size_t count = begin;
    for (std::size_t i = begin; i < selection_.count; ++i) {
      if (magnitude_bits(values[i]) == selection_.magnitude) {
        if (selection_.ties == 0) {
          source_.give_back(indices[i] - first_index_, values[i]);
          continue;
        }
        --selection_.ties;
      }
      indices[count] = indices[i];
      values[count++] = values[i];
    }
    selection_.count = count;
  }

  Source const source_;
  Selection<V>& selection_;
  std::uint32_t const first_index_;
  std::array<std::uint32_t, block_entries + at_once> positions_;
};

struct VectorLoop {
  template <class Source, class V>
  static void run(Source const& source, std::size_t size, Selection<V>& selection,
                  std::uint32_t first_index) {
    VectorSelection<Source>(source, selection, first_index).run(size);
  }

  template <class Source, class V>
  static void send(Source const& source, std::size_t size, std::uint32_t first_index,
                   PackedSpan<V> out, SelectionStats<V>& stats) {
    hn::ScalableTag<V> const d;
    Signed<decltype(d)> const di;
    hn::Rebind<std::uint32_t, decltype(d)> const d32;
    using Bits = hn::TFromD<decltype(di)>;
    std::size_t const lanes = hn::Lanes(d);
    auto const finite = hn::Set(di, static_cast<Bits>(largest_finite_bits<V>));
    auto largest = hn::Zero(di), most = largest;
    std::size_t i = 0;
    for (; size - i >= lanes; i += lanes) {
      auto const value = load_values(d, source, i);
      auto const bits = magnitudes(d, value);
      most = hn::Max(most, bits);
      largest = hn::Max(largest, hn::IfThenZeroElse(hn::Gt(bits, finite), bits));
      settle_taken(d, source, i);
      hn::StoreU(value, d, out.values.data() + i);
      hn::StoreU(hn::Iota(d32, first_index + static_cast<std::uint32_t>(i)), d32,
                 out.indices.data() + i);
    }
    stats.finite = hn::AllFalse(di, hn::Gt(most, finite));
    stats.max_magnitude = from_magnitude_bits<V>(
        static_cast<magnitude_bits_t<V>>(hn::GetLane(hn::MaxOfLanes(di, largest))));
    send_range(source, i, size, first_index, out, stats);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();
#endif
