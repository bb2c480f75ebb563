// Index-value pairs that own their storage, and the k largest of such pairs.
#pragma once

#include <cstdint>
#include <vector>

#include "sparse/stream.h"

namespace sparsecomm {

template <class V>
struct Pairs {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;

  void clear() {
    indices.clear();
    values.clear();
  }
  // To an eighth more where it has to grow: see Buffer.
  void reserve(std::size_t nnz) {
    if (nnz <= indices.capacity()) return;
    indices.reserve(nnz + nnz / 8);
    values.reserve(nnz + nnz / 8);
  }
  void resize(std::size_t nnz) {
    reserve(nnz);
    indices.resize(nnz);
    values.resize(nnz);
  }
  void push(std::uint32_t index, V value) {
    indices.push_back(index);
    values.push_back(value);
  }
  void append(SparseView<V> view) {
    indices.insert(indices.end(), view.indices.begin(), view.indices.end());
    values.insert(values.end(), view.values.begin(), view.values.end());
  }
  void assign(SparseView<V> view) {
    clear();
    append(view);
  }
  SparseView<V> view() const { return {indices, values}; }
};

// Cuts to the k largest magnitudes, ties to the lower index: the same bits in, the same out.
template <class V>
class TopK {
 public:
  // Appends the min(k, nnz) largest of `view` to `kept` and the others, if wanted, to `rest`, both
  // in index order. Returns the least magnitude kept, 0 where nothing was cut. O(nnz).
  V cut(SparseView<V> view, std::uint64_t k, Pairs<V>& kept, Pairs<V>* rest = nullptr);

 private:
  std::vector<V> magnitudes_;
};

}  // namespace sparsecomm
