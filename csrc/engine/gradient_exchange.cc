#include "engine/gradient_exchange.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>

namespace sparsecomm {
namespace {

class Stopwatch {
 public:
  Stopwatch(Clock const& clock, Duration& total)
      : clock_(clock), total_(total), start_(clock.now()) {}
  ~Stopwatch() { total_ += clock_.now() - start_; }
  Stopwatch(Stopwatch const&) = delete;
  Stopwatch& operator=(Stopwatch const&) = delete;

 private:
  Clock const& clock_;
  Duration& total_;
  TimePoint start_;
};

AlgorithmOptions collective_options(ExchangeOptions const& options) {
  AlgorithmOptions collective = options.collective;
  collective.schedule = options.schedule;
  return collective;
}

ThresholdSchedule local_schedule(AlgorithmEntry const& algorithm, ExchangeOptions const& options) {
  ThresholdSchedule schedule = options.schedule;
  schedule.between = algorithm.selection.value_or(schedule.between);
  return schedule;
}

}  // namespace

void validate(ExchangeOptions const& options) {
  AlgorithmEntry const& algorithm = find_algorithm(options.algorithm);
  ValueCodec const codec = options.collective.frame.value_codec;
  if (auto const& entry = value_codec_for(codec, DType::f32); entry.lossy && !algorithm.rounds) {
    std::string rounding;
    for (AlgorithmEntry const& other : algorithms()) {
      if (other.rounds) rounding += concat(rounding.empty() ? "" : ", ", other.name);
    }
    throw InvalidArgument(concat("algorithm '", algorithm.name, "' does not round values to ",
                                 entry.name, "; these do: ", rounding));
  }
  require(options.density > 0 && options.density <= 1, "density = ", options.density,
          " is not in (0, 1]; 0.01 sends one entry in a hundred");
  require(options.schedule.period >= 1, "threshold period = ", options.schedule.period,
          " is not a number of steps; use 1 or more");
  require(options.collective.partition_period >= 1,
          "partition_period = ", options.collective.partition_period,
          " is not a number of steps; use 1 or more");
  require(options.collective.balance_factor >= 1,
          "balance_factor = ", options.collective.balance_factor,
          " is below 1; the largest share is never below the average");
  require(options.collective.window >= 1, "window = ", options.collective.window,
          " receives at a time is below 1");
  require(options.collective.overlap_chunk >= 1,
          "overlap_chunk = ", options.collective.overlap_chunk,
          " elements is below 1; use 262144 or so");
}

template <class T>
GradientExchange<T>::GradientExchange(std::string name, std::uint64_t extent,
                                      ExchangeOptions const& options, Communicator& communicator)
    : name_(std::move(name)),
      extent_(extent),
      options_(options),
      communicator_(communicator),
      algorithm_((validate(options), find_algorithm(options.algorithm))),
      feedback_(local_schedule(algorithm_, options), extent) {
  require(extent < std::numeric_limits<std::uint32_t>::max(), "a gradient of ", extent,
          " entries exceeds 2^32 - 2; split it into smaller groups");
  std::uint64_t const largest_message =
      algorithm_.sparse
          ? selection_limit(extent, k()) * (sizeof(std::uint32_t) + sizeof(V))
          : algorithm_.dense->largest_message(extent, communicator.size()) * sizeof(T);
  require(largest_message <= std::numeric_limits<std::uint32_t>::max(), "a message of ", extent,
          " entries at density ", options.density, " may take ", largest_message,
          " bytes, more than a frame's 2^32 - 1; split the gradient into smaller groups");
  if (algorithm_.sparse) {
    sparse_ = make_sparse_allreduce<V>(algorithm_, collective_options(options));
  } else {
    dense_ = algorithm_.dense->make<T>(collective_options(options));
  }
}

template <class T>
void GradientExchange<T>::bind(std::vector<Segment<T>> segments) {
  std::uint64_t total = 0;
  for (Segment<T> const& segment : segments) {
    require(!algorithm_.sparse || segment.residual.size() == segment.gradient.size(),
            "a gradient of ", segment.gradient.size(), " entries has a residual of ",
            segment.residual.size());
    total += segment.gradient.size();
  }
  require(total == extent_, "the segments hold ", total, " entries, the group ", extent_);
  segments_ = std::move(segments);
}

template <class T>
void GradientExchange<T>::set_density(double density) {
  ExchangeOptions changed = options_;
  changed.density = density;
  validate(changed);
  options_ = changed;
}

template <class T>
void GradientExchange<T>::load_state(ExchangeState state) {
  auto const& boundaries = state.collective.boundaries;
  require(boundaries.empty() ||
              (boundaries.size() + 1 == static_cast<std::size_t>(communicator_.size()) &&
               std::ranges::is_sorted(boundaries) && boundaries.back() <= extent_),
          "the state to load has ", boundaries.size(), " boundaries, which do not split ", extent_,
          " entries for ", communicator_.size(), " ranks");
  for (double const threshold : {state.local_threshold, state.collective.global_threshold}) {
    require(std::isfinite(threshold) && threshold >= 0, "the state to load has a threshold of ",
            threshold, ", which no magnitude is");
  }
  feedback_.load_threshold(state.local_threshold);
  if (sparse_) sparse_->load_state(state.collective);
  state_ = std::move(state);
}

template <class T>
std::uint64_t GradientExchange<T>::k() const {
  auto const wanted = std::llround(options_.density * static_cast<double>(extent_));
  return std::clamp<std::uint64_t>(wanted, 1, std::max<std::uint64_t>(1, extent_));
}

template <class T>
typename GradientExchange<T>::V GradientExchange<T>::divisor() const {
  // A division, not a multiplication by 1/P, which would round even where the average is exact.
  return options_.average ? static_cast<V>(communicator_.size()) : V{1};
}

template <class T>
Proposal GradientExchange<T>::prepare() {
  feedback_.forget();
  delivered_ = false;
  Stopwatch const watch(communicator_.clock(), stats_.select);
  bool const finite = std::ranges::all_of(segments_, [](Segment<T> const& segment) {
    return kernels<T>().all_finite(segment.gradient);
  });
  std::ostringstream text;
  text << std::setprecision(std::numeric_limits<double>::max_digits10)
       << "operation=gradient exchange"
       << ";group=" << name_ << ";algorithm=" << options_.algorithm << ";numel=" << extent_
       << ";dtype=" << sparsecomm::name(dtype_of<T>()) << ";density=" << options_.density
       << ";average=" << options_.average
       << ";schedule=" << sparsecomm::name(options_.schedule.between) << '/'
       << options_.schedule.period << ";partition_period=" << options_.collective.partition_period
       << ";balance_factor=" << options_.collective.balance_factor
       << ";value_codec=" << int(options_.collective.frame.value_codec)
       << ";overlap_chunk=" << options_.collective.overlap_chunk << ";step=" << state_.step
       << ";global_threshold=" << state_.collective.global_threshold << ";boundaries=";
  for (std::uint32_t const boundary : state_.collective.boundaries) text << boundary << ',';
  if (finite && algorithm_.sparse && extent_ > 0) {
    feedback_.find_threshold(segments_, k(), state_.step);
    state_.local_threshold = feedback_.threshold();
  }
  return {text.str(), finite};
}

template <class T>
void GradientExchange<T>::run(Channel& channel, Agreement const& agreement) {
  if (!agreement.all_finite) {
    // Somebody's overflow: all ranks see it, and no residual has been touched.
    V const nan = std::numeric_limits<V>::quiet_NaN();
    for (Segment<T> const& segment : segments_)
      std::ranges::fill(segment.gradient, static_cast<T>(nan));
  } else if (algorithm_.sparse) {
    run_sparse(channel);
  } else {
    run_dense(channel);
  }
  delivered_ = agreement.all_finite;
  ++state_.step;
  ++stats_.steps;
  stats_.numel += extent_;
}

template <class T>
void GradientExchange<T>::run_sparse(Channel& channel) {
  SparseView<V> selection;
  {
    Stopwatch const watch(communicator_.clock(), stats_.select);
    selection = feedback_.select(segments_, k());
  }
  AllreduceResult<V> result;
  {
    Stopwatch const watch(communicator_.clock(), stats_.exchange);
    result = sparse_->run(channel, selection,
                          {extent_, k(), selection_limit(extent_, k()), state_.step});
  }
  Stopwatch const watch(communicator_.clock(), stats_.apply);
  feedback_.keep(segments_, result.rejected);
  std::uint64_t first = 0;
  for (Segment<T> const& segment : segments_) {
    std::uint64_t const last = first + segment.gradient.size();
    if (result.reduced.is_dense) {
      std::ranges::transform(result.reduced.dense.subspan(first, last - first),
                             segment.gradient.begin(),
                             [&](V x) { return static_cast<T>(x / divisor()); });
    } else {
      SparseView<V> const part = result.reduced.sparse.range(first, last);
      scatter<T>(segment.gradient, part.indices, part.values, divisor(),
                 static_cast<std::uint32_t>(first));
    }
    first = last;
  }
  stats_.selected += selection.nnz();
  stats_.result_nnz += result.reduced.nnz();
  state_.collective = sparse_->state();
}

template <class T>
void GradientExchange<T>::run_dense(Channel& channel) {
  Stopwatch const watch(communicator_.clock(), stats_.exchange);
  if (segments_.size() == 1) {
    dense_->run(channel, segments_.front().gradient, Reduction::sum, divisor());
  } else {
    auto const flat = flat_.take(extent_);
    auto out = flat.begin();
    for (Segment<T> const& segment : segments_) out = std::ranges::copy(segment.gradient, out).out;
    dense_->run(channel, flat, Reduction::sum, divisor());
    auto in = flat.begin();
    for (Segment<T> const& segment : segments_) {
      std::copy_n(in, segment.gradient.size(), segment.gradient.begin());
      in += static_cast<std::ptrdiff_t>(segment.gradient.size());
    }
  }
  stats_.selected += extent_;
  stats_.result_nnz += extent_;
}

template <class T>
void GradientExchange<T>::roll_back() noexcept {
  withdraw();
}

template <class T>
void GradientExchange<T>::withdraw() {
  feedback_.restore(segments_);
  delivered_ = false;
}

template class GradientExchange<float>;
template class GradientExchange<double>;
template class GradientExchange<Half>;
template class GradientExchange<BFloat16>;

}  // namespace sparsecomm
