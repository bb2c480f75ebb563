// What the scalar and the SIMD kernels share: the state of a selection and the entry at a time rule
// that defines it. The SIMD kernels fall back to that rule at the edges: tails, and the block in
// which the room runs out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "base/error.h"
#include "kernels/kernels.h"
#include "kernels/magnitude.h"
#include "kernels/sources.h"

namespace sparsecomm {

template <class V>
void require_packed_room(std::size_t size, std::uint32_t first_index, std::size_t limit,
                         PackedSpan<V> const& out) {
  std::size_t const most = std::min(limit, size);
  require(out.indices.size() == out.values.size() && out.indices.size() >= most,
          "a selection of up to ", most, " entries needs room for as many, but there is room for ",
          out.indices.size(), " indices and ", out.values.size(), " values");
  require(size <= (std::uint64_t{1} << 32) - first_index, "entries ", first_index, " to ",
          first_index + std::uint64_t{size}, " do not all have 32-bit indices");
}

template <class V>
class Selection {
 public:
  using Bits = magnitude_bits_t<V>;

  Selection(Threshold<V> const& threshold, std::size_t size, std::uint32_t first_index,
            std::size_t limit, PackedSpan<V> out)
      : indices(out.indices.data()), values(out.values.data()), limit(limit) {
    require_packed_room(size, first_index, limit, out);
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

template <class Source, class V>
void offer_range(Source const& source, Selection<V>& selection, std::size_t begin, std::size_t end,
                 std::uint32_t first_index) {
  for (std::size_t i = begin; i < end; ++i) {
    V const value = source.value(i);
    source.settle(i, value, selection.offer(value, first_index + static_cast<std::uint32_t>(i)));
  }
}

// Packs the entries from `begin` on, all of them.
template <class Source, class V>
void send_range(Source const& source, std::size_t begin, std::size_t end, std::uint32_t first_index,
                PackedSpan<V> out, SelectionStats<V>& stats) {
  for (std::size_t i = begin; i < end; ++i) {
    V const value = source.value(i);
    source.settle(i, value, true);
    out.indices[i] = first_index + static_cast<std::uint32_t>(i);
    out.values[i] = value;
    if (magnitude_bits(value) > largest_finite_bits<V>) {
      stats.finite = false;
    } else {
      stats.max_magnitude = std::max(stats.max_magnitude, std::abs(value));
    }
  }
}

// A kernel's entry points from its loop: Loop::run(source, size, selection, first_index) and
// Loop::send(source, size, first_index, out, stats).
template <class T, class Loop>
SelectionStats<accumulate_t<T>> fused_error_feedback_by(FusedArguments<T> const& arguments,
                                                        Threshold<accumulate_t<T>>& threshold,
                                                        std::uint32_t first_index,
                                                        std::size_t limit,
                                                        PackedSpan<accumulate_t<T>> out) {
  Selection<accumulate_t<T>> selection(threshold, arguments.gradient.size(), first_index, limit,
                                       out);
  visit_source(arguments, [&](auto const& source) {
    Loop::run(source, arguments.gradient.size(), selection, first_index);
  });
  return selection.finish(threshold);
}

template <class T, class Loop>
SelectionStats<accumulate_t<T>> send_all_by(FusedArguments<T> const& arguments,
                                            std::uint32_t first_index,
                                            PackedSpan<accumulate_t<T>> out) {
  std::size_t const size = arguments.gradient.size();
  require_packed_room(size, first_index, size, out);
  SelectionStats<accumulate_t<T>> stats{.count = size};
  visit_source(arguments,
               [&](auto const& source) { Loop::send(source, size, first_index, out, stats); });
  return stats;
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
