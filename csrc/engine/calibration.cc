#include "engine/calibration.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <limits>

#include "collectives/patterns.h"
#include "compress/error_feedback.h"

namespace sparsecomm {
namespace {

// Past most caches, as gradients are.
constexpr std::size_t entries = std::size_t{1} << 22;
constexpr std::size_t dense_entries = std::size_t{1} << 20;
constexpr std::size_t sparse_entries = std::size_t{1} << 17;
constexpr float passing = 0.75f;  // of magnitudes uniform in [0, 1): 1 in 4 is larger

constexpr std::size_t small_bytes = 64;
constexpr std::size_t first_large_bytes = std::size_t{1} << 16;
constexpr std::size_t most_large_bytes = std::size_t{1} << 23;
// Longer than a rate limiter's burst and a scheduler's time slice.
constexpr double long_enough = 15e-3;
constexpr double latency_budget = 20e-3;  // for each of the two measurements of small messages
constexpr int most_at_once = 8;

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

template <class F>
double time_of(Clock const& clock, F&& f) {
  TimePoint const start = clock.now();
  f();
  return seconds(clock.now() - start);
}

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

// Messages between all ranks at once, each to the rank `distance` further on.
class Exchanges {
 public:
  Exchanges(Channel& channel, Clock const& clock) : channel_(channel), clock_(clock) {
    for (int distance = 1; distance < channel.size(); distance *= 2) distances_.push_back(distance);
  }

  Link measure() {
    small_round();  // connects
    double const once = agreed_most(time_of(clock_, [&] { small_round(); }));
    int const repeats = repeats_within_budget(once);
    double const alone = agreed_mean(repeats, [&] { small_round(); }) / rounds();
    int const together = std::min(most_at_once, channel_.size() - 1);
    Link link{.round = alone};
    if (together > 1) {
      at_once(together);
      double const several = agreed_mean(repeats, [&] { at_once(together); });
      link.message = std::clamp((several - alone) / (together - 1), 0.0, alone);
      link.round = alone - link.message;
    }
    link.byte = byte_seconds(alone);
    return link;
  }

  // Of every rank, in rank order.
  std::vector<Figures> gather(Figures const& own) {
    auto const frames = gather_values(own.values());
    std::vector<Figures> figures;
    for (int rank = 0; rank < channel_.size(); ++rank) {
      std::array<double, Figures::count> values{};
      channel_.decode_from(rank, [&] {
        require<MalformedFrame>(frames[rank].values.size() == sizeof values, "figures of ",
                                frames[rank].values.size(), " bytes");
        std::memcpy(values.data(), frames[rank].values.data(), sizeof values);
        require<MalformedFrame>(
            std::ranges::all_of(values, [](double x) { return std::isfinite(x) && x >= 0; }),
            "figures that are no times");
      });
      figures.push_back(Figures::from_values(values));
    }
    return figures;
  }

 private:
  double rounds() const { return static_cast<double>(distances_.size()); }

  static int repeats_within_budget(double once) {
    return static_cast<int>(std::clamp(latency_budget / std::max(once, 1e-9), 1.0, 16.0));
  }

  void exchange(std::span<const int> distances, std::size_t bytes) {
    int const rank = channel_.rank();
    int const size = channel_.size();
    std::size_t const frame_bytes = header_bytes + bytes;
    auto const incoming = receive_.take(frame_bytes * distances.size());
    auto const outgoing = send_.take(frame_bytes);
    encode_bytes(channel_.operation(), payload_.take(bytes), outgoing);
    std::vector<Request> sends;
    std::vector<Request> receives;
    receives.reserve(distances.size());
    sends.reserve(distances.size());
    for (std::size_t i = 0; i < distances.size(); ++i) {
      receives.push_back(channel_.irecv(rotated_source(rank, distances[i], size), Phase::reduce,
                                        incoming.subspan(i * frame_bytes, frame_bytes)));
    }
    for (int const distance : distances) {
      sends.push_back(
          channel_.isend(rotated_destination(rank, distance, size), Phase::reduce, outgoing));
    }
    for (std::size_t i = 0; i < distances.size(); ++i) {
      int const source = rotated_source(rank, distances[i], size);
      FrameView const frame =
          channel_.wait_frame(receives[i], source, incoming.subspan(i * frame_bytes, frame_bytes));
      channel_.decode_from(source, [&] {
        require<MalformedFrame>(frame.values.size() == bytes, "a probe of ", frame.values.size(),
                                " bytes is not ", bytes);
      });
    }
    channel_.wait_all(sends);
  }

  void small_round() {
    for (int const distance : distances_) exchange({&distance, 1}, small_bytes);
  }

  void at_once(int count) {
    std::vector<int> distances;
    for (int distance = 1; distance <= count; ++distance) distances.push_back(distance);
    exchange(distances, small_bytes);
  }

  double byte_seconds(double alone) {
    for (std::size_t bytes = first_large_bytes;; bytes *= 2) {
      std::size_t const each = bytes / distances_.size();
      // The pages of the buffers are touched before the clock runs.
      std::ranges::fill(receive_.take(header_bytes + each), std::byte{});
      std::ranges::fill(payload_.take(each), std::byte{});
      std::ranges::fill(send_.take(header_bytes + each), std::byte{});
      double const took = agreed_most(time_of(clock_, [&] {
        for (int const distance : distances_) exchange({&distance, 1}, each);
      }));
      if (took < long_enough && bytes < most_large_bytes) continue;
      return std::max(0.0, took - alone * rounds()) / (static_cast<double>(each) * rounds());
    }
  }

  template <class F>
  double agreed_mean(int repeats, F&& f) {
    return agreed_most(time_of(clock_,
                               [&] {
                                 for (int i = 0; i < repeats; ++i) f();
                               })) /
           repeats;
  }

  // The largest of all ranks' numbers; also brings the ranks together.
  double agreed_most(double own) {
    auto const frames = gather_values({&own, 1});
    double most = 0;
    for (int rank = 0; rank < channel_.size(); ++rank) {
      double other = 0;
      channel_.decode_from(rank, [&] {
        require<MalformedFrame>(frames[rank].values.size() == sizeof other, "a time of ",
                                frames[rank].values.size(), " bytes");
        std::memcpy(&other, frames[rank].values.data(), sizeof other);
        require<MalformedFrame>(std::isfinite(other) && other >= 0, "a time of ", other, " s");
      });
      most = std::max(most, other);
    }
    return most;
  }

  std::span<const FrameView> gather_values(std::span<const double> values) {
    auto const payload = std::as_bytes(values);
    own_.resize(header_bytes + payload.size());
    encode_bytes(channel_.operation(), payload, own_);
    return gather_.run(channel_, Phase::gather, own_, own_.size());
  }

  Channel& channel_;
  Clock const& clock_;
  std::vector<int> distances_;
  ByteBuffer send_, receive_, payload_;
  std::vector<std::byte> own_;
  FrameAllgather gather_;
};

double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// A kernel's median time of three, of this thread's processor time, which others cannot disturb.
template <class F>
double kernel_seconds(F&& f) {
  std::array<double, 3> times{};
  for (double& time : times) {
    double const before = thread_seconds();
    f();
    time = thread_seconds() - before;
  }
  std::ranges::sort(times);
  return times[1];
}

struct SparseSample {
  std::vector<std::uint32_t> indices;
  std::vector<float> values;

  // One entry in 32, on average.
  explicit SparseSample(Noise& noise) : values(sparse_entries, 1.0f) {
    std::uint32_t index = 0;
    for (std::size_t i = 0; i < sparse_entries; ++i) {
      index += 1 + noise.next() % 63;
      indices.push_back(index);
    }
  }
};

void measure_selection(Noise& noise, Rates& rates) {
  std::vector<float> gradient(entries);
  std::vector<float> residual(entries, 0.0f);
  for (float& x : gradient) {
    x = static_cast<float>(static_cast<std::int32_t>(noise.next())) * 0x1p-31f;
  }
  Segment<float> const segment{gradient, residual};
  std::span const segments(&segment, 1);
  auto const& kernel = kernels<float>();
  double const n = entries;
  std::size_t const k = entries / 32;

  rates.check = kernel_seconds([&] { kernel.all_finite(gradient); }) / n;
  std::vector<float> scratch;
  rates.exact = kernel_seconds([&] { exact_threshold<float>(segments, k, scratch); }) / n;
  std::size_t const looked_at = entries / sampled_stride(entries, k, threshold_stride);
  rates.sample =
      kernel_seconds([&] { sampled_threshold<float>(segments, k, threshold_stride, 0, scratch); }) /
      static_cast<double>(looked_at);

  std::vector<std::uint32_t> indices(entries / 2 + packed_slack);
  std::vector<float> values(indices.size());
  PackedSpan<float> const packed{indices, values};
  std::size_t count = 0;
  auto const select = [&](float magnitude) {
    Threshold<float> threshold{magnitude, 0};
    count = kernel.select(gradient, threshold, 0, entries / 2, packed).count;
  };
  double const reading = kernel_seconds([&] { select(std::numeric_limits<float>::max()); });
  double const packing = kernel_seconds([&] { select(passing); });
  rates.pack = std::max(0.0, packing - reading) / static_cast<double>(count);
  rates.pass = kernel_seconds([&] {
                 Threshold<float> threshold{std::numeric_limits<float>::max(), 0};
                 kernel.fused_error_feedback(gradient, residual, threshold, 0, entries / 2, packed);
               }) /
               n;
}

void measure_sparse(Noise& noise, Rates& rates) {
  SparseSample const one(noise);
  SparseSample const other(noise);
  auto const extent = std::max(one.indices.back(), other.indices.back()) + std::uint32_t{1};
  std::vector<std::byte> frame(max_sparse_frame_bytes<float>(sparse_entries, extent));
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
  SparseStream<float> sum;
  // Encoded, decoded, copied, and twice as many merged.
  rates.merge = kernel_seconds([&] {
                  encode_sparse<float>(0, 0, extent, one.indices, one.values, {}, frame);
                  indices.clear();
                  values.clear();
                  decode_sparse<float>(parse_frame(frame, 0), 0, extent, indices, values);
                  sum.reset(0, extent, extent);
                  sum.add({other.indices, other.values});
                  sum.add({indices, values});
                }) /
                (5.0 * sparse_entries);

  std::vector<float> destination(extent, 0.0f);
  rates.scatter =
      kernel_seconds([&] { scatter<float>(destination, one.indices, one.values, 2.0f, 0); }) /
      sparse_entries;
}

void measure_dense(Rates& rates) {
  std::vector<float> block(dense_entries, 1.0f);
  std::vector<float> sum(dense_entries, 0.0f);
  std::vector<std::byte> frame(header_bytes + sizeof(float) * dense_entries);
  // What an entry of the reduce-scatter and one of the allgather take: two of Cost::entries.
  rates.reduce = kernel_seconds([&] {
                   encode_dense<float>(0, 0, block, frame);
                   decode_dense<float>(parse_frame(frame, 0), 0, std::span(block));
                   for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += block[i];
                   decode_dense<float>(parse_frame(frame, 0), 0, std::span(block));
                 }) /
                 (2.0 * dense_entries);
  kernels<float>().all_finite(sum);  // so that the sums are of use
}

// As they are while this thread gets no more of a core than it does now.
Rates rates_in_company(Clock const& clock) {
  TimePoint const start = clock.now();
  double const used = thread_seconds();
  Rates rates = measure_rates();
  double const share = (thread_seconds() - used) / seconds(clock.now() - start);
  for (double* const rate : {&rates.check, &rates.exact, &rates.sample, &rates.pass, &rates.pack,
                             &rates.merge, &rates.scatter, &rates.reduce}) {
    *rate /= std::min(share, 1.0);
  }
  return rates;
}

}  // namespace

Rates measure_rates() {
  Rates rates;
  Noise noise;
  measure_selection(noise, rates);
  measure_sparse(noise, rates);
  measure_dense(rates);
  return rates;
}

Figures calibrate(Channel& channel, Clock const& clock) {
  if (channel.size() == 1) return {.link = {}, .rates = rates_in_company(clock)};
  Exchanges exchanges(channel, clock);
  Figures own;
  own.link = exchanges.measure();
  own.rates = rates_in_company(clock);
  auto const every = exchanges.gather(own);
  // The typical rank's; one that was interrupted while it measured says nothing about the others.
  std::array<double, Figures::count> agreed{};
  for (std::size_t i = 0; i < agreed.size(); ++i) {
    std::vector<double> values;
    values.reserve(every.size());
    for (Figures const& figures : every) values.push_back(figures.values()[i]);
    std::ranges::nth_element(values,
                             values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
    agreed[i] = values[values.size() / 2];
  }
  return Figures::from_values(agreed);
}

}  // namespace sparsecomm
