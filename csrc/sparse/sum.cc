#include "sparse/sum.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

namespace sparsecomm {
namespace {

constexpr std::uint64_t window_entries = std::uint64_t{1} << 15;
constexpr std::size_t most_merged = 3;  // streams

}  // namespace

template <class V>
void SparseSum<V>::reset(std::uint32_t first_index, std::uint64_t extent) {
  std::uint64_t const index_space = std::uint64_t{1} << 32;
  require(extent <= index_space - first_index, "SparseSum: extent is ", extent,
          ", must be at most 2^32 - first_index = ", index_space - first_index);
  // The same buffers for the same sums, so that they need not grow again.
  if (std::exchange(swapped_, false)) std::swap(sum_, folded_);
  first_index_ = first_index;
  extent_ = extent;
  streams_.clear();
  own_.clear();
  indices_.clear();
  values_.clear();
}

template <class V>
void SparseSum<V>::add(SparseView<V> view) {
  check(view);
  streams_.push_back(view);
}

template <class V>
void SparseSum<V>::take_own(std::size_t begin) {
  try {
    check({std::span(indices_).subspan(begin), std::span(values_).subspan(begin)});
  } catch (InvalidArgument const&) {
    indices_.resize(begin);
    values_.resize(begin);
    throw;
  }
  own_.push_back({streams_.size(), begin, indices_.size()});
  streams_.emplace_back();
}

template <class V>
void SparseSum<V>::check(SparseView<V> view) const {
  require(view.indices.size() == view.values.size(), "SparseSum: ", view.indices.size(),
          " indices but ", view.values.size(), " values");
  if (view.nnz() == 0) return;
  std::uint32_t const first = view.indices.front();
  std::uint32_t const last = view.indices.back();
  std::uint64_t const end = first_index_ + extent_;
  require(first >= first_index_ && last < end, "SparseSum: indices from ", first, " to ", last,
          " lie outside [", first_index_, ", ", end, ")");
}

template <class V>
SparseView<V> SparseSum<V>::sum() {
  for (Own const& own : own_) {
    streams_[own.stream] = SparseView<V>{indices_, values_}.slice(own.begin, own.end);
  }
  std::erase_if(streams_, [](SparseView<V> stream) { return stream.nnz() == 0; });
  own_.clear();
  if (streams_.empty()) return {};
  if (streams_.size() <= most_merged) return by_merging();
  std::size_t entries = 0;
  for (SparseView<V> const stream : streams_) entries += stream.nnz();
  // A word of a window's bits costs about what merging an entry once does.
  std::size_t const merges = std::bit_width(streams_.size() - 1);
  bool const crowded = extent_ / 64 <= merges * entries;
  bool const numbered = entries <= std::numeric_limits<std::uint32_t>::max();
  return crowded || !numbered ? by_windows(entries) : by_sorting(entries);
}

template <class V>
void SparseSum<V>::fold() {
  auto const streams =
      std::ranges::count_if(streams_, [](SparseView<V> stream) { return stream.nnz() > 0; }) +
      std::ranges::count_if(own_, [](Own const& own) { return own.begin < own.end; });
  if (streams < 2) return;
  SparseView<V> const folded = sum();
  std::swap(sum_, folded_);
  swapped_ = !swapped_;
  streams_.assign(1, folded);
  indices_.clear();
  values_.clear();
}

template <class V>
SparseView<V> SparseSum<V>::by_merging() {
  SparseView<V> sum = streams_.front();
  for (std::size_t stream = 1; stream < streams_.size(); ++stream) {
    // The last into sum_, so that two streams need no other.
    Output& out = (streams_.size() - stream) % 2 == 1 ? sum_ : former_sum_;
    std::size_t const room = sum.nnz() + streams_[stream].nnz();
    auto const indices = out.indices.take(room);
    auto const values = out.values.take(room);
    std::size_t const nnz =
        merge(sum, streams_[stream], Reduction::sum, indices.data(), values.data());
    sum = {indices.first(nnz), values.first(nnz)};
  }
  return sum;
}

template <class V>
SparseView<V> SparseSum<V>::by_windows(std::size_t entries) {
  auto const sum_indices = sum_.indices.take(entries);
  auto const sum_values = sum_.values.take(entries);
  // What any number can be added to without a change of its bits: 0 turns -0 into 0.
  auto const nothing = static_cast<V>(-0.0);
  window_.resize(window_entries, nothing);
  occupied_.resize(window_entries / 64);
  next_.assign(streams_.size(), 0);
  Combine<Reduction::sum, V> const add;
  std::size_t nnz = 0;
  for (std::uint64_t begin = 0; begin < extent_; begin += window_entries) {
    std::uint32_t const first = first_index_ + static_cast<std::uint32_t>(begin);
    for (std::size_t stream = 0; stream < streams_.size(); ++stream) {
      auto const [indices, values] = streams_[stream];
      std::size_t i = next_[stream];
      for (; i < indices.size(); ++i) {
        std::uint32_t const place = indices[i] - first;
        if (place >= window_entries) break;
        window_[place] = add(window_[place], values[i]);
        occupied_[place / 64] |= std::uint64_t{1} << place % 64;
      }
      next_[stream] = i;
    }
    for (std::size_t word = 0; word < occupied_.size(); ++word) {
      for (std::uint64_t bits = std::exchange(occupied_[word], 0); bits != 0; bits &= bits - 1) {
        std::size_t const place = 64 * word + static_cast<std::size_t>(std::countr_zero(bits));
        sum_indices[nnz] = first + static_cast<std::uint32_t>(place);
        sum_values[nnz++] = std::exchange(window_[place], nothing);
      }
    }
  }
  return {sum_indices.first(nnz), sum_values.first(nnz)};
}

// Sorts keys of index and position, so that entries of one index stay in the order they came in.
template <class V>
SparseView<V> SparseSum<V>::by_sorting(std::size_t entries) {
  auto const sum_indices = sum_.indices.take(entries);
  auto const sum_values = sum_.values.take(entries);
  keys_.clear();
  all_values_.clear();
  runs_.clear();
  for (SparseView<V> const stream : streams_) {
    for (std::uint32_t const index : stream.indices) {
      keys_.push_back(std::uint64_t{index} << 32 | keys_.size());
    }
    all_values_.insert(all_values_.end(), stream.values.begin(), stream.values.end());
    runs_.push_back(keys_.size());
  }
  merged_keys_.resize(keys_.size());
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
    V const value = all_values_[static_cast<std::uint32_t>(key)];
    if (nnz > 0 && sum_indices[nnz - 1] == index) {
      sum_values[nnz - 1] = add(sum_values[nnz - 1], value);
    } else {
      sum_indices[nnz] = index;
      sum_values[nnz++] = value;
    }
  }
  return {sum_indices.first(nnz), sum_values.first(nnz)};
}

template class SparseSum<float>;
template class SparseSum<double>;
template class SparseSum<std::int32_t>;
template class SparseSum<std::int64_t>;

}  // namespace sparsecomm
