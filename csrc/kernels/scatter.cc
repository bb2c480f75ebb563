#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "kernels/kernels.h"

namespace sparsecomm {

template <class T>
void scatter(std::span<T> destination, std::span<const std::uint32_t> indices,
             std::span<const accumulate_t<T>> values, accumulate_t<T> divisor,
             std::uint32_t first_index) {
  require(indices.size() == values.size(), "scatter of ", values.size(), " values to ",
          indices.size(), " indices: give one index per value");
  // An index before first_index wraps to a position that is too large as well.
  std::uint32_t last = 0;
  for (std::uint32_t const index : indices) last = std::max(last, index - first_index);
  require(indices.empty() || last < destination.size(), "index ", last + first_index,
          " is outside of the ", destination.size(), " entries from ", first_index, " on");
  // Each is a cache miss, and the next ones are known.
  constexpr std::size_t lookahead = 32;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (i + lookahead < indices.size()) {
      __builtin_prefetch(&destination[indices[i + lookahead] - first_index], 1);
    }
    destination[indices[i] - first_index] = T(values[i] / divisor);
  }
}

template void scatter(std::span<float>, std::span<const std::uint32_t>, std::span<const float>,
                      float, std::uint32_t);
template void scatter(std::span<double>, std::span<const std::uint32_t>, std::span<const double>,
                      double, std::uint32_t);
template void scatter(std::span<Half>, std::span<const std::uint32_t>, std::span<const float>,
                      float, std::uint32_t);
template void scatter(std::span<BFloat16>, std::span<const std::uint32_t>, std::span<const float>,
                      float, std::uint32_t);

}  // namespace sparsecomm
