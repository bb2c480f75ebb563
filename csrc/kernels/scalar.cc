#include "kernels/scalar.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "kernels/blocks.h"
#include "kernels/buckets.h"
#include "kernels/magnitude.h"
#include "kernels/scan.h"
#include "kernels/selection.h"

namespace sparsecomm {
namespace {

struct ScalarLoop {
  template <class Source, class V>
  static void run(Source const& source, std::size_t size, Selection<V>& selection,
                  std::uint32_t first_index) {
    offer_range(source, selection, 0, size, first_index);
  }
  template <class Source, class V>
  static void send(Source const& source, std::size_t size, std::uint32_t first_index,
                   PackedSpan<V> out, SelectionStats<V>& stats) {
    send_range(source, 0, size, first_index, out, stats);
  }
};

template <class T>
void top_k_of_buckets(std::span<const T> x, std::size_t bucket, std::size_t k,
                      std::uint32_t first_index, PackedSpan<accumulate_t<T>> out) {
  require_buckets(x.size(), bucket, k, first_index, out);
  std::vector<std::uint32_t> order(bucket);
  std::size_t place = 0;
  for (std::size_t begin = 0; begin < x.size(); begin += bucket) {
    auto const entries = x.subspan(begin, std::min(bucket, x.size() - begin));
    order.resize(entries.size());
    std::iota(order.begin(), order.end(), 0u);
    auto const count = static_cast<std::ptrdiff_t>(std::min(k, entries.size()));
    std::nth_element(order.begin(), order.begin() + count, order.end(),
                     [&](std::uint32_t a, std::uint32_t b) {
                       auto const left = rank_bits(widen(entries[a]));
                       auto const right = rank_bits(widen(entries[b]));
                       return left != right ? left > right : a < b;
                     });
    order.resize(static_cast<std::size_t>(count));
    std::sort(order.begin(), order.end());
    for (std::uint32_t const position : order) {
      out.indices[place] = first_index + static_cast<std::uint32_t>(begin) + position;
      out.values[place++] = widen(entries[position]);
    }
  }
}

template <class T>
void magnitude_histogram(std::span<const T> gradient, std::span<const accumulate_t<T>> residual,
                         unsigned shift, std::uint64_t base, std::span<std::uint64_t> counts) {
  require_bins(counts.size());
  visit_sum(gradient, residual, [&](auto const& source) {
    count_range(source, 0, gradient.size(), shift, base, counts);
  });
}

template <class T>
std::uint64_t collect_magnitudes(std::span<const T> gradient,
                                 std::span<const accumulate_t<T>> residual, std::uint64_t low,
                                 std::uint64_t high, std::vector<accumulate_t<T>>& out) {
  return visit_sum(gradient, residual, [&](auto const& source) {
    return collect_range(source, 0, gradient.size(), low, high, out);
  });
}

template <class T>
void gather_magnitudes(std::span<const T> gradient, std::span<const accumulate_t<T>> residual,
                       std::span<const std::size_t> starts, std::size_t run,
                       std::span<accumulate_t<T>> out) {
  visit_sum(gradient, residual, [&](auto const& source) {
    auto to = out.begin();
    for (std::size_t const start : starts) {
      for (std::size_t i = 0; i < run; ++i) *to++ = std::abs(source.value(start + i));
    }
  });
}

template <class T>
Moments moments(std::span<const T> gradient, std::span<const accumulate_t<T>> residual) {
  MomentLanes lanes;
  visit_sum(gradient, residual,
            [&](auto const& source) { lanes.add_range(source, 0, gradient.size()); });
  return lanes.total();
}

template <class T, class Combination>
void combine_all(std::span<float> wide, std::byte const* elements) {
  combine_range<T, Combination>(wide, elements, 0);
}

}  // namespace

template <class T>
KernelTable<T> scalar_kernels() {
  return {"scalar",
          all_finite_range<T>,
          fused_error_feedback_by<T, ScalarLoop>,
          send_all_by<T, ScalarLoop>,
          select_by<T, ScalarLoop>,
          top_k_of_buckets<T>,
          magnitude_histogram<T>,
          collect_magnitudes<T>,
          gather_magnitudes<T>,
          moments<T>};
}

BlockKernelTable scalar_block_kernels() {
  return {"scalar",
          [](std::span<const std::byte> bytes, std::size_t block_bytes,
             std::span<std::uint64_t> bitmap) {
            require_blocks(bytes.size(), block_bytes, bitmap.size());
            return nonzero_block_range(bytes, block_bytes, 0, bitmap);
          },
          [](std::span<const std::byte> bytes, std::size_t block_bytes, std::uint64_t first,
             std::span<std::byte> slots, std::span<std::uint32_t> numbers) {
            require_walk(bytes.size(), block_bytes, first, slots.size(), numbers.size());
            return copy_nonzero_range(bytes, block_bytes, {.next = first}, slots, numbers);
          }};
}

IntersectKernelTable scalar_intersect_kernels() {
  return {"scalar",
          [](std::span<const std::uint32_t> one, std::span<const std::uint32_t> other,
             std::uint32_t* positions) { return intersect_range(one, other, 0, 0, positions, 0); }};
}

template <class T>
HalfKernelTable<T> scalar_half_kernels() {
  return {
      "scalar",
      [](std::span<float> wide, std::byte const* elements) { widen_range<T>(wide, elements, 0); },
      [](std::byte* elements, std::span<const float> wide) { narrow_range<T>(elements, wide, 0); },
      combine_all<T, WideSum>,
      combine_all<T, WideProduct>,
      combine_all<T, WideMin>,
      combine_all<T, WideMax>};
}

template HalfKernelTable<Half> scalar_half_kernels();
template HalfKernelTable<BFloat16> scalar_half_kernels();
template KernelTable<float> scalar_kernels();
template KernelTable<double> scalar_kernels();
template KernelTable<Half> scalar_kernels();
template KernelTable<BFloat16> scalar_kernels();

}  // namespace sparsecomm
