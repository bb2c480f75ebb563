#include "compress/excess.h"

#include <cmath>
#include <type_traits>

#include "base/finite.h"
#include "base/magnitude.h"
#include "wire/carried.h"

namespace sparsecomm {

template <class T>
void Excess<T>::reject(StreamView<V>& reduced, SparseView<V>& rejected, V divisor, int ranks) {
  if constexpr (!std::is_same_v<T, V>) {
    V const limit = largest_finite<T>() * divisor;
    std::span<const V>& sums = reduced.is_dense ? reduced.dense : reduced.sparse.values;
    if (std::isinf(limit) || largest_bits(sums) <= magnitude_bits(limit)) return;
    limited_.assign(sums.begin(), sums.end());
    indices_.clear();
    shares_.clear();
    for (std::size_t i = 0; i < limited_.size(); ++i) {
      V const sum = limited_[i];
      if (!(std::abs(sum) > limit) || std::isinf(sum)) continue;
      limited_[i] = std::copysign(limit, sum);
      indices_.push_back(reduced.is_dense ? static_cast<std::uint32_t>(i)
                                          : reduced.sparse.indices[i]);
      shares_.push_back((sum - limited_[i]) / static_cast<V>(ranks));
    }
    sums = limited_;
    merged_.resize(indices_.size() + rejected.nnz());
    values_.resize(merged_.size());
    std::size_t const count =
        merge<V>({indices_, shares_}, rejected, Reduction::sum, merged_.data(), values_.data());
    rejected = SparseView<V>{merged_, values_}.slice(0, count);
  }
}

template class Excess<float>;
template class Excess<double>;
template class Excess<Half>;
template class Excess<BFloat16>;

}  // namespace sparsecomm
