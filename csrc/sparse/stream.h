// Sparse streams: sorted distinct indices with their values, or, past delta, dense (SparCML
// section 5.1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "sparse/reduction.h"

namespace sparsecomm {

// A borrowed sparse vector: strictly increasing indices, one value each. V is float, double,
// std::int32_t or std::int64_t.
template <class V>
struct SparseView {
  std::span<const std::uint32_t> indices;
  std::span<const V> values;

  std::size_t nnz() const { return indices.size(); }
  SparseView slice(std::size_t begin, std::size_t end) const {
    return {indices.subspan(begin, end - begin), values.subspan(begin, end - begin)};
  }
  // The entries with first <= index < last. O(log nnz). `last` is 64-bit: a range may end at 2^32.
  SparseView range(std::uint64_t first, std::uint64_t last) const;
};

// A borrowed vector in either form.
template <class V>
struct StreamView {
  SparseView<V> sparse{};      // empty when dense
  std::span<const V> dense{};  // all values, the neutral element where there is no entry
  bool is_dense = false;

  std::size_t nnz() const { return is_dense ? dense.size() : sparse.nnz(); }
};

// SparCML's switch point: the most non-zeros of [0, extent) that are not larger as index-value
// pairs than the dense vector is, extent * sizeof(V) / (4 + sizeof(V)) (SparCML section 5.1).
template <class V>
std::uint64_t default_delta(std::uint64_t extent);

// A running reduction over [first_index, first_index + extent). Its storage is kept between uses:
// after the first one of a size nothing is allocated.
template <class V>
class SparseStream {
 public:
  // Empties the stream and gives it a range. delta: the non-zeros above which it turns dense.
  void reset(std::uint32_t first_index, std::uint64_t extent, std::uint64_t delta,
             Reduction reduction = Reduction::sum);
  void reset(std::uint32_t first_index, std::uint64_t extent) {
    reset(first_index, extent, default_delta<V>(extent));
  }

  // Combines with a sparse vector whose indices lie in the range. O(nnz of both). Turns dense when
  // the upper bound on the non-zeros, nnz() + view.nnz(), exceeds delta. Entries that become the
  // neutral element (sums that cancel) stay entries of a sparse stream. Throws InvalidArgument when
  // the first or last index lies outside the range. The view must not be of this stream.
  void add(SparseView<V> view);

  bool is_dense() const { return dense_; }
  // Combines with all `extent` values; the stream turns dense. Where it had no entry it takes the
  // bits given.
  void add_dense(std::span<const V> values);
  void add_stream(StreamView<V> const& view) {
    view.is_dense ? add_dense(view.dense) : add(view.sparse);
  }

  std::size_t nnz() const;  // of a dense stream: its extent
  // In the form it has. Valid until the stream changes.
  StreamView<V> view() const;
  // As sorted pairs; a dense stream is compacted first (neutral elements dropped) and becomes
  // sparse. Valid until the stream changes.
  SparseView<V> sparse();
  // As all `extent` values; a sparse stream is expanded first. Valid until the stream
  // changes.
  std::span<const V> dense();

 private:
  void densify();
  void grow(std::size_t nnz);
  SparseView<V> pairs() const;

  std::uint32_t first_index_ = 0;
  std::uint64_t extent_ = 0;
  std::uint64_t delta_ = 0;
  Reduction reduction_ = Reduction::sum;
  bool dense_ = false;
  std::size_t nnz_ = 0;  // of the sparse form; the vectors below are storage and may be longer
  std::vector<std::uint32_t> indices_, merged_indices_;
  std::vector<V> values_, merged_values_;
  std::vector<V> dense_values_;
};

// Combines two sorted streams; returns how many entries it has written, for which there must be
// room: as many as both have together. O(nnz of both).
template <class V>
std::size_t merge(SparseView<V> a, SparseView<V> b, Reduction reduction, std::uint32_t* indices,
                  V* values);

}  // namespace sparsecomm
