#include "compress/local_gradient.h"

#include <algorithm>
#include <utility>

namespace sparsecomm {
namespace {

template <class T>
class HostGradient final : public LocalGradient<T> {
 public:
  using V = accumulate_t<T>;

  HostGradient(ThresholdSchedule schedule, SelectionRule const& rule, std::uint64_t extent,
               Executor const& executor)
      : extent_(extent), executor_(executor), feedback_(schedule, rule, extent, executor) {}

  void bind(std::vector<Segment<T>> segments, std::span<V> moment) override {
    segments_ = std::move(segments);
    feedback_.bind_moment(moment);
  }

  bool all_finite() override {
    return std::ranges::all_of(segments_, [&](Segment<T> const& segment) {
      return sparsecomm::all_finite<T>(segment.gradient, executor_);
    });
  }
  void accumulate() override { feedback_.accumulate(segments_); }
  void find_threshold(std::uint64_t k, std::uint64_t step) override {
    feedback_.find_threshold(segments_, k, step);
  }
  SparseView<V> select(std::uint64_t k) override { return feedback_.select(segments_, k); }
  void flush() override { feedback_.flush(segments_); }
  void keep(SparseView<V> rejected) override { feedback_.keep(segments_, rejected); }
  void mask(StreamView<V> const& reduced) override { feedback_.mask(reduced); }
  void restore() override { feedback_.restore(segments_); }
  void residual_changed() override { feedback_.residual_changed(); }
  void forget() override { feedback_.forget(); }
  void follow(ThresholdSchedule schedule) override { feedback_.follow(schedule); }
  void set_velocity(VelocityRule const& rule) override { feedback_.set_velocity(rule); }
  void reset(double threshold) override { feedback_.reset(threshold); }
  double threshold() const override { return feedback_.threshold(); }

  void store(StreamView<V> const& result, V divisor) override {
    std::uint64_t first = 0;
    for (Segment<T> const& segment : segments_) {
      std::uint64_t const last = first + segment.gradient.size();
      if (result.is_dense) {
        std::ranges::transform(result.dense.subspan(first, last - first), segment.gradient.begin(),
                               [&](V x) { return static_cast<T>(x / divisor); });
      } else {
        SparseView<V> const part = result.sparse.range(first, last);
        scatter<T>(segment.gradient, part.indices, part.values, divisor,
                   static_cast<std::uint32_t>(first));
      }
      first = last;
    }
  }
  void fill(T value) override {
    for (Segment<T> const& segment : segments_) std::ranges::fill(segment.gradient, value);
  }

  std::span<T> gather() override {
    if (segments_.size() == 1) return segments_.front().gradient;
    auto const flat = flat_.take(extent_);
    auto out = flat.begin();
    for (Segment<T> const& segment : segments_) out = std::ranges::copy(segment.gradient, out).out;
    return flat;
  }
  void spread() override {
    if (segments_.size() == 1) return;
    auto in = flat_.take(extent_).begin();
    for (Segment<T> const& segment : segments_) {
      std::copy_n(in, segment.gradient.size(), segment.gradient.begin());
      in += static_cast<std::ptrdiff_t>(segment.gradient.size());
    }
  }

 private:
  std::uint64_t extent_;
  Executor const& executor_;
  std::vector<Segment<T>> segments_;
  ErrorFeedback<T> feedback_;
  Buffer<T> flat_;  // where a gradient of several segments is gathered
};

}  // namespace

template <class T>
std::unique_ptr<LocalGradient<T>> make_host_gradient(ThresholdSchedule schedule,
                                                     SelectionRule const& rule,
                                                     std::uint64_t extent,
                                                     Executor const& executor) {
  return std::make_unique<HostGradient<T>>(schedule, rule, extent, executor);
}

#define SPARSECOMM_HOST_GRADIENT(T)                              \
  template std::unique_ptr<LocalGradient<T>> make_host_gradient( \
      ThresholdSchedule, SelectionRule const&, std::uint64_t, Executor const&);
SPARSECOMM_HOST_GRADIENT(float)
SPARSECOMM_HOST_GRADIENT(double)
SPARSECOMM_HOST_GRADIENT(Half)
SPARSECOMM_HOST_GRADIENT(BFloat16)
#undef SPARSECOMM_HOST_GRADIENT

}  // namespace sparsecomm
