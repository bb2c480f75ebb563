// The selection kernels over vectors. Included once per instruction set.
#if defined(SPARSECOMM_KERNELS_SELECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_KERNELS_SELECT_INL_H_
#undef SPARSECOMM_KERNELS_SELECT_INL_H_
#else
#define SPARSECOMM_KERNELS_SELECT_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/selection.h"
#include "kernels/sources-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

// Per block two phases, neither with a branch that depends on the data at usual densities. Vectors
// find the entries that pass and pack their indices; then those entries, few and in the cache, are
// taken one by one, which settles whatever is special about them: ties, and values that are not
// finite.
template <class Source>
class VectorSelection {
  using V = typename Source::V;
  using D = hn::ScalableTag<V>;
  using BitsVec = hn::Vec<Signed<D>>;
  static constexpr std::size_t block_entries = 2048;

 public:
  VectorSelection(Source const& source, Selection<V>& selection, std::uint32_t first_index)
      : source_(source),
        selection_(selection),
        indices_(selection.indices),
        values_(selection.values),
        first_index_(first_index) {}

  void run(std::size_t size) {
    D const d;
    Signed<D> const di;
    std::size_t const lanes = hn::Lanes(d);
    std::size_t const group = 4 * lanes;
    std::size_t const limit = selection_.limit;
    BitsVec largest = hn::Zero(di);
    std::size_t i = 0;
    while (size - i >= group) {
      std::size_t const left = std::min(size - i, block_entries);
      std::size_t const end = i + left - left % group;
      BitsVec ignored = broadcast(selection_.ignored());
      std::size_t found = selection_.count;
      for (; i < end; i += group) {
        if (HWY_UNLIKELY(limit - found < group)) {
          take(found);
          offer_group(i, group);
          ignored = broadcast(selection_.ignored());
          found = selection_.count;
          continue;
        }
        prefetch(source_, i);
        find(i, ignored, largest, found);
        find(i + lanes, ignored, largest, found);
        find(i + 2 * lanes, ignored, largest, found);
        find(i + 3 * lanes, ignored, largest, found);
      }
      take(found);
    }
    selection_.see(static_cast<Bits>(hn::GetLane(hn::MaxOfLanes(di, largest))));
    offer_range(source_, selection_, i, size, first_index_);
  }

 private:
  using Bits = magnitude_bits_t<V>;

  static HWY_INLINE BitsVec broadcast(Bits bits) {
    return hn::Set(Signed<D>(), static_cast<hn::TFromD<Signed<D>>>(bits));
  }

  // Settles a vector as if nothing passed and packs the indices of what does.
  HWY_INLINE void find(std::size_t i, BitsVec ignored, BitsVec& largest, std::size_t& found) const {
    D const d;
    Signed<D> const di;
    auto const value = load_values(d, source_, i);
    BitsVec const bits = magnitudes(d, value);
    auto const pass = hn::Gt(bits, ignored);
    largest = hn::Max(largest, hn::IfThenZeroElse(pass, bits));
    settle_vector(d, source_, i, value);
    store_set_lanes(d, hn::RebindMask(d, pass), first_index_ + static_cast<std::uint32_t>(i),
                    indices_ + found);
    found += hn::CountTrue(di, pass);
  }

  // Takes the entries found since the last time, or of the ties among them as many as are wanted.
  void take(std::size_t found) {
    std::size_t const begin = selection_.count;
    Bits const magnitude = selection_.magnitude;
    Bits most = 0;
    std::size_t ties = 0;
    for (std::size_t i = begin; i < found; ++i) {
      std::size_t const position = indices_[i] - first_index_;
      V const value = source_.settled(position);
      Bits const bits = magnitude_bits(value);
      most = std::max(most, bits);
      ties += bits == magnitude;
      values_[i] = value;
      source_.take(position);
    }
    if (HWY_LIKELY(most <= largest_finite_bits<V>)) {
      selection_.see(most);
    } else {
      for (std::size_t i = begin; i < found; ++i) selection_.see(magnitude_bits(values_[i]));
    }
    selection_.count = found;
    if (HWY_UNLIKELY(ties > selection_.ties)) {
      give_back_ties(begin);
    } else {
      selection_.ties -= ties;
    }
    if (source_.masks()) {
      for (std::size_t i = begin; i < selection_.count; ++i)
        source_.mask(indices_[i] - first_index_);
    }
  }

  // Keeps, of the ties packed from `begin` on, the first that are wanted.
  void give_back_ties(std::size_t begin) {
    std::size_t count = begin;
    for (std::size_t i = begin; i < selection_.count; ++i) {
      if (magnitude_bits(values_[i]) == selection_.magnitude) {
        if (selection_.ties == 0) {
          source_.give_back(indices_[i] - first_index_, values_[i]);
          continue;
        }
        --selection_.ties;
      }
      indices_[count] = indices_[i];
      values_[count++] = values_[i];
    }
    selection_.count = count;
  }

  // A group for which there may not be room.
  void offer_group(std::size_t begin, std::size_t size) {
    D const d;
    Signed<D> const di;
    BitsVec most = hn::Zero(di);
    for (std::size_t i = begin; i < begin + size; i += hn::Lanes(d)) {
      most = hn::Max(most, magnitudes(d, load_values(d, source_, i)));
    }
    auto const bits = static_cast<Bits>(hn::GetLane(hn::MaxOfLanes(di, most)));
    if (bits > selection_.ignored()) {
      offer_range(source_, selection_, begin, begin + size, first_index_);
      return;
    }
    selection_.see(bits);
    for (std::size_t i = begin; i < begin + size; i += hn::Lanes(d)) {
      settle_vector(d, source_, i, load_values(d, source_, i));
    }
  }

  Source const source_;
  Selection<V>& selection_;
  std::uint32_t* const indices_;
  V* const values_;
  std::uint32_t const first_index_;
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
