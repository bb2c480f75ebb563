// What the scalar and the SIMD kernels share: the state of a selection and the entry at a time rule
// that defines it. The SIMD kernels fall back to that rule at the edges: tails, and the vector in
// which the ties or the room run out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "base/error.h"
#include "kernels/kernels.h"
#include "kernels/magnitude.h"
#include "kernels/scan.h"

namespace sparsecomm {

template <class V>
class Selection {
 public:
  using Bits = magnitude_bits_t<V>;

  Selection(Threshold<V> const& threshold, std::size_t size, std::uint32_t first_index,
            std::size_t limit, PackedSpan<V> out)
      : indices(out.indices.data()), values(out.values.data()), limit(limit) {
    std::size_t const most = std::min(limit, size);
    require(out.indices.size() == out.values.size() && out.indices.size() >= packed_slack &&
                out.indices.size() - packed_slack >= most,
            "a selection of up to ", most, " entries needs room for ", packed_slack,
            " more, but there is room for ", out.indices.size(), " indices and ", out.values.size(),
            " values");
    require(size <= (std::uint64_t{1} << 32) - first_index, "entries ", first_index, " to ",
            first_index + std::uint64_t{size}, " do not all have 32-bit indices");
    if (threshold.magnitude > 0) {
      magnitude = std::min(magnitude_bits(threshold.magnitude), largest_finite_bits<V>);
      ties = threshold.magnitude <= std::numeric_limits<V>::max() ? threshold.ties : 0;
      initial_ties = ties;
    } else {
      // Zeros never pass, so a threshold of zero has no ties; NaN, too, compares false.
      magnitude = threshold.magnitude <= 0 ? 0 : largest_finite_bits<V>;
    }
  }

  // Takes `value` when it passes and there is room; returns whether it was taken.
  bool offer(V value, std::uint32_t index) {
    Bits const bits = magnitude_bits(value);
    see(bits);
    bool const tie = ties > 0 && bits == magnitude;
    if (bits <= magnitude && !tie) return false;
    if (count == limit) {
      complete = false;
      return false;
    }
    indices[count] = index;
    values[count] = value;
    ++count;
    ties -= tie;
    return true;
  }

  void see(Bits bits) {
    if (bits > largest_finite_bits<V>) {
      finite = false;
    } else {
      largest = std::max(largest, bits);
    }
  }

  // Entries whose bits are no greater than this change nothing but `largest`.
  Bits ignored() const {
    if (!complete) return largest_finite_bits<V>;
    return ties > 0 ? magnitude - 1 : magnitude;
  }

  SelectionStats<V> finish(Threshold<V>& threshold) const {
    threshold.ties -= initial_ties - ties;
    return {count, from_magnitude_bits<V>(largest), finite, complete};
  }

  std::uint32_t* indices;
  V* values;
  std::size_t limit;
  Bits magnitude = 0;
  std::uint64_t ties = 0;
  std::uint64_t initial_ties = 0;
  std::size_t count = 0;
  Bits largest = 0;
  bool finite = true;
  bool complete = true;
};

// The two sources of a selection: value(i) is what is offered, settle(i, ...) what happens to it
// then. After settle(i, value, false), settled(i) is the value and take(i) makes it taken.
template <class T>
struct FusedSource {
  using Element = T;
  using V = accumulate_t<T>;

  T* gradient;
  V* residual;

  V value(std::size_t i) const { return residual[i] + widen(gradient[i]); }
  void settle(std::size_t i, V value, bool taken) const {
    residual[i] = taken ? V{0} : value;
    gradient[i] = T{};
  }
  V settled(std::size_t i) const { return residual[i]; }
  void take(std::size_t i) const { residual[i] = 0; }
};

template <class T>
struct ReadOnly {
  using Element = T;
  using V = accumulate_t<T>;

  T const* x;

  V value(std::size_t i) const { return widen(x[i]); }
  void settle(std::size_t, V, bool) const {}
  V settled(std::size_t i) const { return value(i); }
  void take(std::size_t) const {}
};

template <class Source, class V>
void offer_range(Source const& source, Selection<V>& selection, std::size_t begin, std::size_t end,
                 std::uint32_t first_index) {
  for (std::size_t i = begin; i < end; ++i) {
    V const value = source.value(i);
    source.settle(i, value, selection.offer(value, first_index + static_cast<std::uint32_t>(i)));
  }
}

// A kernel's two entry points from its loop: Loop::run(source, size, selection, first_index).
template <class T, class Loop>
SelectionStats<accumulate_t<T>> fused_error_feedback_by(std::span<T> gradient,
                                                        std::span<accumulate_t<T>> residual,
                                                        Threshold<accumulate_t<T>>& threshold,
                                                        std::uint32_t first_index,
                                                        std::size_t limit,
                                                        PackedSpan<accumulate_t<T>> out) {
  require_same_size(gradient.size(), residual.size());
  Selection<accumulate_t<T>> selection(threshold, gradient.size(), first_index, limit, out);
  FusedSource<T> const source{gradient.data(), residual.data()};
  Loop::run(source, gradient.size(), selection, first_index);
  return selection.finish(threshold);
}

template <class T, class Loop>
SelectionStats<accumulate_t<T>> select_by(std::span<const T> x,
                                          Threshold<accumulate_t<T>>& threshold,
                                          std::uint32_t first_index, std::size_t limit,
                                          PackedSpan<accumulate_t<T>> out) {
  Selection<accumulate_t<T>> selection(threshold, x.size(), first_index, limit, out);
  Loop::run(ReadOnly<T>{x.data()}, x.size(), selection, first_index);
  return selection.finish(threshold);
}

}  // namespace sparsecomm
