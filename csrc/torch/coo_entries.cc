#include "coo_entries.h"

#include <algorithm>

namespace sparsecomm {
namespace {

template <class V>
std::span<const V> values_of(StreamView<V> const& stream) {
  return stream.is_dense ? stream.dense : stream.sparse.values;
}

// Calls f with the index and value of each entry that is not neutral, or of all.
template <class V, class F>
void for_each_entry(StreamView<V> const& stream, V neutral, bool keeps_neutral, F&& f) {
  auto const values = values_of(stream);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!keeps_neutral && values[i] == neutral) continue;
    f(stream.is_dense ? i : stream.sparse.indices[i], values[i]);
  }
}

template <class V>
std::int64_t count_rows(StreamView<V> const& stream, V neutral, bool keeps_neutral,
                        std::uint64_t row) {
  if (row == 1) {
    auto const values = values_of(stream);
    auto const left_out = keeps_neutral ? 0 : std::ranges::count(values, neutral);
    return static_cast<std::int64_t>(values.size()) - left_out;
  }
  std::int64_t count = 0;
  std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
  for_each_entry(stream, neutral, keeps_neutral, [&](std::uint64_t index, V) {
    count += index / row != last;
    last = index / row;
  });
  return count;
}

// Turns the first row of `indices`, flattened positions, into one row a dimension.
void unflatten(at::IntArrayRef sizes, std::int64_t nnz, std::int64_t* indices) {
  if (sizes.size() < 2) return;
  for (std::int64_t i = 0; i < nnz; ++i) {
    std::int64_t rest = indices[i];
    for (auto dim = static_cast<std::int64_t>(sizes.size()); dim-- > 0;) {
      indices[dim * nnz + i] = rest % sizes[static_cast<std::size_t>(dim)];
      rest /= sizes[static_cast<std::size_t>(dim)];
    }
  }
}

// Calls f with each position in order. Throws InvalidArgument if an index is out of range or not
// above the one before.
template <class F>
void for_each_position(CooShape const& shape, at::Tensor const& indices, F&& f) {
  auto const* const data = indices.const_data_ptr<std::int64_t>();
  std::int64_t const stride = indices.stride(1);
  std::int64_t before = -1;
  for (std::int64_t i = 0; i < indices.size(1); ++i) {
    std::int64_t position = 0;
    for (std::int64_t dim = 0; dim < shape.sparse_dims; ++dim) {
      std::int64_t const index = data[dim * indices.stride(0) + i * stride];
      std::int64_t const size = shape.sizes[static_cast<std::size_t>(dim)];
      require(index >= 0 && index < size, "index ", index, " is outside dimension ", dim,
              " of shape ", shape.sizes);
      position = position * size + index;
    }
    require(position > before,
            "the tensor is marked as coalesced, but its indices are not sorted and distinct");
    before = position;
    f(static_cast<std::uint64_t>(position));
  }
}

std::vector<std::int64_t> values_sizes(CooShape const& shape, std::int64_t nnz) {
  std::vector<std::int64_t> sizes(shape.sizes.begin() + shape.sparse_dims, shape.sizes.end());
  sizes.insert(sizes.begin(), nnz);
  return sizes;
}

at::Tensor make_coalesced(CooShape const& shape, at::Tensor const& indices,
                          at::Tensor const& values) {
  return at::_sparse_coo_tensor_unsafe(indices, values, shape.sizes,
                                       values.options().layout(at::kSparse),
                                       /*is_coalesced=*/true);
}

}  // namespace

CooShape::CooShape(at::IntArrayRef all_sizes, std::int64_t sparse)
    : sizes(all_sizes.vec()), sparse_dims(sparse) {
  auto const dims = static_cast<std::size_t>(sparse);
  for (std::int64_t const size : all_sizes.slice(dims)) row *= static_cast<std::uint64_t>(size);
  for (std::int64_t const size : all_sizes.slice(0, dims))
    count *= static_cast<std::uint64_t>(size);
  extent = count * row;
}

template <class V>
void CooEntries<V>::read(CooShape const& shape, at::Tensor const& coo) {
  at::Tensor const coalesced = coo.is_coalesced() ? coo : coo.coalesce();
  values_ = coalesced._values().to(c10::CppTypeToScalarType<V>::value).contiguous();
  auto const rows = static_cast<std::size_t>(shape.row);
  indices_.resize(static_cast<std::size_t>(coalesced._indices().size(1)) * rows);
  auto out = indices_.begin();
  for_each_position(shape, coalesced._indices(), [&](std::uint64_t position) {
    auto first = static_cast<std::uint32_t>(position * rows);
    for (std::size_t j = 0; j < rows; ++j) *out++ = first++;
  });
  view_ = {indices_, {values_.const_data_ptr<V>(), indices_.size()}};
}

template <class T>
void CooRows<T>::read(CooShape const& shape, at::Tensor const& coo) {
  at::Tensor const coalesced = coo.is_coalesced() ? coo : coo.coalesce();
  values_ = coalesced._values().contiguous();
  positions_.clear();
  for_each_position(shape, coalesced._indices(),
                    [&](std::uint64_t position) { positions_.push_back(position); });
  view_ = {positions_,
           {static_cast<T const*>(values_.const_data_ptr()), positions_.size() * shape.row}};
}

template <class T>
void CooRows<T>::release() {
  view_ = {};
  values_.reset();
}

template <class V>
at::Tensor make_coo(CooShape const& shape, at::ScalarType dtype, RowView<V> const& rows) {
  auto const nnz = static_cast<std::int64_t>(rows.positions.size());
  at::Tensor indices = at::empty({shape.sparse_dims, nnz}, at::kLong);
  at::Tensor values = at::empty(values_sizes(shape, nnz), c10::CppTypeToScalarType<V>::value);
  std::ranges::copy(rows.values, values.mutable_data_ptr<V>());
  if (shape.sparse_dims > 0) {
    auto* const positions = indices.mutable_data_ptr<std::int64_t>();
    std::ranges::transform(rows.positions, positions,
                           [](std::uint64_t x) { return static_cast<std::int64_t>(x); });
    unflatten(shape.sparse_sizes(), nnz, positions);
  }
  return make_coalesced(shape, indices, values.to(dtype));
}

template <class V>
void CooEntries<V>::release() {
  view_ = {};
  values_.reset();
}

template <class V>
at::Tensor make_coo(CooShape const& shape, at::ScalarType dtype, StreamView<V> const& stream,
                    V neutral, std::uint64_t first, V divisor, bool keeps_neutral) {
  std::int64_t const nnz =
      shape.extent == 0 ? 0 : count_rows(stream, neutral, keeps_neutral, shape.row);
  at::Tensor indices = at::empty({shape.sparse_dims, nnz}, at::kLong);
  at::Tensor values = at::empty(values_sizes(shape, nnz), c10::CppTypeToScalarType<V>::value);
  auto* const out = values.mutable_data_ptr<V>();
  if (shape.row != 1) std::fill_n(out, values.numel(), static_cast<V>(neutral / divisor));
  auto* const positions = indices.mutable_data_ptr<std::int64_t>();

  std::int64_t entry = -1;
  std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
  if (nnz > 0) {
    for_each_entry(stream, neutral, keeps_neutral, [&](std::uint64_t index, V value) {
      std::uint64_t const position = (index - first) / shape.row;
      if (position != last) {
        last = position;
        ++entry;
        if (shape.sparse_dims > 0) positions[entry] = static_cast<std::int64_t>(position);
      }
      out[static_cast<std::uint64_t>(entry) * shape.row + (index - first) % shape.row] =
          divisor == V{1} ? value : static_cast<V>(value / divisor);
    });
    unflatten(shape.sparse_sizes(), nnz, positions);
  }
  return make_coalesced(shape, indices, values.to(dtype));
}

#define SPARSECOMM_COO(V)                                                                   \
  template class CooEntries<V>;                                                             \
  template at::Tensor make_coo<V>(CooShape const&, at::ScalarType, RowView<V> const&);      \
  template at::Tensor make_coo<V>(CooShape const&, at::ScalarType, StreamView<V> const&, V, \
                                  std::uint64_t, V, bool);
SPARSECOMM_COO(float)
SPARSECOMM_COO(double)
SPARSECOMM_COO(std::int32_t)
SPARSECOMM_COO(std::int64_t)
#undef SPARSECOMM_COO

template class CooRows<float>;
template class CooRows<double>;
template class CooRows<Half>;
template class CooRows<BFloat16>;
template class CooRows<std::int32_t>;
template class CooRows<std::int64_t>;

}  // namespace sparsecomm
