#include <algorithm>
#include <cmath>

#include "collectives/algorithm.h"
#include "collectives/dense_frames.h"

namespace sparsecomm {
namespace {

constexpr double segment_bytes = 1 << 20;

template <class T>
class Inner final : public DenseAllreduce<T> {
 public:
  using V = accumulate_t<T>;

  explicit Inner(AlgorithmOptions const&) {}

  void run(Channel& channel, std::span<T> data, Reduction reduction, V divisor) override {
    std::span<T> result = data;
    if (channel.size() > 1 && !data.empty()) {
      // Data must be as it was if the engine fails half-way.
      result = result_.take(data.size());
      std::ranges::copy(data, result.begin());
      channel.allreduce(std::as_writable_bytes(result), dtype_of<T>(), reduction);
    }
    channel.commit();
    std::ranges::transform(result, data.begin(),
                           [=](T x) { return static_cast<T>(static_cast<V>(x) / divisor); });
  }

 private:
  Buffer<T> result_;
};

}  // namespace

DenseMakers const dense_inner =
    MakeDenseOf<Inner>::makers([](std::uint64_t, int) { return std::uint64_t{0}; });

// Of a rank's share two segments at least are under way. An entry is copied and added, but not
// encoded and decoded, which is half of what the others do.
Cost dense_inner_cost(CostShape const& shape, AlgorithmOptions const&) {
  double const steps = 2.0 * (shape.ranks - 1);
  auto const extent = static_cast<double>(shape.extent);
  double const share = extent * shape.value_bytes / shape.ranks;
  return {.rounds = steps,
          .messages = steps * std::max(2.0, std::ceil(share / segment_bytes)),
          .bytes = steps * share,
          .dense_entries = extent};
}

}  // namespace sparsecomm
