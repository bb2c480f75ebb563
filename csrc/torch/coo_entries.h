// COO tensors as sparse vectors or as sparse rows. A position is the flattened sparse index; as a
// vector, a row of a hybrid tensor is that many neighbouring entries.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "engine/row_allreduce.h"
#include "sparse/stream.h"

namespace sparsecomm {

struct CooShape {
  std::vector<std::int64_t> sizes;
  std::int64_t sparse_dims = 0;
  std::uint64_t row = 1;     // entries of one index: the product of the dense sizes
  std::uint64_t count = 1;   // of positions: the product of the sparse sizes
  std::uint64_t extent = 0;  // all entries

  CooShape(at::IntArrayRef all_sizes, std::int64_t sparse);
  // Whether a 32-bit index can address every entry.
  bool indexable() const { return extent < std::numeric_limits<std::uint32_t>::max(); }
  at::IntArrayRef sparse_sizes() const { return at::IntArrayRef(sizes).slice(0, sparse_dims); }
  friend bool operator==(CooShape const&, CooShape const&) = default;
};

// Coalesced entries of a tensor, in the type they are reduced in.
template <class V>
class CooEntries {
 public:
  // O(nnz) if the tensor is coalesced. Throws InvalidArgument where an index is out of range or, in
  // a tensor marked as coalesced, out of order.
  void read(CooShape const& shape, at::Tensor const& coo);
  SparseView<V> view() const { return view_; }
  void release();

 private:
  at::Tensor values_;
  std::vector<std::uint32_t> indices_;
  SparseView<V> view_;
};

// Coalesced rows of a tensor, in its own type.
template <class T>
class CooRows {
 public:
  // As CooEntries::read().
  void read(CooShape const& shape, at::Tensor const& coo);
  RowView<T> view() const { return view_; }
  void release();

 private:
  at::Tensor values_;
  std::vector<std::uint64_t> positions_;
  RowView<T> view_;
};

// A coalesced COO tensor of `dtype` with these rows.
template <class V>
at::Tensor make_coo(CooShape const& shape, at::ScalarType dtype, RowView<V> const& rows);

// A coalesced COO tensor of `dtype` with the entries of `stream`, which begin at `first`, that are
// not `neutral`, or all if it is sparse and `keeps_neutral`. Each is divided by `divisor`. What a
// row lacks is neutral.
template <class V>
at::Tensor make_coo(CooShape const& shape, at::ScalarType dtype, StreamView<V> const& stream,
                    V neutral, std::uint64_t first = 0, V divisor = V{1},
                    bool keeps_neutral = false);

}  // namespace sparsecomm
