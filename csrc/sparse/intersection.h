// What sparse vectors share, and what they do not.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/intersect.h"
#include "sparse/stream.h"

namespace sparsecomm {

// The entries of vectors at the indices that both have. Indices are strictly increasing. O(one +
// other), or O(fewer log(more / fewer)) where one has far fewer than the other. Its storage is kept
// between uses.
template <class V>
class SparseIntersection {
 public:
  explicit SparseIntersection(IntersectKernelTable const& kernel = intersect_kernels())
      : kernel_(kernel) {}

  struct Shared {
    std::span<const std::uint32_t> indices;
    std::span<const V> one, other;  // a value of each vector for each index
  };

  // Views are valid until the next call of any of these.
  SparseView<V> run(SparseView<V> vector, std::span<const std::uint32_t> indices);
  Shared run(SparseView<V> one, SparseView<V> other);
  // The vector's entries at indices that are not among these.
  SparseView<V> difference(SparseView<V> vector, std::span<const std::uint32_t> indices);

 private:
  // positions_ = those in `one`.
  void find(std::span<const std::uint32_t> one, std::span<const std::uint32_t> other);
  void take(std::span<const V> values, std::vector<V>& taken) const;
  // Copies all but those at positions_; returns how many.
  template <class T>
  std::size_t leave(std::span<const T> all, std::vector<T>& left) const;

  IntersectKernelTable const& kernel_;
  std::size_t found_ = 0;
  std::vector<std::uint32_t> positions_, indices_;
  std::vector<V> values_, other_values_;
};

}  // namespace sparsecomm
