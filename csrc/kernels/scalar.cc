#include "kernels/scalar.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/magnitude.h"
#include "kernels/scan.h"
#include "kernels/selection.h"

namespace sparsecomm {
namespace {

struct ScalarLoop {
  template <class Source, class V>
  static void run(Source const& source, std::size_t size, Selection<V>& selection,
                  std::uint32_t first_index) {
    offer_range(source, selection, 0, size, first_index);
  }
};

template <class T>
void magnitude_histogram(std::span<const T> gradient, std::span<const accumulate_t<T>> residual,
                         unsigned shift, std::uint64_t base, std::span<std::uint64_t> counts) {
  require_same_size(gradient.size(), residual.size());
  require_bins(counts.size());
  count_range<T>(gradient, residual, 0, shift, base, counts);
}

template <class T>
std::uint64_t collect_magnitudes(std::span<const T> gradient,
                                 std::span<const accumulate_t<T>> residual, std::uint64_t low,
                                 std::uint64_t high, std::vector<accumulate_t<T>>& out) {
  require_same_size(gradient.size(), residual.size());
  return collect_range<T>(gradient, residual, 0, low, high, out);
}

template <class T>
Moments moments(std::span<const T> gradient, std::span<const accumulate_t<T>> residual) {
  require_same_size(gradient.size(), residual.size());
  MomentLanes lanes;
  lanes.add_range<T>(gradient, residual, 0);
  return lanes.total();
}

}  // namespace

template <class T>
KernelTable<T> scalar_kernels() {
  return {"scalar",
          all_finite_range<T>,
          fused_error_feedback_by<T, ScalarLoop>,
          select_by<T, ScalarLoop>,
          magnitude_histogram<T>,
          collect_magnitudes<T>,
          moments<T>};
}

template KernelTable<float> scalar_kernels();
template KernelTable<double> scalar_kernels();
template KernelTable<Half> scalar_kernels();
template KernelTable<BFloat16> scalar_kernels();

}  // namespace sparsecomm
