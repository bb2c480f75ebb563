// The k entries of largest magnitude, exactly k: of all entries, of each row, or of each bucket of
// a few hundred consecutive ones.
//
// Which they are: entries that are not finite come first, all alike, then finite ones by magnitude;
// among equals the lowest index comes first. Zeros count, so that k entries are chosen wherever
// there are k. They are packed in index order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/executor.h"
#include "kernels/kernels.h"
#include "kernels/parallel.h"

namespace sparsecomm {

template <class V>
struct TopKScratch {
  ThresholdScratch<V> threshold;
  SelectionScratch<V> selection;
  Buffer<std::uint32_t> indices;
  Buffer<V> values;
};

// Packs min(k, N) entries of x and returns how many; `out` holds as many at least. At most 2^32
// entries. Reads N once, as a rule: a sample says what is surely not among the k largest, one pass
// packs the rest, of which the k largest are taken. Where ties or the sample defeat that, up to 5
// passes (8 for double).
template <class T>
std::size_t exact_top_k(std::span<const T> x, std::uint64_t k, PackedSpan<accumulate_t<T>> out,
                        TopKScratch<accumulate_t<T>>& scratch,
                        Executor const& executor = inline_executor(),
                        KernelTable<T> const& kernel = kernels<T>());

// Packs, for each row of `row` entries of x, the k largest of each bucket of `bucket` consecutive
// entries; `out` holds bucket_top_k_count(row, bucket, k) entries for each row, row behind row, and
// an index counts from the start of its row. Throws InvalidArgument unless 1 <= bucket <=
// max_bucket, x is a number of whole rows of at most 2^32 entries, and `out` has that size. Reads N
// once. Source: Renggli et al. 2019 (SparCML), section 8 (8 or 16 of each 512 entries).
template <class T>
void top_k_per_bucket(std::span<const T> x, std::size_t row, std::size_t bucket, std::size_t k,
                      PackedSpan<accumulate_t<T>> out, Executor const& executor = inline_executor(),
                      KernelTable<T> const& kernel = kernels<T>());

// Packs the min(k, row) largest entries of each row of `row` entries of x, row behind row; an index
// counts from the start of its row.
template <class T>
void top_k_of_rows(std::span<const T> x, std::size_t row, std::size_t k,
                   PackedSpan<accumulate_t<T>> out, TopKScratch<accumulate_t<T>>& scratch,
                   Executor const& executor = inline_executor(),
                   KernelTable<T> const& kernel = kernels<T>());

}  // namespace sparsecomm
