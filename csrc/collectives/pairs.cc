#include "collectives/pairs.h"

#include <algorithm>

#include "kernels/magnitude.h"

namespace sparsecomm {

template <class V>
V TopK<V>::cut(SparseView<V> view, std::uint64_t k, Pairs<V>& kept, Pairs<V>* rest) {
  if (view.nnz() <= k) {
    kept.append(view);
    return 0;
  }
  if (k == 0) {
    if (rest != nullptr) rest->append(view);
    return 0;
  }
  magnitudes_.assign(view.values.begin(), view.values.end());
  auto const kth = magnitudes_.begin() + static_cast<std::ptrdiff_t>(k - 1);
  auto const larger = [](V a, V b) { return magnitude_bits(a) > magnitude_bits(b); };
  std::nth_element(magnitudes_.begin(), kth, magnitudes_.end(), larger);
  auto const bits = magnitude_bits(*kth);
  auto ties = std::count_if(magnitudes_.begin(), kth + 1,
                            [&](V value) { return magnitude_bits(value) == bits; });
  for (std::size_t i = 0; i < view.nnz(); ++i) {
    auto const own = magnitude_bits(view.values[i]);
    if (own > bits || (own == bits && ties-- > 0)) {
      kept.push(view.indices[i], view.values[i]);
    } else if (rest != nullptr) {
      rest->push(view.indices[i], view.values[i]);
    }
  }
  return from_magnitude_bits<V>(bits);
}

template class TopK<float>;
template class TopK<double>;

}  // namespace sparsecomm
