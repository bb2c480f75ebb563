#include "compress/device_gradient.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "compress/bucket_selection.h"
#include "compress/device_blocks.h"
#include "compress/device_threshold.h"

namespace sparsecomm {
namespace {

template <class T>
class DeviceGradient final : public LocalGradient<T> {
 public:
  using V = accumulate_t<T>;

  DeviceGradient(ThresholdSchedule schedule, SelectionRule const& rule, std::uint64_t extent,
                 DeviceQueue queue)
      : extent_(extent),
        rule_(rule),
        selector_(selector_of(rule)),
        queue_(std::move(queue)),
        stream_(queue_.stream),
        find_(queue_),
        blocks_(queue_) {
    require(rule.first_moment == 0,
            "on CUDA devices nothing is selected by the first moment yet; leave first_moment at 0, "
            "or keep the model on the CPU");
    follow(schedule);
  }

  ~DeviceGradient() override {
    try {
      OnDevice const on(queue_);
      runtime().synchronize(stream_);  // before the memory goes
    } catch (...) {  // the device has failed, and said so to whoever waited for a result
    }
  }

  void bind(std::vector<Segment<T>> segments, std::span<V> moment) override {
    std::uint64_t const wanted = rule_.has_moment() ? extent_ : 0;
    require(moment.size() == wanted, "a gradient of ", extent_, " entries needs ", wanted,
            " moments, not ", moment.size());
    segments_ = std::move(segments);
    moment_ = moment;
  }

  bool all_finite() override {
    OnDevice const on(queue_);
    Flags* const flags = flags_.take(queue_, 1);
    if (!flags_cleared_) runtime().zero(flags, sizeof(Flags), stream_);
    flags_cleared_ = true;
    runtime().zero(&flags->not_finite, sizeof(flags->not_finite), stream_);
    for (Segment<T> const& segment : segments_) {
      kernels().all_finite(segment.gradient.data(), segment.gradient.size(), &flags->not_finite,
                           stream_);
    }
    Flags const now = fetch(queue_, flags, host_flags_);
    require<Error>(now.outside == 0, "an index lies outside of a gradient of ", extent_,
                   " entries on a CUDA device; a bug of sparsecomm: please report it");
    return now.not_finite == 0;
  }

  void accumulate() override {
    OnDevice const on(queue_);
    residual_is_clear_ = false;
    cuda::SelectionState* const state = state_.take(queue_, 1);
    cuda::Packed<V> const nowhere{indices_.take(queue_, 1), values_.take(queue_, 1)};
    Threshold<V> const none{std::numeric_limits<V>::max(), 0};
    library().begin(cuda::begin_selection(none, 0), state, stream_);
    enqueue_selection(state, nowhere, moment_, rule_.velocity.gain, selection_workspace());
  }

  void find_threshold(std::uint64_t k, std::uint64_t step) override {
    if (selector_->find_threshold != nullptr) (this->*selector_->find_threshold)(k, step);
  }

  SparseView<V> select(std::uint64_t k) override {
    OnDevice const on(queue_);
    residual_is_clear_ = false;
    whole_ = k >= extent_;
    (this->*selector_->pack)(k);
    return selection_;
  }

  void flush() override {
    OnDevice const on(queue_);
    T* copy = flushed_.take(queue_, extent_);
    for (Segment<T> const& segment : segments_) {
      std::size_t const size = segment.gradient.size();
      if (residual_is_clear_) {
        runtime().copy(copy, segment.gradient.data(), size * sizeof(T), stream_);
      } else {
        kernels().flush(segment.gradient.data(), segment.residual.data(), copy, size, stream_);
      }
      copy += size;
    }
    has_flushed_ = true;
    residual_is_clear_ = std::is_same_v<T, V>;  // nothing was rounded away
  }

  void keep(SparseView<V> rejected) override {
    OnDevice const on(queue_);
    V* const before = before_.take(queue_, rejected.nnz());
    outside();
    auto const [indices, values] = upload(rejected, rejected_);
    for_each_part(rejected.indices, [&](Segment<T> const& segment, std::uint32_t first,
                                        std::size_t begin, std::size_t end) {
      library().template values<V>().add_sparse(segment.residual.data(), segment.residual.size(),
                                                indices + begin, values + begin, end - begin, first,
                                                before + begin, outside(), stream_);
    });
    kept_indices_ = rejected.indices;
  }

  void mask(StreamView<V> const& reduced) override {
    if (!rule_.masks() || whole_) return;
    to_mask_.clear();
    delivered(selection_.indices, reduced, to_mask_);
    if (to_mask_.empty()) return;
    OnDevice const on(queue_);
    std::size_t const count = to_mask_.size();
    V* const before = masked_moments_.take(queue_, count);
    V* const zeros = zeros_.take(queue_, count);
    auto const* const indices =
        upload(std::span<const std::uint32_t>(to_mask_), masked_through_, masked_indices_);
    runtime().zero(zeros, count * sizeof(V), stream_);
    library().template values<V>().add_sparse(moment_.data(), moment_.size(), indices, zeros, count,
                                              0, before, outside(), stream_);
    masked_ = count;
    library().template kernels<V>().scatter(moment_.data(), moment_.size(), indices, zeros, count,
                                            V{1}, 0, outside(), stream_);
  }

  void residual_changed() override { residual_is_clear_ = false; }

  void restore() override {
    OnDevice const on(queue_);
    auto const& residuals = library().template kernels<V>();
    if (masked_ > 0) {
      residuals.scatter(moment_.data(), moment_.size(), masked_indices_.take(queue_, masked_),
                        masked_moments_.take(queue_, masked_), masked_, V{1}, 0, outside(),
                        stream_);
    }
    auto const put_back = [&](std::span<const std::uint32_t> sorted, std::uint32_t const* indices,
                              V const* values) {
      for_each_part(sorted, [&](Segment<T> const& segment, std::uint32_t first, std::size_t begin,
                                std::size_t end) {
        residuals.scatter(segment.residual.data(), segment.residual.size(), indices + begin,
                          values + begin, end - begin, V{1}, first, outside(), stream_);
      });
    };
    std::size_t const kept = kept_indices_.size();
    put_back(kept_indices_, rejected_.indices.take(queue_, kept), before_.take(queue_, kept));
    std::size_t const selected = selection_.nnz();
    put_back(selection_.indices, indices_.take(queue_, selected), values_.take(queue_, selected));
    if (has_flushed_) {
      residual_is_clear_ = false;
      T const* sent = flushed_.take(queue_, extent_);
      for (Segment<T> const& segment : segments_) {
        kernels().add(segment.residual.data(), sent, segment.residual.size(), stream_);
        sent += segment.residual.size();
      }
    }
    forget();
  }

  void forget() override {
    selection_ = {};
    kept_indices_ = {};
    masked_ = 0;
    has_flushed_ = false;
  }

  void follow(ThresholdSchedule schedule) override { schedule_ = schedule; }

  void set_velocity(VelocityRule const& rule) override {
    rule_.velocity = rule;
    selector_ = selector_of(rule_);
  }

  void reset(double threshold) override {
    threshold_ = {static_cast<V>(threshold), 0};
    residual_is_clear_ = false;
  }

  double threshold() const override { return static_cast<double>(threshold_.magnitude); }

  void store(StreamView<V> const& result, V divisor) override {
    OnDevice const on(queue_);
    if (!result.is_dense) {
      auto const [indices, values] = upload(result.sparse, result_);
      for_each_part(result.sparse.indices, [&](Segment<T> const& segment, std::uint32_t first,
                                               std::size_t begin, std::size_t end) {
        kernels().scatter(segment.gradient.data(), segment.gradient.size(), indices + begin,
                          values + begin, end - begin, divisor, first, outside(), stream_);
      });
      return;
    }
    V const* values = upload(result.dense, result_.host_values, result_.values);
    for (Segment<T> const& segment : segments_) {
      kernels().divide(segment.gradient.data(), values, segment.gradient.size(), divisor, stream_);
      values += segment.gradient.size();
    }
  }

  void fill(T value) override {
    OnDevice const on(queue_);
    for (Segment<T> const& segment : segments_) {
      kernels().fill(segment.gradient.data(), segment.gradient.size(), value, stream_);
    }
  }

  std::span<T> gather() override {
    OnDevice const on(queue_);
    auto const flat = flat_.take(queue_, extent_);
    T* to = flat.data();
    for (Segment<T> const& segment : segments_) {
      runtime().copy(to, segment.gradient.data(), segment.gradient.size_bytes(), stream_);
      to += segment.gradient.size();
    }
    runtime().synchronize(stream_);
    return flat;
  }

  void spread() override {
    OnDevice const on(queue_);
    T const* from = flat_.take(queue_, extent_).data();
    for (Segment<T> const& segment : segments_) {
      runtime().copy(segment.gradient.data(), from, segment.gradient.size_bytes(), stream_);
      from += segment.gradient.size();
    }
  }

 private:
  // The functions of a selector; see ErrorFeedback.
  struct Row {
    Selector id;
    void (DeviceGradient::*find_threshold)(std::uint64_t k, std::uint64_t step);
    void (DeviceGradient::*pack)(std::uint64_t k);
  };
  struct Flags {
    std::uint32_t not_finite, outside;
  };
  struct Upload {
    PinnedBuffer<std::uint32_t> host_indices;
    PinnedBuffer<V> host_values;
    DeviceBuffer<std::uint32_t> indices;
    DeviceBuffer<V> values;
  };

  cuda::Library const& library() const { return *queue_.library; }
  cuda::Kernels<T> const& kernels() const { return library().template kernels<T>(); }
  cuda::Runtime const& runtime() const { return library().runtime; }
  std::uint32_t* outside() { return &flags_.take(queue_, 1)->outside; }

  static Row const* selector_of(SelectionRule const& rule) {
    using G = DeviceGradient;
    static constexpr Row rows[] = {
        {Selector::fused, &G::search, &G::pack_by_threshold},
        {Selector::accumulated, &G::search, &G::pack_by_threshold},
        {Selector::bucket, nullptr, &G::pack_buckets},
        {Selector::block, nullptr, &G::pack_blocks},
    };
    SelectorEntry const& entry = find_selector(rule);
    Row const* const row = find_row(rows, entry.id);
    require(row != nullptr, "on CUDA devices nothing is selected by ", entry.name,
            " yet; choose another selection, or keep the model on the CPU");
    return row;
  }

  void search(std::uint64_t k, std::uint64_t step) {
    switch (schedule_.local_at(step, threshold_.magnitude > 0)) {
      case ThresholdSource::exact:
        threshold_ = find_.exact(segments_, k);
        break;
      case ThresholdSource::sampled:
        threshold_ = find_.sampled(segments_, k, threshold_stride, step);
        break;
      case ThresholdSource::gaussian:
        threshold_ = find_.gaussian(segments_, k);
        break;
      case ThresholdSource::reused:
        threshold_.ties = k;
        break;
    }
  }

  void pack_by_threshold(std::uint64_t k) {
    std::uint64_t const limit = selection_limit(extent_, k);
    // All memory first: once the residual has changed, what was taken out of it must reach the
    // host.
    cuda::SelectionState* const state = state_.take(queue_, 1);
    cuda::Packed<V> const out{indices_.take(queue_, limit), values_.take(queue_, limit)};
    auto const indices = host_indices_.take(queue_, limit);
    auto const values = host_values_.take(queue_, limit);
    host_state_.take(queue_, 1);
    void* const workspace = selection_workspace();
    library().begin(cuda::begin_selection(threshold_, limit), state, stream_);
    enqueue_selection(state, out, {}, 1, workspace);
    std::size_t const count = fetch(queue_, state, host_state_).count();
    runtime().copy(indices.data(), out.indices, count * sizeof(std::uint32_t), stream_);
    runtime().copy(values.data(), out.values, count * sizeof(V), stream_);
    runtime().synchronize(stream_);
    selection_ = {indices.first(count), values.first(count)};
  }

  void pack_buckets(std::uint64_t k) {
    auto const residual = joined<T>(segments_, &Segment<T>::residual, extent_);
    std::size_t const each = of_each_bucket(extent_, rule_.bucket, k);
    std::size_t const count = bucket_top_k_count(extent_, rule_.bucket, each);
    cuda::Packed<V> const out{indices_.take(queue_, count), values_.take(queue_, count)};
    V* const zeros = zeros_.take(queue_, count);
    auto const indices = host_indices_.take(queue_, count);
    auto const values = host_values_.take(queue_, count);
    auto const& on_residual = library().template kernels<V>();
    runtime().zero(zeros, count * sizeof(V), stream_);
    on_residual.top_k_per_bucket(residual.data(), extent_, extent_, rule_.bucket, each, out,
                                 stream_);
    on_residual.scatter(residual.data(), extent_, out.indices, zeros, count, V{1}, 0, outside(),
                        stream_);
    runtime().copy(indices.data(), out.indices, indices.size_bytes(), stream_);
    runtime().copy(values.data(), out.values, values.size_bytes(), stream_);
    runtime().synchronize(stream_);
    // Zeros need not travel.
    std::size_t taken = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (values[i] == 0) continue;
      indices[taken] = indices[i];
      values[taken++] = values[i];
    }
    selection_ = {indices.first(taken), values.first(taken)};
    if (taken < count) {  // what restore() puts back
      runtime().copy(out.indices, indices.data(), taken * sizeof(std::uint32_t), stream_);
      runtime().copy(out.values, values.data(), taken * sizeof(V), stream_);
    }
  }

  void pack_blocks(std::uint64_t k) {
    auto const residual = joined<T>(segments_, &Segment<T>::residual, extent_);
    std::size_t const block = rule_.block;
    std::size_t const wanted = part_count(std::min(k, extent_), block);
    selection_ = {};
    if (wanted == 0) return;
    // All memory first, as above.
    std::size_t const room = wanted * block;
    cuda::Packed<V> const kept{indices_.take(queue_, room), values_.take(queue_, room)};
    auto const indices = host_indices_.take(queue_, room);
    auto const values = host_values_.take(queue_, room);
    auto const host_numbers = host_numbers_.take(queue_, wanted);
    auto const [numbers, count] = blocks_.find(residual, block, wanted);
    auto* const bytes = reinterpret_cast<std::byte*>(residual.data());
    // To the host's memory at once.
    library().block_gather(bytes, residual.size_bytes(), block * sizeof(V), numbers, count,
                           reinterpret_cast<std::byte*>(values.data()), outside(), stream_);
    library().block_scatter(bytes, residual.size_bytes(), block * sizeof(V), numbers, count,
                            nullptr, outside(), stream_);
    runtime().copy(host_numbers.data(), numbers, count * sizeof(std::uint32_t), stream_);
    runtime().synchronize(stream_);
    std::size_t taken = 0;
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t j = 0; j < block; ++j) {
        V const value = values[i * block + j];
        if (value == 0) continue;
        indices[taken] = static_cast<std::uint32_t>(std::uint64_t{host_numbers[i]} * block + j);
        values[taken++] = value;
      }
    }
    selection_ = {indices.first(taken), values.first(taken)};
    // What restore() puts back.
    runtime().copy(kept.indices, indices.data(), taken * sizeof(std::uint32_t), stream_);
    runtime().copy(kept.values, values.data(), taken * sizeof(V), stream_);
  }

  // For any of the segments.
  void* selection_workspace() {
    std::size_t longest = 0;
    for (Segment<T> const& segment : segments_) {
      longest = std::max(longest, segment.gradient.size());
    }
    return workspace_.take(queue_, library().selection_workspace(longest));
  }

  // With momentum correction, but for the mask, where there is a momentum.
  void enqueue_selection(cuda::SelectionState* state, cuda::Packed<V> out, std::span<V> momentum,
                         double gain, void* workspace) {
    std::size_t first = 0;
    for (Segment<T> const& segment : segments_) {
      cuda::ErrorFeedbackArguments<T> arguments;
      arguments.gradient = segment.gradient.data();
      arguments.residual = segment.residual.data();
      arguments.size = segment.gradient.size();
      arguments.first_index = static_cast<std::uint32_t>(first);
      arguments.scale = static_cast<V>(gain);
      if (!momentum.empty()) {
        arguments.momentum = momentum.data() + first;
        arguments.momentum_factor = static_cast<V>(rule_.velocity.momentum);
        arguments.mask_momentum = false;
        arguments.nesterov = rule_.velocity.nesterov;
      }
      kernels().fused_error_feedback(arguments, state, out, workspace, stream_);
      first += arguments.size;
    }
  }

  // The stream has read what was uploaded before when a step begins: all_finite() waits for it.
  template <class E>
  E const* upload(std::span<const E> from, PinnedBuffer<E>& through, DeviceBuffer<E>& to) {
    auto const staged = through.take(queue_, from.size());
    std::ranges::copy(from, staged.begin());
    E* const memory = to.take(queue_, from.size());
    runtime().copy(memory, staged.data(), staged.size_bytes(), stream_);
    return memory;
  }
  std::pair<std::uint32_t const*, V const*> upload(SparseView<V> from, Upload& to) {
    return {upload(from.indices, to.host_indices, to.indices),
            upload(from.values, to.host_values, to.values)};
  }

  // Calls f(segment, its first index, begin, end) for the sorted indices that each segment holds.
  template <class F>
  void for_each_part(std::span<const std::uint32_t> indices, F&& f) {
    std::uint64_t first = 0;
    std::size_t begin = 0;
    for (Segment<T> const& segment : segments_) {
      std::uint64_t const last = first + segment.gradient.size();
      std::size_t const end = std::lower_bound(indices.begin() + static_cast<std::ptrdiff_t>(begin),
                                               indices.end(), last) -
                              indices.begin();
      if (begin < end) f(segment, static_cast<std::uint32_t>(first), begin, end);
      begin = end;
      first = last;
    }
  }

  std::uint64_t extent_;
  SelectionRule rule_;
  Row const* selector_;  // the rule's
  DeviceQueue queue_;
  cuda::Stream stream_;
  DeviceThreshold<T> find_;
  DeviceBlocks<V> blocks_;
  ThresholdSchedule schedule_;
  Threshold<V> threshold_;
  std::vector<Segment<T>> segments_;
  std::span<V> moment_;

  DeviceBuffer<Flags> flags_;
  PinnedBuffer<Flags> host_flags_;
  bool flags_cleared_ = false;
  DeviceBuffer<cuda::SelectionState> state_;
  PinnedBuffer<cuda::SelectionState> host_state_;
  DeviceBuffer<std::byte> workspace_;
  PinnedBuffer<std::uint32_t> host_numbers_;

  // What restore() takes back: the selection, what keep() added to, what flush() sent.
  DeviceBuffer<std::uint32_t> indices_;
  DeviceBuffer<V> values_;
  PinnedBuffer<std::uint32_t> host_indices_;
  PinnedBuffer<V> host_values_;
  SparseView<V> selection_;
  Upload rejected_;
  DeviceBuffer<V> before_;  // the residuals that keep() changed
  std::span<const std::uint32_t> kept_indices_;
  bool whole_ = false;  // every entry was wanted
  std::vector<std::uint32_t> to_mask_;
  PinnedBuffer<std::uint32_t> masked_through_;
  DeviceBuffer<std::uint32_t> masked_indices_;
  DeviceBuffer<V> masked_moments_, zeros_;
  std::size_t masked_ = 0;
  DeviceBuffer<T> flushed_;
  bool has_flushed_ = false;
  bool residual_is_clear_ = false;

  Upload result_;
  PinnedBuffer<T> flat_;
};

}  // namespace

template <class T>
std::unique_ptr<LocalGradient<T>> make_device_gradient(ThresholdSchedule schedule,
                                                       SelectionRule const& rule,
                                                       std::uint64_t extent, DeviceQueue queue) {
  return std::make_unique<DeviceGradient<T>>(schedule, rule, extent, std::move(queue));
}

#define SPARSECOMM_INSTANTIATE(T)                                  \
  template std::unique_ptr<LocalGradient<T>> make_device_gradient( \
      ThresholdSchedule, SelectionRule const&, std::uint64_t, DeviceQueue)
SPARSECOMM_INSTANTIATE(float);
SPARSECOMM_INSTANTIATE(double);
SPARSECOMM_INSTANTIATE(Half);
SPARSECOMM_INSTANTIATE(BFloat16);
#undef SPARSECOMM_INSTANTIATE

}  // namespace sparsecomm
