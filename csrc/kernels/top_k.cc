#include "kernels/top_k.h"

#include <algorithm>
#include <numeric>

#include "kernels/bracket.h"
#include "kernels/buckets.h"
#include "kernels/magnitude.h"
#include "kernels/selection.h"

namespace sparsecomm {
namespace {

constexpr std::size_t part_size = std::size_t{1} << 16;

// What was selected at the threshold of the k largest is all of them, or all that are not zero.
template <class T, class V>
std::size_t fill_with_zeros(std::span<const T> x, std::size_t count, std::size_t k,
                            PackedSpan<V> out) {
  std::size_t zeros = k - count;
  std::size_t place = 0;
  for (std::size_t i = 0; place < k; ++i) {
    V const value = widen(x[i]);
    if (magnitude_bits(value) == 0) {  // not ==, for which subnormals may be zeros
      if (zeros == 0) continue;
      --zeros;
    }
    out.indices[place] = static_cast<std::uint32_t>(i);
    out.values[place++] = value;
  }
  return k;
}

// The k largest of x, k < N, from those that a sample says may be among them. False: they are not
// enough or too many.
template <class T>
bool top_k_of_candidates(std::span<const Segment<T>> segments, std::span<const T> x, std::size_t k,
                         PackedSpan<accumulate_t<T>> out, TopKScratch<accumulate_t<T>>& scratch,
                         Executor const& executor, KernelTable<T> const& kernel) {
  using V = accumulate_t<T>;
  Bracket const bracket =
      sampled_bracket(segments, x.size(), k, scratch.threshold.magnitudes, executor, kernel);
  if (!bracket.narrow) return false;
  std::size_t const room = std::min<std::uint64_t>(bracket.most, x.size());
  PackedSpan<V> const candidates{scratch.indices.take(room), scratch.values.take(room)};
  Threshold<V> floor{from_magnitude_bits<V>(static_cast<magnitude_bits_t<V>>(bracket.low - 1)), 0};
  auto const found = select<T>(x, floor, 0, room, candidates, scratch.selection, executor, kernel);
  if (!found.complete || found.count < k) return false;

  Segment<V> const values{candidates.values.first(found.count), {}};
  auto const& packed = packed_kernels(kernel);
  Threshold<V> threshold =
      exact_threshold<V>(std::span(&values, 1), k, scratch.threshold, inline_executor(), packed);
  packed.select(values.gradient, threshold, 0, k, out);
  for (std::uint32_t& index : out.indices.first(k)) index = candidates.indices[index];
  return true;
}

}  // namespace

template <class T>
std::size_t exact_top_k(std::span<const T> x, std::uint64_t k, PackedSpan<accumulate_t<T>> out,
                        TopKScratch<accumulate_t<T>>& scratch, Executor const& executor,
                        KernelTable<T> const& kernel) {
  using V = accumulate_t<T>;
  require_packed_room<V>(x.size(), 0, k, out);
  std::size_t const wanted = std::min<std::uint64_t>(k, x.size());
  if (wanted == 0) return 0;
  if (wanted == x.size()) {
    for_each_part(executor, part_count(wanted, part_size), [&](std::size_t part, std::size_t) {
      std::size_t const begin = part * part_size;
      std::size_t const end = std::min(wanted, begin + part_size);
      std::iota(out.indices.begin() + begin, out.indices.begin() + end,
                static_cast<std::uint32_t>(begin));
      std::transform(x.begin() + begin, x.begin() + end, out.values.begin() + begin, widen<T>);
    });
    return wanted;
  }
  // Of a segment, thresholds only read.
  Segment<T> const all{{const_cast<T*>(x.data()), x.size()}, {}};
  std::span const segments(&all, 1);
  if (top_k_of_candidates<T>(segments, x, wanted, out, scratch, executor, kernel)) return wanted;
  Threshold<V> threshold =
      exact_threshold<T>(segments, wanted, scratch.threshold, executor, kernel);
  std::size_t const count =
      select<T>(x, threshold, 0, wanted, out, scratch.selection, executor, kernel).count;
  return count == wanted ? wanted : fill_with_zeros<T, V>(x, count, wanted, out);
}

template <class T>
void top_k_per_bucket(std::span<const T> x, std::size_t row, std::size_t bucket, std::size_t k,
                      PackedSpan<accumulate_t<T>> out, Executor const& executor,
                      KernelTable<T> const& kernel) {
  require(bucket >= 1 && bucket <= max_bucket, "buckets of ", bucket, " entries: choose 1 to ",
          max_bucket);
  require(row == 0 ? x.empty() : x.size() % row == 0, x.size(),
          " entries are not a number of rows of ", row);
  require(row <= std::uint64_t{1} << 32, "the entries of a row of ", row,
          " do not all have 32-bit indices; use shorter rows");
  std::uint64_t const row_count = bucket_top_k_count(row, bucket, k);
  std::uint64_t const count = row == 0 ? 0 : x.size() / row * row_count;
  require(out.indices.size() == count && out.values.size() == count, "the ", k, " largest of each ",
          bucket, " entries are ", count, ", but there is room for ", out.indices.size(),
          " indices and ", out.values.size(), " values");
  if (count == 0) return;
  // Whole buckets of one row.
  std::size_t const step = std::max(bucket, part_size - part_size % bucket);
  std::size_t const parts_per_row = part_count(row, step);
  for_each_part(executor, x.size() / row * parts_per_row, [&](std::size_t part, std::size_t) {
    std::size_t const number = part / parts_per_row;
    std::size_t const begin = part % parts_per_row * step;
    std::size_t const size = std::min(step, row - begin);
    std::size_t const place = number * row_count + bucket_top_k_count(begin, bucket, k);
    std::size_t const packed = bucket_top_k_count(size, bucket, k);
    kernel.top_k_of_buckets(
        x.subspan(number * row + begin, size), bucket, k, static_cast<std::uint32_t>(begin),
        {out.indices.subspan(place, packed), out.values.subspan(place, packed)});
  });
}

template <class T>
void top_k_of_rows(std::span<const T> x, std::size_t row, std::size_t k,
                   PackedSpan<accumulate_t<T>> out, TopKScratch<accumulate_t<T>>& scratch,
                   Executor const& executor, KernelTable<T> const& kernel) {
  std::size_t const each = std::min(k, row);
  std::size_t const rows = row == 0 ? 0 : x.size() / row;
  require(rows * row == x.size(), x.size(), " entries are not a number of rows of ", row);
  require_packed_room<accumulate_t<T>>(rows * each, 0, rows * each, out);
  if (row <= max_bucket) {
    top_k_per_bucket<T>(x, row, std::max<std::size_t>(row, 1), k,
                        {out.indices.first(rows * each), out.values.first(rows * each)}, executor,
                        kernel);
    return;
  }
  for (std::size_t i = 0; i < rows; ++i) {
    exact_top_k<T>(x.subspan(i * row, row), k,
                   {out.indices.subspan(i * each), out.values.subspan(i * each)}, scratch, executor,
                   kernel);
  }
}

#define SPARSECOMM_INSTANTIATE(T)                                                                  \
  template std::size_t exact_top_k(std::span<const T>, std::uint64_t, PackedSpan<accumulate_t<T>>, \
                                   TopKScratch<accumulate_t<T>>&, Executor const&,                 \
                                   KernelTable<T> const&);                                         \
  template void top_k_per_bucket(std::span<const T>, std::size_t, std::size_t, std::size_t,        \
                                 PackedSpan<accumulate_t<T>>, Executor const&,                     \
                                 KernelTable<T> const&);                                           \
  template void top_k_of_rows(std::span<const T>, std::size_t, std::size_t,                        \
                              PackedSpan<accumulate_t<T>>, TopKScratch<accumulate_t<T>>&,          \
                              Executor const&, KernelTable<T> const&)
SPARSECOMM_INSTANTIATE(float);
SPARSECOMM_INSTANTIATE(double);
SPARSECOMM_INSTANTIATE(Half);
SPARSECOMM_INSTANTIATE(BFloat16);
#undef SPARSECOMM_INSTANTIATE

}  // namespace sparsecomm
