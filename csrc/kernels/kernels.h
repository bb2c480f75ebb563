// The loops over N. Each kernel has a scalar oracle and a SIMD version (Highway, dispatched at run
// time) with the same bits as a result, but for the payload of a NaN; one table (kernel_tables)
// holds both, and one differential test covers all.
//
// T is the element type of a gradient (float, double, Half, BFloat16), V = accumulate_t<T> the type
// of residuals and packed values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/executor.h"

namespace sparsecomm {

// What is selected: every entry with |a| > magnitude and, lowest index first, `ties` of those with
// |a| == magnitude. Zeros are never selected; a NaN or Inf always is.
template <class V>
struct Threshold {
  V magnitude = 0;
  std::uint64_t ties = 0;
};

// Part of a gradient with the residual of the same entries. A gradient is a list of segments, in
// index order; segment s starts at the sum of the sizes before it. Both spans have the same size
// and do not overlap. For thresholds, which only read, the residual may be empty: zeros.
template <class T>
struct Segment {
  std::span<T> gradient;
  std::span<accumulate_t<T>> residual;
};

// Where a selection goes. The capacity is indices.size() == values.size().
template <class V>
struct PackedSpan {
  std::span<std::uint32_t> indices;
  std::span<V> values;
};

// What fused error feedback works on. Without momentum the entries are
//   a = residual + scale * gradient
// and with momentum correction
//   u = factor * u + scale * gradient,   a = v + u
// or, with `nesterov`,   a = v + (scale * gradient + factor * u)   of the new u,
// where `momentum` holds u and `residual` holds v. What is taken leaves a zero in v and, where
// mask_momentum says so (factor masking), in u. Source: Lin et al. 2018 (Deep Gradient
// Compression), sections 3.1 and 3.2.
template <class T>
struct FusedArguments {
  using V = accumulate_t<T>;
  std::span<T> gradient;
  std::span<V> residual;  // of the same size
  V scale = 1;
  std::span<V> momentum = {};  // of the same size; empty: no momentum correction
  V factor = 0;
  bool mask_momentum = true;
  bool nesterov = false;
};

template <class V>
struct SelectionStats {
  std::size_t count = 0;  // entries packed
  V max_magnitude = 0;    // largest finite |a| seen
  bool finite = true;     // false when any a was NaN or Inf
  bool complete = true;   // false when `limit` was reached and passing entries stayed behind
};

// The most entries of a bucket of which the k largest are found.
inline constexpr std::size_t max_bucket = 4096;

// How many entries that packs for `size` entries in buckets: min(k, bucket) of each, of which the
// last may be smaller.
constexpr std::uint64_t bucket_top_k_count(std::uint64_t size, std::uint64_t bucket,
                                           std::uint64_t k) {
  return size / bucket * std::min(k, bucket) + std::min(k, size % bucket);
}

// The most bins of one magnitude_histogram.
inline constexpr std::size_t histogram_bins = 2048;

// The partial sums that moments are added up in, everywhere alike: entry i goes to lane i %
// moment_lanes, and then the upper half of the lanes to the lower one, until one is left.
inline constexpr std::size_t moment_lanes = 16;

struct Moments {
  double sum = 0;
  double squares = 0;

  Moments& operator+=(Moments const& other) {
    sum += other.sum;
    squares += other.squares;
    return *this;
  }
};

// One instruction set's kernels for one element type.
template <class T>
struct KernelTable {
  using V = accumulate_t<T>;
  std::string_view target;

  // True when no entry is NaN or Inf. Reads N.
  bool (*all_finite)(std::span<const T> x);

  // Fused error feedback, one pass: entries a, as FusedArguments says, that pass the threshold are
  // packed as (first_index + position, a) in index order and their residual becomes +0; every other
  // residual becomes a; the gradient becomes +0. At most `limit` entries are packed (out holds
  // min(limit, N)): what no longer fits stays in the residual. threshold.ties is decremented by the
  // ties taken, so that segments chain. Reads 2N, writes 2N; 3N with momentum. Source: Ok-Topk
  // Algorithm 2 lines 4-6.
  SelectionStats<V> (*fused_error_feedback)(FusedArguments<T> const& arguments,
                                            Threshold<V>& threshold, std::uint32_t first_index,
                                            std::size_t limit, PackedSpan<V> out);

  // The same with every entry packed, zeros too: for ranges that are always sent. `out` holds all
  // of them.
  SelectionStats<V> (*send_all)(FusedArguments<T> const& arguments, std::uint32_t first_index,
                                PackedSpan<V> out);

  // The selection of fused_error_feedback of x itself, which stays as it is. Reads N.
  SelectionStats<V> (*select)(std::span<const T> x, Threshold<V>& threshold,
                              std::uint32_t first_index, std::size_t limit, PackedSpan<V> out);

  // Packs the k largest entries of each bucket of x, as top_k.h says which they are. `out` has room
  // for bucket_top_k_count(x.size(), bucket, k) and no more. Reads N.
  void (*top_k_of_buckets)(std::span<const T> x, std::size_t bucket, std::size_t k,
                           std::uint32_t first_index, PackedSpan<V> out);

  // Of these four, the residual may be empty: then they read the gradient alone.
  //
  // Adds to counts[b] the number of entries of |gradient + residual| whose bit pattern (of float or
  // double, sign cleared), shifted right by `shift` and less `base`, is b < counts.size(); others
  // go uncounted. At most histogram_bins counts. The radix passes of exact_threshold.
  void (*magnitude_histogram)(std::span<const T> gradient, std::span<const V> residual,
                              unsigned shift, std::uint64_t base, std::span<std::uint64_t> counts);

  // Appends to `out`, in index order, every |gradient + residual| whose bit pattern lies in [low,
  // high), and returns how many bit patterns are `high` or above.
  std::uint64_t (*collect_magnitudes)(std::span<const T> gradient, std::span<const V> residual,
                                      std::uint64_t low, std::uint64_t high, std::vector<V>& out);

  // out[i * run + j] = |gradient + residual| of entry starts[i] + j, for j < run. Every run must
  // lie in the gradient; `out` holds all of them. Reads what it writes.
  void (*gather_magnitudes)(std::span<const T> gradient, std::span<const V> residual,
                            std::span<const std::size_t> starts, std::size_t run, std::span<V> out);

  // The sums of gradient + residual and of its squares, in double. Reads 2N.
  Moments (*moments)(std::span<const T> gradient, std::span<const V> residual);
};

// The fastest table this machine can run, and all that it can run (scalar first).
template <class T>
KernelTable<T> const& kernels();
template <class T>
std::span<KernelTable<T> const> kernel_tables();

// The instruction set's table for the type that T's entries are packed in.
template <class T>
KernelTable<accumulate_t<T>> const& packed_kernels(KernelTable<T> const& kernel);

// What exact_threshold and sampled_threshold keep between calls, so that they need not allocate.
template <class V>
struct ThresholdScratch {
  std::vector<V> magnitudes;
  std::vector<std::vector<V>> of_workers;
};

// The threshold that selects exactly min(k, non-zeros) entries of gradient + residual: the k-th
// largest magnitude, with as many ties as make up k. Entries that are not finite count, and are
// selected even where they are more than k. Throws InvalidArgument unless 1 <= k. Reads 2N once, as
// a rule: a sample brackets the threshold and one pass collects what lies in the bracket; where
// ties or the sample defeat that, up to 3 passes more (6 for double).
template <class T>
Threshold<accumulate_t<T>> exact_threshold(std::span<const Segment<T>> segments, std::uint64_t k,
                                           ThresholdScratch<accumulate_t<T>>& scratch,
                                           Executor const& executor = inline_executor(),
                                           KernelTable<T> const& kernel = kernels<T>());

// The smallest sample that sampled_threshold takes.
inline constexpr std::size_t minimum_sample = 4096;

// A sample is made of runs of this many neighbours, a cache line of float: what costs time is to
// fetch the line.
inline constexpr std::size_t sample_run = 16;

// The run that stands for the i-th `stride` runs of a sample: one at a place of its own, so that a
// pattern that repeats in the gradient cannot mislead. Another `phase` gives other places.
constexpr std::size_t sampled_run(std::size_t i, std::size_t stride, std::size_t phase) {
  std::uint64_t const mixed = (i + 1) * 0x9e3779b97f4a7c15u + phase * 0xd1342543de82ef95u;
  return i * stride + ((mixed >> 32) * stride >> 32);
}

// The stride that sampled_threshold settles on for `size` entries; 0 where it answers with
// exact_threshold.
std::size_t sampled_stride(std::size_t size, std::uint64_t k, std::size_t stride);

// An estimate of exact_threshold from one run of sample_run entries of gradient + residual in
// `stride` (those that sampled_run says): the magnitude of rank k / stride of the sample, and ties
// by the same proportion. The stride is reduced so that 1,250 entries of the sample lie above the
// threshold: the count it leads to is then within 10% of k in 98 of 100 cases, unless k is made up
// of few long runs. Where that takes a stride under 4, or the sample holds fewer than
// minimum_sample entries, exact_threshold answers instead, so that small inputs are exact. Reads N
// / stride.
template <class T>
Threshold<accumulate_t<T>> sampled_threshold(std::span<const Segment<T>> segments, std::uint64_t k,
                                             std::size_t stride, std::size_t phase,
                                             ThresholdScratch<accumulate_t<T>>& scratch,
                                             Executor const& executor = inline_executor(),
                                             KernelTable<T> const& kernel = kernels<T>());

// The threshold that k of the entries of gradient + residual would exceed in magnitude if they were
// normally distributed with the mean and the deviation they have, lowered (by 1/64 of an octave at
// a time) until more than 3/4 k pass. Where the distribution has lighter tails than a normal one it
// takes many steps down, where it has heavier ones more than k pass. Throws InvalidArgument unless
// 1 <= k. Reads 2N twice. Source: Shi et al. 2019 (Gaussian-k), Ok-Topk section 5.4.
template <class T>
Threshold<accumulate_t<T>> gaussian_threshold(std::span<const Segment<T>> segments,
                                              std::uint64_t k);

// z such that a standard normal variable exceeds z with this probability, in (0, 1/2].
double upper_normal_quantile(double probability);

// destination[indices[i] - first_index] = T(values[i] / divisor). Throws InvalidArgument, before it
// writes anything, unless every index lies in the destination.
template <class T>
void scatter(std::span<T> destination, std::span<const std::uint32_t> indices,
             std::span<const accumulate_t<T>> values, accumulate_t<T> divisor,
             std::uint32_t first_index);

}  // namespace sparsecomm
