#include "compress/error_feedback.h"

#include <algorithm>

namespace sparsecomm {
namespace {

// One in this many entries is looked at by a sampled threshold. Prime, so that it does not fall
// into step with the rows of a weight matrix.
constexpr std::size_t sample_stride = 97;

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

}  // namespace

template <class T>
ErrorFeedback<T>::ErrorFeedback(ThresholdSchedule schedule, std::uint64_t extent)
    : schedule_(schedule), extent_(extent) {}

template <class T>
void ErrorFeedback<T>::find_threshold(std::span<const Segment<T>> segments, std::uint64_t k,
                                      std::uint64_t step) {
  switch (schedule_.local_at(step, threshold_.magnitude > 0)) {
    case ThresholdSource::exact:
      threshold_ = exact_threshold<T>(segments, k, scratch_);
      break;
    case ThresholdSource::sampled:
      threshold_ = sampled_threshold<T>(segments, k, sample_stride, step, scratch_);
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
  std::uint64_t const limit = selection_limit(extent_, k);
  auto const indices = indices_.take(limit + packed_slack);
  auto const values = values_.take(limit + packed_slack);
  Threshold<V> threshold = threshold_;
  std::size_t count = 0;
  std::uint32_t first_index = 0;
  for (Segment<T> const& segment : segments) {
    count +=
        kernels<T>()
            .fused_error_feedback(segment.gradient, segment.residual, threshold, first_index,
                                  limit - count, {indices.subspan(count), values.subspan(count)})
            .count;
    first_index += static_cast<std::uint32_t>(segment.gradient.size());
  }
  selection_ = {indices.first(count), values.first(count)};
  return selection_;
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
  forget();
}

template <class T>
void ErrorFeedback<T>::forget() {
  selection_ = {};
  rejected_ = {};
}

template class ErrorFeedback<float>;
template class ErrorFeedback<double>;
template class ErrorFeedback<Half>;
template class ErrorFeedback<BFloat16>;

}  // namespace sparsecomm
