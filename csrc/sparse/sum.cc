#include "sparse/sum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "kernels/index_set.h"

namespace sparsecomm {
namespace {

// Two streams are merged sooner.
constexpr std::size_t few_streams = 2;
constexpr std::size_t block_entries = 1024;

}  // namespace

template <class V>
void SparseSum<V>::reset(std::uint32_t first_index, std::uint64_t extent) {
  std::uint64_t const index_space = std::uint64_t{1} << 32;
  require(extent <= index_space - first_index, "SparseSum: extent is ", extent,
          ", must be at most 2^32 - first_index = ", index_space - first_index);
  first_index_ = first_index;
  extent_ = extent;
  ends_.clear();
  indices_.clear();
  values_.clear();
}

template <class V>
void SparseSum<V>::add(SparseView<V> view) {
  add_from([&](auto& indices, auto& values) {
    indices.insert(indices.end(), view.indices.begin(), view.indices.end());
    values.insert(values.end(), view.values.begin(), view.values.end());
  });
}

template <class V>
void SparseSum<V>::take() {
  std::size_t const begin = ends_.empty() ? 0 : ends_.back();
  bool const fits = indices_.size() == values_.size();
  bool const empty = indices_.size() == begin;
  std::uint64_t const end = first_index_ + extent_;
  if (fits && (empty || (indices_[begin] >= first_index_ && indices_.back() < end))) {
    if (!empty) ends_.push_back(indices_.size());
    return;
  }
  std::size_t const nnz = indices_.size() - begin;
  std::size_t const values = values_.size() - begin;
  std::uint32_t const first = empty ? 0 : indices_[begin];
  std::uint32_t const last = empty ? 0 : indices_.back();
  indices_.resize(begin);
  values_.resize(begin);
  require(nnz == values, "SparseSum: ", nnz, " indices but ", values, " values");
  throw InvalidArgument(concat("SparseSum: indices from ", first, " to ", last, " lie outside [",
                               first_index_, ", ", end, ")"));
}

template <class V>
SparseView<V> SparseSum<V>::sum() {
  if (ends_.size() <= 1) return {indices_, values_};
  if (sum_indices_.size() < indices_.size()) {
    sum_indices_.resize(indices_.size());
    sum_values_.resize(indices_.size());
  }
  // A word of the bitmap costs about what merging an entry once does.
  std::size_t const merges = std::bit_width(ends_.size() - 1);
  bool const crowded = ends_.size() > few_streams && extent_ / 64 <= merges * indices_.size();
  bool const numbered = indices_.size() <= std::numeric_limits<std::uint32_t>::max();
  return crowded || !numbered ? by_bitmap() : by_merging();
}

template <class V>
SparseView<V> SparseSum<V>::by_bitmap() {
  IndexSetKernels const& set = index_set_kernels();
  bitmap_.assign(static_cast<std::size_t>((extent_ + 63) / 64), 0);
  ranks_.resize(bitmap_.size());
  set.insert(bitmap_, first_index_, indices_);
  std::size_t const nnz = set.rank(bitmap_, first_index_, ranks_, sum_indices_.data());
  // What any number can be added to without a change of its bits: 0 turns -0 into 0.
  std::fill_n(sum_values_.begin(), nnz, static_cast<V>(-0.0));
  Combine<Reduction::sum, V> const add;
  std::array<std::uint32_t, block_entries> places;
  for (std::size_t begin = 0; begin < indices_.size(); begin += block_entries) {
    std::size_t const count = std::min(block_entries, indices_.size() - begin);
    set.places(bitmap_, first_index_, ranks_, std::span(indices_).subspan(begin, count),
               places.data());
    for (std::size_t i = 0; i < count; ++i) {
      V& sum = sum_values_[places[i]];
      sum = add(sum, values_[begin + i]);
    }
  }
  return SparseView<V>{sum_indices_, sum_values_}.slice(0, nnz);
}

// Sorts keys of index and position, so that entries of one index stay in the order they came in.
template <class V>
SparseView<V> SparseSum<V>::by_merging() {
  keys_.resize(indices_.size());
  merged_keys_.resize(indices_.size());
  for (std::size_t i = 0; i < keys_.size(); ++i) keys_[i] = std::uint64_t{indices_[i]} << 32 | i;
  runs_.assign(ends_.begin(), ends_.end());
  while (runs_.size() > 1) {
    std::size_t begin = 0;
    std::size_t merged = 0;
    for (std::size_t run = 0; run < runs_.size(); run += 2) {
      std::size_t const middle = runs_[run];
      std::size_t const end = runs_[std::min(run + 1, runs_.size() - 1)];
      std::merge(keys_.begin() + std::ptrdiff_t(begin), keys_.begin() + std::ptrdiff_t(middle),
                 keys_.begin() + std::ptrdiff_t(middle), keys_.begin() + std::ptrdiff_t(end),
                 merged_keys_.begin() + std::ptrdiff_t(begin));
      runs_[merged++] = begin = end;
    }
    runs_.resize(merged);
    keys_.swap(merged_keys_);
  }
  Combine<Reduction::sum, V> const add;
  std::size_t nnz = 0;
  for (std::uint64_t const key : keys_) {
    auto const index = static_cast<std::uint32_t>(key >> 32);
    V const value = values_[static_cast<std::uint32_t>(key)];
    if (nnz > 0 && sum_indices_[nnz - 1] == index) {
      sum_values_[nnz - 1] = add(sum_values_[nnz - 1], value);
    } else {
      sum_indices_[nnz] = index;
      sum_values_[nnz++] = value;
    }
  }
  return SparseView<V>{sum_indices_, sum_values_}.slice(0, nnz);
}

template class SparseSum<float>;
template class SparseSum<double>;
template class SparseSum<std::int32_t>;
template class SparseSum<std::int64_t>;

}  // namespace sparsecomm
