// What of a result the gradient's type cannot hold.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "sparse/stream.h"

namespace sparsecomm {

// Sums of f16 gradients and residuals are made in f32, and may be finite there alone. What exceeds
// the type's range goes back to the residuals.
template <class T>
class Excess {
 public:
  using V = accumulate_t<T>;

  // Limits a result of finite sums over `ranks` ranks to what is finite as T once it is divided by
  // `divisor`, and adds to `rejected` this rank's share of what that takes away, the same on all.
  // Infinities and NaNs stay. What the two view is valid until the next call.
  void reject(StreamView<V>& reduced, SparseView<V>& rejected, V divisor, int ranks);

 private:
  std::vector<V> limited_, shares_, values_;
  std::vector<std::uint32_t> indices_, merged_;
};

}  // namespace sparsecomm
