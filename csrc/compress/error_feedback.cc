#include "compress/error_feedback.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/finite.h"
#include "compress/bucket_selection.h"
#include "kernels/top_k.h"

namespace sparsecomm {
namespace {

constexpr std::size_t lookahead = 32;

// Calls f(residual, i) for the residual at each of the sorted indices.
template <class T, class F>
void for_each_residual(std::span<const Segment<T>> segments, std::span<const std::uint32_t> indices,
                       F&& f) {
  std::size_t first = 0;
  std::size_t i = 0;
  for (Segment<T> const& segment : segments) {
    auto const begin = indices.begin() + static_cast<std::ptrdiff_t>(i);
    std::size_t const behind = first + segment.residual.size();
    std::size_t const end =
        i + static_cast<std::size_t>(std::lower_bound(begin, indices.end(), behind) - begin);
    // Each is a cache miss, and the next ones are known.
    for (; i + lookahead < end; ++i) {
      __builtin_prefetch(&segment.residual[indices[i + lookahead] - first], 1);
      f(segment.residual[indices[i] - first], i);
    }
    for (; i < end; ++i) f(segment.residual[indices[i] - first], i);
    first = behind;
  }
}

template <class T>
T nearest_finite(accumulate_t<T> x) {
  if constexpr (std::is_same_v<T, accumulate_t<T>>) {
    return x;
  } else {
    return T(std::clamp(x, -largest_finite<T>(), largest_finite<T>()));
  }
}

}  // namespace

template <class V>
void delivered(std::span<const std::uint32_t> indices, StreamView<V> const& reduced,
               std::vector<std::uint32_t>& out) {
  if (reduced.is_dense) {
    std::ranges::copy_if(indices, std::back_inserter(out),
                         [&](std::uint32_t index) { return reduced.dense[index] != 0; });
  } else {
    std::ranges::set_intersection(indices, reduced.sparse.indices, std::back_inserter(out));
  }
}
template void delivered(std::span<const std::uint32_t>, StreamView<float> const&,
                        std::vector<std::uint32_t>&);
template void delivered(std::span<const std::uint32_t>, StreamView<double> const&,
                        std::vector<std::uint32_t>&);

template <class T>
ErrorFeedback<T>::ErrorFeedback(ThresholdSchedule schedule, SelectionRule const& rule,
                                std::uint64_t extent, Executor const& executor)
    : schedule_(schedule),
      rule_(rule),
      selector_(selector_of(rule)),
      extent_(extent),
      executor_(executor) {}

template <class T>
typename ErrorFeedback<T>::Row const* ErrorFeedback<T>::selector_of(SelectionRule const& rule) {
  using F = ErrorFeedback;
  static constexpr Row rows[] = {
      {Selector::fused, &F::find_in_sums, &F::pack_fused},
      {Selector::accumulated, &F::find_in_keys, &F::pack_by_threshold},
      {Selector::bucket, nullptr, &F::pack_buckets},
      {Selector::block, nullptr, &F::pack_blocks},
  };
  static_assert(std::size(rows) == std::size(selectors), "each selector has one row here");
  return find_row(rows, rule.selector());
}

template <class T>
void ErrorFeedback<T>::bind_moment(std::span<V> moment) {
  std::uint64_t const wanted = rule_.has_moment() ? extent_ : 0;
  require(moment.size() == wanted, "a gradient of ", extent_, " entries needs ", wanted,
          " moments, not ", moment.size());
  moment_ = moment;
}

template <class T>
void ErrorFeedback<T>::accumulate(std::span<const Segment<T>> segments) {
  residual_is_clear_ = false;
  VelocityRule const& velocity = rule_.velocity;
  auto const decay = static_cast<V>(rule_.first_moment);
  std::size_t first = 0;
  for (Segment<T> const& segment : segments) {
    std::size_t const size = segment.gradient.size();
    FusedArguments<T> arguments{segment.gradient, segment.residual};
    arguments.scale = static_cast<V>(velocity.gain);
    if (velocity.momentum > 0) {
      arguments.momentum = moment_.subspan(first, size);
      arguments.factor = static_cast<V>(velocity.momentum);
      arguments.mask_momentum = false;
      arguments.nesterov = velocity.nesterov;
    } else if (rule_.first_moment > 0) {
      auto const moment = moment_.subspan(first, size);
      for (std::size_t i = 0; i < size; ++i) {
        moment[i] = decay * moment[i] + static_cast<V>(segment.gradient[i]);
      }
    }
    // A selection of nothing.
    Threshold<V> none{std::numeric_limits<V>::max(), 0};
    fused_error_feedback<T>(arguments, none, 0, 0, {}, selection_scratch_, executor_);
    first += size;
  }
}

template <class T>
void ErrorFeedback<T>::find_threshold(std::span<const Segment<T>> segments, std::uint64_t k,
                                      std::uint64_t step) {
  if (selector_->find_threshold == nullptr) return;
  (this->*selector_->find_threshold)(segments, k, step);
}

template <class T>
SparseView<accumulate_t<T>> ErrorFeedback<T>::select(std::span<const Segment<T>> segments,
                                                     std::uint64_t k) {
  residual_is_clear_ = false;
  whole_ = k >= extent_;
  (this->*selector_->pack)(segments, k);
  return selection_;
}

template <class T>
void ErrorFeedback<T>::find_in_sums(Segments segments, std::uint64_t k, std::uint64_t step) {
  search<T>(segments, k, step);
}

template <class T>
void ErrorFeedback<T>::find_in_keys(Segments segments, std::uint64_t k, std::uint64_t step) {
  search<V>(keys(segments), k, step);
}

template <class T>
template <class S>
void ErrorFeedback<T>::search(std::span<const Segment<S>> segments, std::uint64_t k,
                              std::uint64_t step) {
  switch (schedule_.local_at(step, threshold_.magnitude > 0)) {
    case ThresholdSource::exact:
      threshold_ = exact_threshold<S>(segments, k, threshold_scratch_, executor_);
      break;
    case ThresholdSource::sampled:
      threshold_ =
          sampled_threshold<S>(segments, k, threshold_stride, step, threshold_scratch_, executor_);
      break;
    case ThresholdSource::gaussian:
      threshold_ = gaussian_threshold<S>(segments, k);
      break;
    case ThresholdSource::reused:
      threshold_.ties = k;
      break;
  }
}

template <class T>
void ErrorFeedback<T>::pack_fused(Segments segments, std::uint64_t k) {
  std::uint64_t const limit = selection_limit(extent_, k);
  auto const indices = indices_.take(limit);
  auto const values = values_.take(limit);
  Threshold<V> threshold = threshold_;
  std::size_t count = 0;
  std::uint32_t first_index = 0;
  for (Segment<T> const& segment : segments) {
    count += fused_error_feedback<T>({segment.gradient, segment.residual}, threshold, first_index,
                                     limit - count, {indices.subspan(count), values.subspan(count)},
                                     selection_scratch_, executor_)
                 .count;
    first_index += static_cast<std::uint32_t>(segment.gradient.size());
    // After each, since the next may want for memory, and what is selected must be put back.
    selection_ = {indices.first(count), values.first(count)};
  }
}

template <class T>
void ErrorFeedback<T>::pack_by_threshold(Segments segments, std::uint64_t k) {
  std::uint64_t const limit = selection_limit(extent_, k);
  auto const indices = indices_.take(limit);
  auto const values = values_.take(limit);
  Threshold<V> threshold = threshold_;
  std::size_t count = 0;
  std::uint32_t first_index = 0;
  for (Segment<V> const& key : keys(segments)) {
    count += sparsecomm::select<V>(key.gradient, threshold, first_index, limit - count,
                                   {indices.subspan(count), values.subspan(count)},
                                   selection_scratch_, executor_)
                 .count;
    first_index += static_cast<std::uint32_t>(key.gradient.size());
  }
  take(segments, count);
}

template <class T>
void ErrorFeedback<T>::pack_buckets(Segments segments, std::uint64_t k) {
  std::span<const V> const key = joined<V>(keys(segments), &Segment<V>::gradient, extent_);
  std::size_t const each = of_each_bucket(extent_, rule_.bucket, k);
  std::size_t const count = bucket_top_k_count(extent_, rule_.bucket, each);
  top_k_per_bucket<V>(key, extent_, rule_.bucket, each, {indices_.take(count), values_.take(count)},
                      executor_);
  take(segments, count);
}

template <class T>
void ErrorFeedback<T>::pack_blocks(Segments segments, std::uint64_t k) {
  std::span<const V> const key = joined<V>(keys(segments), &Segment<V>::gradient, extent_);
  std::size_t const block = rule_.block;
  auto const numbers = block_top_k<V>(key, block, part_count(k, block), block_scratch_, executor_);
  auto const indices = indices_.take(std::min<std::uint64_t>(numbers.size() * block, extent_));
  std::size_t count = 0;
  for (std::uint64_t const number : numbers) {
    std::uint64_t const end = std::min<std::uint64_t>((number + 1) * block, extent_);
    for (std::uint64_t i = number * block; i < end; ++i) {
      indices[count++] = static_cast<std::uint32_t>(i);
    }
  }
  take(segments, count);
}

// The magnitudes that entries are chosen by if the rule accumulates.
template <class T>
std::span<const Segment<accumulate_t<T>>> ErrorFeedback<T>::keys(Segments segments) {
  keys_.clear();
  if (rule_.first_moment > 0) {
    keys_.push_back({moment_, {}});
  } else {
    for (Segment<T> const& segment : segments) keys_.push_back({segment.residual, {}});
  }
  return keys_;
}

// Packs the residuals at the first `count` indices, but for zeros, and clears them.
template <class T>
void ErrorFeedback<T>::take(Segments segments, std::size_t count) {
  auto const indices = indices_.take(count);
  auto const values = values_.take(count);
  std::size_t taken = 0;
  for_each_residual<T>(segments, indices, [&](V& residual, std::size_t i) {
    V const value = std::exchange(residual, V{0});
    if (value == 0) return;
    indices[taken] = indices[i];
    values[taken++] = value;
  });
  selection_ = {indices.first(taken), values.first(taken)};
}

template <class T>
void ErrorFeedback<T>::mask(StreamView<V> const& reduced) {
  if (!rule_.masks() || whole_) return;
  delivered(selection_.indices, reduced, masked_);
  masked_moments_.reserve(masked_.size());
  for (std::uint32_t const index : masked_) {
    masked_moments_.push_back(std::exchange(moment_[index], V{0}));
  }
}

template <class T>
void ErrorFeedback<T>::flush(std::span<const Segment<T>> segments) {
  T* copy = flushed_.take(extent_).data();
  for (Segment<T> const& segment : segments) {
    if (!residual_is_clear_) {
      for (std::size_t i = 0; i < segment.gradient.size(); ++i) {
        V const sum = segment.residual[i] + static_cast<V>(segment.gradient[i]);
        T const sent = nearest_finite<T>(sum);
        segment.residual[i] = sum - static_cast<V>(sent);
        segment.gradient[i] = sent;
      }
    }
    copy = std::ranges::copy(segment.gradient, copy).out;
  }
  has_flushed_ = true;
  residual_is_clear_ = std::is_same_v<T, V>;  // nothing was rounded away
}

template <class T>
void ErrorFeedback<T>::keep(std::span<const Segment<T>> segments, SparseView<V> rejected) {
  before_.resize(rejected.nnz());  // first, since it may throw, and restore() reads as many
  rejected_ = rejected;
  for_each_residual<T>(segments, rejected.indices, [&](V& residual, std::size_t i) {
    before_[i] = residual;
    residual += rejected.values[i];
  });
}

template <class T>
void ErrorFeedback<T>::restore(std::span<const Segment<T>> segments) {
  for (std::size_t i = 0; i < masked_moments_.size(); ++i) moment_[masked_[i]] = masked_moments_[i];
  for_each_residual<T>(segments, rejected_.indices,
                       [&](V& residual, std::size_t i) { residual = before_[i]; });
  for_each_residual<T>(segments, selection_.indices,
                       [&](V& residual, std::size_t i) { residual = selection_.values[i]; });
  if (has_flushed_) {
    residual_is_clear_ = false;
    T const* sent = flushed_.take(extent_).data();
    for (Segment<T> const& segment : segments) {
      for (V& residual : segment.residual) residual += static_cast<V>(*sent++);
    }
  }
  forget();
}

template <class T>
void ErrorFeedback<T>::forget() {
  selection_ = {};
  rejected_ = {};
  masked_.clear();
  masked_moments_.clear();
  has_flushed_ = false;
}

template class ErrorFeedback<float>;
template class ErrorFeedback<double>;
template class ErrorFeedback<Half>;
template class ErrorFeedback<BFloat16>;

}  // namespace sparsecomm
