// The allreduce of the transport's engine, if it has one (Transport::native()).
//
// 1. The data is copied, since it must be as it was if the engine fails half-way.
// 2. The engine reduces the copy in place.
// 3. The result is divided where it is written.
//
// Gloo's is a ring of segments of at most 1 MiB, which sums in T. As with torch's, the min or max
// of a NaN and a number need not be NaN. What it sends is not counted. Source: Patarasuk and Yuan
// 2009.
#include <algorithm>
#include <cmath>

#include "collectives/dense_frames.h"
#include "collectives/entries.h"

namespace sparsecomm {
namespace {

constexpr double segment_bytes = 1 << 20;

template <class T>
class Inner final : public DenseAllreduce<T> {
 public:
  using V = accumulate_t<T>;

  Inner(AlgorithmOptions const&, Services const& services) : native_(services.native) {}

  void run(Channel& channel, std::span<const T> data, Reduction reduction, V divisor) override {
    reduced_ = data;
    divisor_ = divisor;
    if (channel.size() == 1 || data.empty()) return;
    require<Error>(native_ != nullptr, "dense_inner was made without the transport's allreduce");
    std::span<T> const copy = copy_.take(data.size());
    std::ranges::copy(data, copy.begin());
    {
      auto const waiting = channel.waiting_for(everybody);
      native_->allreduce(std::as_writable_bytes(copy), dtype_of<T>(), reduction,
                         channel.deadline());
    }
    reduced_ = copy;
  }

  void write(std::span<T> out) override {
    std::ranges::transform(reduced_, out.begin(), [divisor = divisor_](T x) {
      return static_cast<T>(static_cast<V>(x) / divisor);
    });
  }

 private:
  NativeAllreduce* native_;
  Buffer<T> copy_;
  std::span<const T> reduced_;
  V divisor_{1};
};

constexpr DenseMakers dense_inner_makers =
    MakeDenseOf<Inner>::makers([](std::uint64_t, int) { return std::uint64_t{0}; });

// Gloo's, predicted, since what an engine sends is not counted. At least two segments per share are
// in flight. An entry is copied and added, but not encoded and decoded, which is half of what the
// other algorithms do.
Cost dense_inner_cost(CostShape const& shape, AlgorithmOptions const&) {
  double const steps = 2.0 * (shape.ranks - 1);
  auto const extent = static_cast<double>(shape.extent);
  double const share = extent * shape.value_bytes / shape.ranks;
  return {.rounds = steps,
          .messages = steps * std::max(2.0, std::ceil(share / segment_bytes)),
          .bytes = steps * share,
          .dense_entries = extent};
}

}  // namespace

AlgorithmEntry const dense_inner = {
    .name = "dense_inner",
    .description = "every element, by the transport's own allreduce: gloo's, over c10d",
    .words = "2N(P-1)/P",
    .source = "Patarasuk and Yuan 2009",
    .cost = dense_inner_cost,
    .dense = &dense_inner_makers,
    .needs = Needs::native_allreduce,
};

}  // namespace sparsecomm
