#include "sparse/stream.h"

#include <algorithm>
#include <bit>
#include <type_traits>

namespace sparsecomm {
namespace {

template <class V>
using bits_t = std::conditional_t<sizeof(V) == 8, std::uint64_t, std::uint32_t>;

// Selects by masks on bits: which side is next is a coin toss, which a branch would mispredict, and
// an unmatched value must keep its bits (-0.0 + 0 is not -0.0).
template <class V>
V select(bool first, V a, V b) {
  auto const mask = bits_t<V>{0} - bits_t<V>{first};
  return std::bit_cast<V>((std::bit_cast<bits_t<V>>(a) & mask) |
                          (std::bit_cast<bits_t<V>>(b) & ~mask));
}

template <class V, class Combine>
std::size_t merge_by(Combine combine, SparseView<V> a, SparseView<V> b, std::uint32_t* indices,
                     V* values) {
  std::uint32_t const* const ai = a.indices.data();
  std::uint32_t const* const bi = b.indices.data();
  V const* const av = a.values.data();
  V const* const bv = b.values.data();
  std::size_t const na = a.nnz();
  std::size_t const nb = b.nnz();
  std::size_t i = 0;
  std::size_t j = 0;
  std::size_t k = 0;
  while (i < na && j < nb) {
    std::uint32_t const x = ai[i];
    std::uint32_t const y = bi[j];
    V const one = select(x < y, av[i], bv[j]);
    indices[k] = x < y ? x : y;
    values[k] = select(x == y, combine(av[i], bv[j]), one);
    i += x <= y;
    j += y <= x;
    ++k;
  }
  std::copy(ai + i, ai + na, indices + k);
  std::copy(av + i, av + na, values + k);
  k += na - i;
  std::copy(bi + j, bi + nb, indices + k);
  std::copy(bv + j, bv + nb, values + k);
  return k + nb - j;
}

}  // namespace

template <class V>
SparseView<V> SparseView<V>::range(std::uint64_t first, std::uint64_t last) const {
  auto const begin = std::lower_bound(indices.begin(), indices.end(), first);
  auto const end = std::lower_bound(begin, indices.end(), last);
  return slice(static_cast<std::size_t>(begin - indices.begin()),
               static_cast<std::size_t>(end - indices.begin()));
}

template <class V>
std::uint64_t default_delta(std::uint64_t extent) {
  return extent * sizeof(V) / (sizeof(std::uint32_t) + sizeof(V));
}

template <class V>
void SparseStream<V>::reset(std::uint32_t first_index, std::uint64_t extent, std::uint64_t delta,
                            Reduction reduction) {
  std::uint64_t const index_space = std::uint64_t{1} << 32;
  require(extent <= index_space - first_index, "SparseStream: extent is ", extent,
          ", must be at most 2^32 - first_index = ", index_space - first_index);
  first_index_ = first_index;
  extent_ = extent;
  delta_ = delta;
  reduction_ = reduction;
  dense_ = false;
  nnz_ = 0;
}

// Both buffers grow together: merge() swaps them, so which of the two a sum needs depends on what
// came before.
template <class V>
void SparseStream<V>::grow(std::size_t nnz) {
  if (nnz <= indices_.size()) return;
  indices_.resize(nnz);
  values_.resize(nnz);
  merged_indices_.resize(nnz);
  merged_values_.resize(nnz);
}

template <class V>
void SparseStream<V>::add(SparseView<V> view) {
  require(view.indices.size() == view.values.size(), "SparseStream::add: ", view.indices.size(),
          " indices but ", view.values.size(), " values");
  if (view.nnz() == 0) return;
  std::uint64_t const end = first_index_ + extent_;
  require(view.indices.front() >= first_index_ && view.indices.back() < end,
          "SparseStream::add: indices from ", view.indices.front(), " to ", view.indices.back(),
          " lie outside [", first_index_, ", ", end, ")");

  if (!dense_ && nnz_ + view.nnz() > delta_) densify();
  if (dense_) {
    visit_reduction<V>(reduction_, [&](auto combine) {
      for (std::size_t i = 0; i < view.nnz(); ++i) {
        V& value = dense_values_[view.indices[i] - first_index_];
        value = combine(value, view.values[i]);
      }
    });
    return;
  }

  std::size_t const sum = nnz_ + view.nnz();
  grow(sum);
  if (nnz_ == 0 || indices_[nnz_ - 1] < view.indices.front()) {
    std::copy(view.indices.begin(), view.indices.end(), indices_.begin() + std::ptrdiff_t(nnz_));
    std::copy(view.values.begin(), view.values.end(), values_.begin() + std::ptrdiff_t(nnz_));
    nnz_ = sum;
    return;
  }
  nnz_ = merge(pairs(), view, reduction_, merged_indices_.data(), merged_values_.data());
  indices_.swap(merged_indices_);
  values_.swap(merged_values_);
}

template <class V>
void SparseStream<V>::add_dense(std::span<const V> values) {
  require(values.size() == extent_, "SparseStream::add_dense: ", values.size(),
          " values, the extent is ", extent_);
  visit_reduction<V>(reduction_, [&](auto combine) {
    if (dense_) {
      std::ranges::transform(dense_values_, values, dense_values_.begin(), combine);
      return;
    }
    dense_values_.assign(values.begin(), values.end());
    for (std::size_t i = 0; i < nnz_; ++i) {
      V& value = dense_values_[indices_[i] - first_index_];
      value = combine(values_[i], value);
    }
  });
  dense_ = true;
}

template <class V>
StreamView<V> SparseStream<V>::view() const {
  if (!dense_) return {.sparse = pairs()};
  return {.dense = {dense_values_.data(), static_cast<std::size_t>(extent_)}, .is_dense = true};
}

template <class V>
std::size_t SparseStream<V>::nnz() const {
  return dense_ ? static_cast<std::size_t>(extent_) : nnz_;
}

template <class V>
SparseView<V> SparseStream<V>::pairs() const {
  return {std::span(indices_).first(nnz_), std::span(values_).first(nnz_)};
}

template <class V>
SparseView<V> SparseStream<V>::sparse() {
  if (dense_) {
    std::span<const V> const all(dense_values_.data(), static_cast<std::size_t>(extent_));
    V const absent = neutral<V>(reduction_);
    auto const absentees = std::count(all.begin(), all.end(), absent);
    std::size_t const count = all.size() - static_cast<std::size_t>(absentees);
    grow(count + 1);  // a neutral element behind the last entry is written, but not counted
    std::size_t k = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      indices_[k] = first_index_ + static_cast<std::uint32_t>(i);
      values_[k] = all[i];
      k += all[i] != absent;
    }
    nnz_ = k;
    dense_ = false;
  }
  return pairs();
}

template <class V>
std::span<const V> SparseStream<V>::dense() {
  if (!dense_) densify();
  return {dense_values_.data(), static_cast<std::size_t>(extent_)};
}

template <class V>
void SparseStream<V>::densify() {
  dense_values_.assign(static_cast<std::size_t>(extent_), neutral<V>(reduction_));
  for (std::size_t i = 0; i < nnz_; ++i) dense_values_[indices_[i] - first_index_] = values_[i];
  dense_ = true;
}

template <class V>
std::size_t merge(SparseView<V> a, SparseView<V> b, Reduction reduction, std::uint32_t* indices,
                  V* values) {
  return visit_reduction<V>(reduction,
                            [&](auto combine) { return merge_by(combine, a, b, indices, values); });
}

#define SPARSECOMM_STREAM(V)                              \
  template struct SparseView<V>;                          \
  template std::uint64_t default_delta<V>(std::uint64_t); \
  template class SparseStream<V>;                         \
  template std::size_t merge(SparseView<V>, SparseView<V>, Reduction, std::uint32_t*, V*);
SPARSECOMM_STREAM(float)
SPARSECOMM_STREAM(double)
SPARSECOMM_STREAM(std::int32_t)
SPARSECOMM_STREAM(std::int64_t)
#undef SPARSECOMM_STREAM

}  // namespace sparsecomm
