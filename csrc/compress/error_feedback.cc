#include "compress/error_feedback.h"

#include <algorithm>
#include <bit>
#include <type_traits>

namespace sparsecomm {
namespace {

constexpr std::size_t lookahead = 32;

// Calls f(residual, i) for the residual at each of the sorted indices.
template <class T, class F>
void for_each_residual(std::span<const Segment<T>> segments, std::span<const std::uint32_t> indices,
                       F&& f) {
  auto segment = segments.begin();
  std::size_t first = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    while (indices[i] - first >= segment->residual.size()) {
      first += segment->residual.size();
      ++segment;
    }
    if (i + lookahead < indices.size()) {
      // Each is a cache miss, and the next ones are known.
      std::size_t const next = indices[i + lookahead] - first;
      if (next < segment->residual.size()) __builtin_prefetch(&segment->residual[next], 1);
    }
    f(segment->residual[indices[i] - first], i);
  }
}

template <class T>
T nearest_finite(accumulate_t<T> x) {
  if constexpr (std::is_same_v<T, Half>) {
    return T(std::clamp(x, -65504.0f, 65504.0f));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    constexpr float most = std::bit_cast<float>(0x7f7f0000u);
    return T(std::clamp(x, -most, most));
  } else {
    return x;
  }
}

}  // namespace

template <class T>
ErrorFeedback<T>::ErrorFeedback(ThresholdSchedule schedule, std::uint64_t extent,
                                Executor const& executor)
    : schedule_(schedule), extent_(extent), executor_(executor) {}

template <class T>
void ErrorFeedback<T>::find_threshold(std::span<const Segment<T>> segments, std::uint64_t k,
                                      std::uint64_t step) {
  switch (schedule_.local_at(step, threshold_.magnitude > 0)) {
    case ThresholdSource::exact:
      threshold_ = exact_threshold<T>(segments, k, threshold_scratch_, executor_);
      break;
    case ThresholdSource::sampled:
      threshold_ =
          sampled_threshold<T>(segments, k, threshold_stride, step, threshold_scratch_, executor_);
      break;
    case ThresholdSource::gaussian:
      threshold_ = gaussian_threshold<T>(segments, k);
      break;
    case ThresholdSource::reused:
      threshold_.ties = k;
      break;
  }
}

template <class T>
SparseView<accumulate_t<T>> ErrorFeedback<T>::select(std::span<const Segment<T>> segments,
                                                     std::uint64_t k) {
  residual_is_clear_ = false;
  std::uint64_t const limit = selection_limit(extent_, k);
  auto const indices = indices_.take(limit + packed_slack);
  auto const values = values_.take(limit + packed_slack);
  Threshold<V> threshold = threshold_;
  std::size_t count = 0;
  std::uint32_t first_index = 0;
  for (Segment<T> const& segment : segments) {
    count += fused_error_feedback<T>({segment.gradient, segment.residual}, threshold, first_index,
                                     limit - count, {indices.subspan(count), values.subspan(count)},
                                     selection_scratch_, executor_)
                 .count;
    first_index += static_cast<std::uint32_t>(segment.gradient.size());
  }
  selection_ = {indices.first(count), values.first(count)};
  return selection_;
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
  rejected_ = rejected;
  before_.clear();
  for_each_residual<T>(segments, rejected.indices, [&](V& residual, std::size_t i) {
    before_.push_back(residual);
    residual += rejected.values[i];
  });
}

template <class T>
void ErrorFeedback<T>::restore(std::span<const Segment<T>> segments) {
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
  has_flushed_ = false;
}

template class ErrorFeedback<float>;
template class ErrorFeedback<double>;
template class ErrorFeedback<Half>;
template class ErrorFeedback<BFloat16>;

}  // namespace sparsecomm
