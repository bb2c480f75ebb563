#include "engine/calibration.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <limits>
#include <numeric>
#include <optional>

#include "collectives/patterns.h"
#include "compress/error_feedback.h"
#include "engine/in_turn.h"

namespace sparsecomm {
namespace {

// Seconds from the start, by the slowest rank's clock, after which nothing further of a part is
// begun. What is left until 300 ms is for what has been begun, and for ranks that wait for a core.
constexpr double small_until = 25e-3;
constexpr double large_until = 60e-3;
constexpr double hidden_until = 80e-3;
constexpr double kernels_until = 105e-3;
// Likewise, from the start of what is measured with aggregators, after all else.
constexpr double aggregators_small_until = 15e-3;
constexpr double aggregators_until = 80e-3;

// The kernels' vectors grow until they are past most caches, as gradients are.
constexpr std::size_t first_entries = std::size_t{1} << 18;
constexpr std::size_t most_entries = std::size_t{1} << 22;
constexpr std::size_t growth = 4;
constexpr float passing = 0.75f;  // of magnitudes uniform in [0, 1): 1 in 4 is larger

constexpr std::size_t small_bytes = 64;
constexpr std::size_t first_large_bytes = std::size_t{1} << 16;
constexpr std::size_t most_large_bytes = std::size_t{1} << 24;
// Longer than a rate limiter's burst and a scheduler's time slice.
constexpr double long_enough = 15e-3;
constexpr int most_repeats = 16;
constexpr int most_at_once = 8;

// Seconds since it was made.
class Timer {
 public:
  explicit Timer(Clock const& clock) : clock_(clock), start_(clock.now()) {}
  double elapsed() const { return std::chrono::duration<double>(clock_.now() - start_).count(); }

 private:
  Clock const& clock_;
  TimePoint start_;
};

// Deterministic, and unlike anything a branch predictor learns.
class Noise {
 public:
  std::uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    state_ ^= state_ << 5;
    return state_;
  }

 private:
  std::uint32_t state_ = 0x9e3779b9u;
};

// Messages between all ranks at once, each to the rank `distance` further on. Whether there is time
// for more is decided by agreed numbers, so that all ranks exchange as many.
class Exchanges {
 public:
  Exchanges(Channel& channel, Clock const& clock, CalibrationBuffers& buffers)
      : channel_(channel), clock_(clock), total_(clock), buffers_(buffers) {
    for (int distance = 1; distance < channel.size(); distance *= 2) {
      distances_.push_back(distance);
    }
  }

  Link measure() {
    Link link = small_messages();
    link.byte = byte_seconds(link.round + link.message);
    return link;
  }

  double elapsed() const { return total_.elapsed(); }

  // [rank]
  template <std::size_t N>
  std::vector<std::array<double, N>> gather(std::array<double, N> const& own) {
    auto const payload = std::as_bytes(std::span(own));
    std::vector<std::byte>& frame = buffers_.own;
    frame.resize(header_bytes + payload.size());
    encode_bytes(channel_.stamp(), payload, frame);
    auto const frames = buffers_.gather.run(channel_, Phase::gather, frame, frame.size());
    std::vector<std::array<double, N>> every(channel_.size());
    for (int rank = 0; rank < channel_.size(); ++rank) {
      channel_.decode_from(rank, [&] {
        require<MalformedFrame>(frames[rank].values.size() == payload.size(), "times of ",
                                frames[rank].values.size(), " bytes, must be ", payload.size());
        std::memcpy(every[rank].data(), frames[rank].values.data(), payload.size());
        for (double const time : every[rank]) {
          require<MalformedFrame>(std::isfinite(time) && time >= 0, "a time of ", time, " s");
        }
      });
    }
    return every;
  }

  // The largest of all ranks' numbers; also brings the ranks together.
  template <std::size_t N>
  std::array<double, N> agreed_most(std::array<double, N> const& own) {
    std::array<double, N> most{};
    for (auto const& other : gather<N>(own)) {
      std::ranges::transform(most, other, most.begin(),
                             [](double x, double y) { return std::max(x, y); });
    }
    return most;
  }

 private:
  double rounds() const { return static_cast<double>(distances_.size()); }

  // The median of several, since one may have waited for a core.
  Link small_messages() {
    int const together = std::min(most_at_once, channel_.size() - 1);
    std::vector<int> nearest(together);
    std::iota(nearest.begin(), nearest.end(), 1);
    std::vector<double> alone;
    std::vector<double> several;
    for (int repeat = 0; repeat < most_repeats; ++repeat) {
      Probe const group = prepare(nearest.size(), small_bytes);
      Timer const first(clock_);
      exchange(nearest, group);
      double const took_several = first.elapsed();
      Probe const single = prepare(1, small_bytes);
      Timer const second(clock_);
      for (int const distance : distances_) exchange({&distance, 1}, single);
      auto const most = agreed_most<3>({took_several, second.elapsed(), elapsed()});
      if (repeat == 0) continue;  // it connected
      several.push_back(most[0]);
      alone.push_back(most[1] / rounds());
      if (most[2] >= small_until) break;
    }
    double const round = median(alone);
    if (together < 2) return {.round = round};
    double const message = std::clamp((median(several) - round) / (together - 1), 0.0, round);
    return {.round = round - message, .message = message};
  }

  // The least of up to three where a message takes long enough, since ranks may have waited for a
  // core. If that is no longer than small messages took, small ones have waited for one: longer
  // messages are tried, and their latency is left in.
  double byte_seconds(double alone) {
    double const latency = alone * rounds();
    bool waited = false;
    for (std::size_t bytes = first_large_bytes;; bytes *= growth) {
      std::size_t const each = bytes / distances_.size();
      double least = std::numeric_limits<double>::infinity();
      double total = 0;
      for (int repeat = 0; repeat < 3; ++repeat) {
        Probe const probe = prepare(1, each);
        Timer const watch(clock_);
        for (int const distance : distances_) exchange({&distance, 1}, probe);
        auto const most = agreed_most<2>({watch.elapsed(), elapsed()});
        least = std::min(least, most[0]);
        total = most[1];
        if (least < long_enough || least <= latency || total + least >= large_until) break;
      }
      bool const hidden = least <= latency;
      waited = waited || hidden;
      bool const lengthen = hidden ? total + least < hidden_until
                                   : least < long_enough && total + growth * least < large_until;
      if (lengthen && bytes < most_large_bytes) continue;
      return (waited ? least : least - latency) / (static_cast<double>(each) * rounds());
    }
  }

  struct Probe {
    std::span<const std::byte> outgoing;
    std::span<std::byte> incoming;
    std::size_t payload_bytes;
  };

  // Before a stopwatch starts: what encoding takes is a kernel's rate. Touches the pages.
  Probe prepare(std::size_t count, std::size_t bytes) {
    std::size_t const frame_bytes = header_bytes + bytes;
    auto const incoming = buffers_.incoming.take(frame_bytes * count);
    auto const outgoing = buffers_.outgoing.take(frame_bytes);
    std::ranges::fill(incoming, std::byte{});
    encode_bytes(channel_.stamp(), incoming.first(bytes), outgoing);
    return {outgoing, incoming, bytes};
  }

  void exchange(std::span<const int> distances, Probe const& probe) {
    int const rank = channel_.rank();
    int const size = channel_.size();
    std::size_t const frame_bytes = header_bytes + probe.payload_bytes;
    auto const part = [&](std::size_t i) {
      return probe.incoming.subspan(i * frame_bytes, frame_bytes);
    };
    std::vector<Request> sends;
    std::vector<Request> receives;
    receives.reserve(distances.size());
    sends.reserve(distances.size());
    for (std::size_t i = 0; i < distances.size(); ++i) {
      int const source = rank_at(distances[i], rank, size);
      receives.push_back(channel_.irecv(source, Phase::reduce, part(i)));
    }
    for (int const distance : distances) {
      int const destination = rank_before(distance, rank, size);
      sends.push_back(channel_.isend(destination, Phase::reduce, probe.outgoing));
    }
    for (std::size_t i = 0; i < distances.size(); ++i) {
      int const source = rank_at(distances[i], rank, size);
      FrameView const frame = channel_.wait_frame(receives[i], source, part(i));
      channel_.decode_from(source, [&] {
        require<MalformedFrame>(frame.values.size() == probe.payload_bytes, "a probe of ",
                                frame.values.size(), " bytes is not ", probe.payload_bytes);
      });
    }
    channel_.wait_all(sends);
  }

  Channel& channel_;
  Clock const& clock_;
  Timer total_;
  std::vector<int> distances_;
  CalibrationBuffers& buffers_;
};

// Sums of ones through aggregators, for which the algorithm's own count of bytes is the measure.
AggregatorFigures measure_aggregators(Channel& channel, Clock const& clock,
                                      Services const& services, Exchanges& exchanges) {
  AlgorithmEntry const& entry = find_algorithm("ina");
  auto const algorithm = entry.dense->make<float>({}, services);
  Timer const total(clock);
  auto const cost = [&](std::size_t entries) {
    return entry.cost({.ranks = channel.size(),
                       .extent = entries,
                       .k = entries,
                       .aggregators = std::max(1, services.aggregators_left())},
                      {});
  };
  // The slowest rank's time, and how long all of this has taken it.
  auto const sum = [&](std::vector<float> const& ones) {
    Timer const watch(clock);
    algorithm->run(channel, ones, Reduction::sum, 1);
    return exchanges.agreed_most<2>({watch.elapsed(), total.elapsed()});
  };
  std::vector<double> alone;
  std::vector<float> ones(1, 1.0f);
  for (int repeat = 0; repeat < most_repeats; ++repeat) {
    auto const took = sum(ones);
    if (repeat > 0) alone.push_back(took[0]);  // the first has met new memory
    if (repeat > 1 && took[1] >= aggregators_small_until) break;
  }
  double const latency = median(alone);
  AggregatorFigures figures{.round = latency / cost(1).aggregator_rounds};
  for (std::size_t entries = first_entries / growth;; entries *= growth) {
    ones.assign(entries, 1.0f);
    sum(ones);  // likewise
    auto const took = sum(ones);
    figures.byte = std::max(took[0] - latency, 0.0) / cost(entries).aggregator_load;
    bool const enough = took[0] >= long_enough;
    if (enough || took[1] + 2 * growth * took[0] >= aggregators_until || entries >= most_entries) {
      return figures;
    }
  }
}

double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct SparseSample {
  std::vector<std::uint32_t> indices;
  std::vector<float> values;

  // One position in 32, on average.
  SparseSample(Noise& noise, std::size_t entries) : values(entries, 1.0f) {
    std::uint32_t index = 0;
    for (std::size_t i = 0; i < entries; ++i) {
      index += 1 + noise.next() % 63;
      indices.push_back(index);
    }
  }
  std::uint32_t extent() const { return indices.back() + 1; }
};

// Measures with larger and larger vectors until they are large enough or the time is over; a rate
// is that of the largest vector it was measured with. The smallest are always measured.
class Kernels {
 public:
  Kernels(Clock const& clock, double allowance) : watch_(clock), allowance_(allowance) {}

  // Of this thread's processor time, which others cannot disturb.
  Rates measure() {
    for (entries_ = first_entries; entries_ <= most_entries && !over(); entries_ *= growth) {
      selection();
      sparse();
      dense();
    }
    return rates_;
  }
  double elapsed() const { return watch_.elapsed(); }

 private:
  bool late() const { return watch_.elapsed() >= allowance_; }
  bool over() const { return entries_ > first_entries && late(); }

  // Nothing where it is over.
  template <class... F>
  std::optional<std::array<double, sizeof...(F)>> times(F&&... tasks) {
    if (over()) return std::nullopt;
    return times_in_turn(thread_seconds, [&] { return late(); }, tasks...);
  }
  template <class F>
  void rate(double& measured, std::size_t count, F&& f) {
    if (auto const seconds = times(f)) measured = (*seconds)[0] / static_cast<double>(count);
  }

  void selection() {
    std::vector<float> gradient(entries_);
    std::vector<float> residual(entries_, 0.0f);
    for (float& x : gradient) {
      x = static_cast<float>(static_cast<std::int32_t>(noise_.next())) * 0x1p-31f;
    }
    Segment<float> const segment{gradient, residual};
    std::span const segments(&segment, 1);
    auto const& kernel = kernels<float>();
    std::size_t const k = entries_ / 8;  // enough for a threshold to be sampled

    rate(rates_.check, entries_, [&] { kernel.all_finite(gradient); });
    ThresholdScratch<float> scratch;
    rate(rates_.exact, entries_, [&] { exact_threshold<float>(segments, k, scratch); });
    rate(rates_.sample, entries_ / sampled_stride(entries_, k, threshold_stride),
         [&] { sampled_threshold<float>(segments, k, threshold_stride, 0, scratch); });

    packing(gradient);
    if (over()) return;
    // In a step gradients and residuals go through the cache before a result is written, of which
    // nothing is left there.
    SparseSample const result(noise_, entries_ / 32);
    std::vector<float> destination(result.extent(), 0.0f);
    auto const pass = [&] {
      Threshold<float> threshold{std::numeric_limits<float>::max(), 0};
      kernel.fused_error_feedback({gradient, residual}, threshold, 0, 0, {});
    };
    auto const write = [&] { scatter<float>(destination, result.indices, result.values, 2.0f, 0); };
    std::vector<float> velocity(entries_, 0.0f);
    auto const accumulate = [&] {
      Threshold<float> threshold{std::numeric_limits<float>::max(), 0};
      FusedArguments<float> arguments{gradient, residual};
      arguments.momentum = velocity;
      arguments.factor = 0.5f;
      arguments.mask_momentum = false;
      kernel.fused_error_feedback(arguments, threshold, 0, 0, {});
      kernel.select(residual, threshold, 0, 0, {});
    };
    if (auto const seconds = times(pass, write, accumulate)) {
      double const entries = static_cast<double>(entries_);
      rates_.pass = (*seconds)[0] / entries;
      rates_.scatter = (*seconds)[1] / static_cast<double>(result.indices.size());
      rates_.momentum = std::max(0.0, (*seconds)[2] - (*seconds)[0]) / entries;
    }
  }

  void packing(std::span<const float> gradient) {
    std::vector<std::uint32_t> indices(entries_ / 2);
    std::vector<float> values(indices.size());
    PackedSpan<float> const packed{indices, values};
    std::size_t count = 0;
    auto const select = [&](float magnitude) {
      Threshold<float> threshold{magnitude, 0};
      count = kernels<float>().select(gradient, threshold, 0, entries_ / 2, packed).count;
    };
    auto const reading = times([&] { select(std::numeric_limits<float>::max()); });
    auto const packing = times([&] { select(passing); });
    if (reading && packing) {
      rates_.pack = std::max(0.0, (*packing)[0] - (*reading)[0]) / static_cast<double>(count);
    }
  }

  void sparse() {
    if (over()) return;
    std::size_t const nnz = entries_ / 32;
    SparseSample const one(noise_, nnz);
    SparseSample const other(noise_, nnz);
    auto const extent = std::max(one.extent(), other.extent());
    std::vector<std::byte> frame(max_sparse_frame_bytes<float>(nnz, extent));
    std::vector<std::uint32_t> indices;
    std::vector<float> values;
    SparseStream<float> sum;
    // Encoded, decoded, copied, and twice as many merged.
    rate(rates_.merge, 5 * nnz, [&] {
      encode_sparse<float>(0, 0, extent, one.indices, one.values, {}, frame);
      indices.clear();
      values.clear();
      decode_sparse<float>(parse_frame(frame, 0), 0, extent, indices, values);
      sum.reset(0, extent, extent);
      sum.add({other.indices, other.values});
      sum.add({indices, values});
    });
  }

  void dense() {
    if (over()) return;
    std::size_t const block_entries = entries_ / 4;
    std::vector<float> block(block_entries, 1.0f);
    std::vector<float> sum(block_entries, 0.0f);
    std::vector<std::byte> frame(header_bytes + sizeof(float) * block_entries);
    // What an entry of the reduce-scatter and one of the allgather take: two of
    // Cost::dense_entries.
    rate(rates_.reduce, 2 * block_entries, [&] {
      encode_dense<float>(0, 0, block, frame);
      decode_dense<float>(parse_frame(frame, 0), 0, std::span(block));
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += block[i];
      decode_dense<float>(parse_frame(frame, 0), 0, std::span(block));
    });
    kernels<float>().all_finite(sum);  // so that the sums are of use
  }

  Timer watch_;
  double allowance_;
  std::size_t entries_ = 0;
  Noise noise_;
  Rates rates_;
};

// As they are while this thread gets no more of a core than it does now.
Rates rates_in_company(Clock const& clock, double allowance) {
  double const used = thread_seconds();
  Kernels measurement(clock, allowance);
  Rates rates = measurement.measure();
  double const share = (thread_seconds() - used) / measurement.elapsed();
  for (double* const rate : {&rates.check, &rates.exact, &rates.sample, &rates.pass, &rates.pack,
                             &rates.merge, &rates.scatter, &rates.reduce, &rates.momentum}) {
    *rate /= std::min(share, 1.0);
  }
  return rates;
}

}  // namespace

Rates measure_rates() {
  return Kernels(steady_clock(), std::numeric_limits<double>::infinity()).measure();
}

Figures calibrate(Channel& channel, Clock const& clock, CalibrationBuffers& buffers,
                  Services const& services) {
  if (channel.size() == 1) return {.link = {}, .rates = rates_in_company(clock, kernels_until)};
  Exchanges exchanges(channel, clock, buffers);
  Figures own;
  own.link = exchanges.measure();
  own.rates = rates_in_company(clock, kernels_until - exchanges.elapsed());
  if (services.aggregators_left() > 0) {
    own.aggregators = measure_aggregators(channel, clock, services, exchanges);
  }
  auto const every = exchanges.gather(own.values());
  // The typical rank's; one that was interrupted while it measured says nothing about the others.
  std::array<double, Figures::count> agreed{};
  for (std::size_t i = 0; i < agreed.size(); ++i) {
    std::vector<double> values;
    values.reserve(every.size());
    for (auto const& figures : every) values.push_back(figures[i]);
    agreed[i] = median(values);
  }
  return Figures::from_values(agreed);
}

}  // namespace sparsecomm
