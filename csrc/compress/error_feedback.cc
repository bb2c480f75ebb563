#include "compress/error_feedback.h"

#include <algorithm>

namespace sparsecomm {
namespace {

// One in this many entries is looked at by a sampled threshold. Prime, so that it does not fall
// into step with the rows of a weight matrix.
constexpr std::size_t sample_stride = 97;

}  // namespace

template <class T>
ErrorFeedback<T>::ErrorFeedback(ThresholdSchedule schedule, std::uint64_t extent)
    : schedule_(schedule), extent_(extent) {}

template <class T>
void ErrorFeedback<T>::find_threshold(std::span<const Segment<T>> segments, std::uint64_t k,
                                      std::uint64_t step) {
  switch (schedule_.at(step, threshold_.magnitude > 0)) {
    case ThresholdSource::exact:
      threshold_ = exact_threshold<T>(segments, k, scratch_);
      break;
    case ThresholdSource::sampled:
      threshold_ = sampled_threshold<T>(segments, k, sample_stride, step, scratch_);
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
void ErrorFeedback<T>::restore_missing(std::span<const Segment<T>> segments,
                                       std::span<const std::uint32_t> delivered) {
  auto segment = segments.begin();
  std::size_t first = 0;
  for_each_missing(selection_.indices, delivered, [&](std::size_t i) {
    std::uint32_t const index = selection_.indices[i];
    while (index - first >= segment->residual.size()) {
      first += segment->residual.size();
      ++segment;
    }
    segment->residual[index - first] = selection_.values[i];
  });
}

template class ErrorFeedback<float>;
template class ErrorFeedback<double>;
template class ErrorFeedback<Half>;
template class ErrorFeedback<BFloat16>;

}  // namespace sparsecomm
