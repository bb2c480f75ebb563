#include "sparse/intersection.h"

#include <algorithm>

namespace sparsecomm {
namespace {

// How many times longer a list is than another where searching it is quicker than reading it.
constexpr std::size_t far_longer = 64;

// Calls f(i, at) for every index of `few`, the i-th, with where it stands in `many`, or would.
template <class F>
void search(std::span<const std::uint32_t> few, std::span<const std::uint32_t> many, F&& f) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < few.size(); ++i) {
    std::size_t before = at;
    for (std::size_t step = 1; at < many.size() && many[at] < few[i]; step *= 2) {
      before = at + 1;
      at = std::min(at + step, many.size());
    }
    auto const begin = many.begin();
    at =
        static_cast<std::size_t>(std::lower_bound(begin + static_cast<std::ptrdiff_t>(before),
                                                  begin + static_cast<std::ptrdiff_t>(at), few[i]) -
                                 begin);
    f(i, at);
  }
}

}  // namespace

template <class V>
void SparseIntersection<V>::find(std::span<const std::uint32_t> one,
                                 std::span<const std::uint32_t> other) {
  positions_.resize(std::max(positions_.size(), one.size() + intersect_slack));
  found_ = 0;
  if (one.size() > far_longer * other.size()) {
    search(other, one, [&](std::size_t i, std::size_t at) {
      if (at < one.size() && one[at] == other[i]) {
        positions_[found_++] = static_cast<std::uint32_t>(at);
      }
    });
  } else if (other.size() > far_longer * one.size()) {
    search(one, other, [&](std::size_t i, std::size_t at) {
      if (at < other.size() && other[at] == one[i]) {
        positions_[found_++] = static_cast<std::uint32_t>(i);
      }
    });
  } else {
    found_ = kernel_.intersect(one, other, positions_.data());
  }
}

template <class V>
void SparseIntersection<V>::take(std::span<const V> values, std::vector<V>& taken) const {
  taken.resize(std::max(taken.size(), found_));
  for (std::size_t i = 0; i < found_; ++i) taken[i] = values[positions_[i]];
}

template <class V>
SparseView<V> SparseIntersection<V>::run(SparseView<V> vector,
                                         std::span<const std::uint32_t> indices) {
  find(vector.indices, indices);
  take(vector.values, values_);
  indices_.resize(std::max(indices_.size(), found_));
  for (std::size_t i = 0; i < found_; ++i) indices_[i] = vector.indices[positions_[i]];
  return SparseView<V>{indices_, values_}.slice(0, found_);
}

template <class V>
typename SparseIntersection<V>::Shared SparseIntersection<V>::run(SparseView<V> one,
                                                                  SparseView<V> other) {
  SparseView<V> const shared = run(one, other.indices);
  find(other.indices, shared.indices);
  take(other.values, other_values_);
  return {shared.indices, shared.values, std::span<const V>(other_values_).first(found_)};
}

template <class V>
template <class T>
std::size_t SparseIntersection<V>::leave(std::span<const T> all, std::vector<T>& left) const {
  left.resize(std::max(left.size(), all.size() - found_));
  auto out = left.begin();
  auto begin = all.begin();
  for (std::uint32_t const position : std::span(positions_).first(found_)) {
    auto const end = all.begin() + static_cast<std::ptrdiff_t>(position);
    out = std::copy(begin, end, out);
    begin = end + 1;
  }
  std::copy(begin, all.end(), out);
  return all.size() - found_;
}

template <class V>
SparseView<V> SparseIntersection<V>::difference(SparseView<V> vector,
                                                std::span<const std::uint32_t> indices) {
  find(vector.indices, indices);
  std::size_t const left = leave(vector.indices, indices_);
  leave(vector.values, values_);
  return SparseView<V>{indices_, values_}.slice(0, left);
}

template class SparseIntersection<float>;
template class SparseIntersection<double>;
template class SparseIntersection<std::int32_t>;
template class SparseIntersection<std::int64_t>;

}  // namespace sparsecomm
