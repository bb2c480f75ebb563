#include "coo_allreduce.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <limits>

namespace sparsecomm {
namespace {

using c10d::ReduceOp;

struct CooReduction {
  ReduceOp::RedOpType op;
  char const* name;
  bool floating, integral, complex;  // the kinds of dtype it is defined for
  // Folds one rank's values, zeros included, into those of the ranks before. Null: addition.
  at::Tensor (*fold)(at::Tensor const& reduced, at::Tensor const& next);
};

constexpr CooReduction coo_reductions[] = {
    {ReduceOp::SUM, "sum", true, true, true, nullptr},
    {ReduceOp::AVG, "avg", true, false, true, nullptr},
    {ReduceOp::PRODUCT, "product", true, true, false, [](auto& a, auto& b) { return a.mul(b); }},
    {ReduceOp::MIN, "min", true, true, false, [](auto& a, auto& b) { return a.minimum(b); }},
    {ReduceOp::MAX, "max", true, true, false, [](auto& a, auto& b) { return a.maximum(b); }},
    {ReduceOp::BAND, "band", false, true, false, [](auto& a, auto& b) { return a.bitwise_and(b); }},
    {ReduceOp::BOR, "bor", false, true, false, [](auto& a, auto& b) { return a.bitwise_or(b); }},
    {ReduceOp::BXOR, "bxor", false, true, false, [](auto& a, auto& b) { return a.bitwise_xor(b); }},
};

CooReduction const& find_reduction(ReduceOp::RedOpType op, at::ScalarType dtype) {
  for (CooReduction const& reduction : coo_reductions) {
    if (reduction.op != op) continue;
    bool const defined = c10::isComplexType(dtype)    ? reduction.complex
                         : c10::isFloatingType(dtype) ? reduction.floating
                                                      : reduction.integral;
    require(defined, "allreduce of sparse tensors: ", reduction.name, " is not defined for ",
            at::toString(dtype));
    return reduction;
  }
  throw InvalidArgument(
      concat("allreduce of sparse tensors: reduction ", int(op),
             " is unknown; choose one of sum, avg, product, min, max, band, bor, bxor"));
}

at::ScalarType accumulate_type(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

}  // namespace

// What ranks agree on before they exchange entries.
struct CooAllreduce::Shape {
  at::IntArrayRef sizes;
  std::int64_t sparse_dims;
  std::int64_t positions =
      1;  // the product of the sparse sizes; torch makes no tensor where it overflows
  at::ScalarType dtype;
  std::size_t row_bytes;  // of one entry's values

  explicit Shape(at::Tensor const& tensor)
      : sizes(tensor.sizes()),
        sparse_dims(tensor.sparse_dim()),
        dtype(tensor.scalar_type()),
        row_bytes(tensor.element_size()) {
    for (std::int64_t const size : sparse_sizes()) positions *= size;
    for (std::int64_t const size : dense_sizes()) row_bytes *= static_cast<std::size_t>(size);
  }

  at::IntArrayRef sparse_sizes() const { return sizes.slice(0, sparse_dims); }
  at::IntArrayRef dense_sizes() const { return sizes.slice(sparse_dims); }
  bool narrow() const { return positions <= std::numeric_limits<std::int32_t>::max(); }
  std::size_t position_bytes() const { return narrow() ? 4 : 8; }
  std::vector<std::int64_t> values_sizes(std::int64_t nnz) const {
    std::vector<std::int64_t> result{nnz};
    result.insert(result.end(), dense_sizes().begin(), dense_sizes().end());
    return result;
  }

  at::Tensor flatten(at::Tensor const& indices) const {
    at::Tensor const columns = indices.contiguous();
    at::Tensor flat = at::zeros({indices.size(1)}, at::kLong);
    auto* const out = flat.mutable_data_ptr<std::int64_t>();
    for (std::int64_t dim = 0; dim < sparse_dims; ++dim) {
      auto const* const in = columns.const_data_ptr<std::int64_t>() + dim * flat.numel();
      for (std::int64_t i = 0; i < flat.numel(); ++i) {
        require(in[i] >= 0 && in[i] < sizes[dim], "allreduce of sparse tensors: index ", in[i],
                " is outside dimension ", dim, " of shape ", sizes);
        out[i] = out[i] * sizes[dim] + in[i];
      }
    }
    for (std::int64_t i = 1; i < flat.numel(); ++i) {
      require(out[i - 1] < out[i],
              "allreduce of sparse tensors: the tensor is marked as coalesced, but its indices are "
              "not sorted and "
              "distinct");
    }
    return flat;
  }

  at::Tensor unflatten(at::Tensor const& flat) const {
    at::Tensor indices = at::empty({sparse_dims, flat.numel()}, at::kLong);
    at::Tensor rest = flat.clone();
    auto* const left = rest.mutable_data_ptr<std::int64_t>();
    for (std::int64_t dim = sparse_dims - 1; dim >= 0; --dim) {
      auto* const out = indices.mutable_data_ptr<std::int64_t>() + dim * flat.numel();
      for (std::int64_t i = 0; i < flat.numel(); ++i) {
        out[i] = left[i] % sizes[dim];
        left[i] /= sizes[dim];
      }
    }
    return indices;
  }
};

// One rank's contribution: sorted distinct positions, and a row of values for each.
struct CooAllreduce::Entries {
  at::Tensor positions, values;
};

// The caller's modes and stream, on the progress thread.
class CooAllreduce::ThreadState {
 public:
  explicit ThreadState(CooAllreduce const& operation)
      : inference_mode_(operation.inference_mode_), stream_(operation.stream_) {}

 private:
  c10::InferenceMode inference_mode_;
  at::NoGradGuard no_grad_;
  c10::OptionalStreamGuard stream_;
};

CooAllreduce::CooAllreduce(at::Tensor tensor, ReduceOp::RedOpType op, BytesAllgather& gather)
    : tensor_(std::move(tensor)),
      op_(op),
      gather_(gather),
      inference_mode_(c10::InferenceMode::is_enabled()) {
  if (!tensor_.device().is_cpu()) {
    stream_ = c10::impl::VirtualGuardImpl(tensor_.device().type()).getStream(tensor_.device());
  }
}

Proposal CooAllreduce::prepare() {
  ThreadState const state(*this);
  Shape const shape(tensor_);
  CooReduction const& reduction = find_reduction(op_, shape.dtype);
  require(tensor_.unsafeGetTensorImpl()->allow_tensor_metadata_change(),
          "allreduce of sparse tensors: the result cannot be written into a tensor made by "
          "detach() or .data; "
          "pass the original or a clone");
  at::Tensor const coalesced = tensor_.detach().coalesce();
  pack(shape, coalesced);
  text_ = concat("operation=allreduce of a sparse tensor;reduction=", reduction.name,
                 ";shape=", shape.sizes, ";sparse dimensions=", shape.sparse_dims,
                 ";dtype=", at::toString(shape.dtype));
  return {.text = text_};
}

void CooAllreduce::pack(Shape const& shape, at::Tensor const& coalesced) {
  at::Tensor positions = shape.flatten(coalesced.indices().cpu());
  if (shape.narrow()) positions = positions.to(at::kInt);
  at::Tensor const values = coalesced.values().cpu().contiguous();
  packed_.resize(positions.nbytes() + values.nbytes());
  if (packed_.empty()) return;
  std::memcpy(packed_.data(), positions.const_data_ptr(), positions.nbytes());
  if (values.nbytes() > 0) {
    std::memcpy(packed_.data() + positions.nbytes(), values.const_data_ptr(), values.nbytes());
  }
}

// Throws MalformedFrame where the bytes are no rank's entries.
CooAllreduce::Entries CooAllreduce::unpack(Shape const& shape,
                                           std::span<const std::byte> bytes) const {
  std::size_t const entry_bytes = shape.position_bytes() + shape.row_bytes;
  auto const nnz = static_cast<std::int64_t>(bytes.size() / entry_bytes);
  require<MalformedFrame>(bytes.size() % entry_bytes == 0, bytes.size(),
                          " bytes are no multiple of the ", entry_bytes, " that an entry takes");
  at::Tensor positions = at::empty({nnz}, shape.narrow() ? at::kInt : at::kLong);
  at::Tensor values = at::empty(shape.values_sizes(nnz), shape.dtype);
  if (nnz > 0) std::memcpy(positions.mutable_data_ptr(), bytes.data(), positions.nbytes());
  if (values.nbytes() > 0) {
    std::memcpy(values.mutable_data_ptr(), bytes.data() + positions.nbytes(), values.nbytes());
  }
  positions = positions.to(at::kLong);
  auto const* const position = positions.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < nnz; ++i) {
    require<MalformedFrame>(
        position[i] > (i == 0 ? -1 : position[i - 1]) && position[i] < shape.positions, "position ",
        position[i], " is out of order or not below ", shape.positions);
  }
  return {positions, values.to(accumulate_type(shape.dtype))};
}

void CooAllreduce::run(Channel& channel, Agreement const& /*agreement*/) {
  ThreadState const state(*this);
  Shape const shape(tensor_);
  CooReduction const& reduction = find_reduction(op_, shape.dtype);
  auto const strings = gather_.run(channel, packed_);
  std::vector<Entries> ranks;
  std::vector<at::Tensor> positions;
  for (int rank = 0; rank < channel.size(); ++rank) {
    channel.decode_from(rank, [&] { ranks.push_back(unpack(shape, strings[rank])); });
    positions.push_back(ranks.back().positions);
  }

  at::Tensor const merged =
      std::get<0>(at::unique_consecutive(std::get<0>(at::cat(positions).sort())));
  at::Tensor values = at::zeros(shape.values_sizes(merged.numel()), accumulate_type(shape.dtype));
  bool first = true;
  for (Entries const& entries : ranks) {
    at::Tensor const rows = at::searchsorted(merged, entries.positions);
    if (reduction.fold == nullptr) {
      values.index_copy_(0, rows, values.index_select(0, rows).add_(entries.values));
    } else if (first) {
      values.index_copy_(0, rows, entries.values);
    } else {
      values = reduction.fold(values, at::zeros_like(values).index_copy_(0, rows, entries.values));
    }
    first = false;
  }
  if (op_ == ReduceOp::AVG) values.div_(channel.size());

  at::Tensor const result = at::_sparse_coo_tensor_unsafe(
      shape.unflatten(merged), values.to(shape.dtype), shape.sizes,
      at::TensorOptions().dtype(shape.dtype).layout(at::kSparse), /*is_coalesced=*/true);
  tensor_.copy_(result);
  if (stream_) stream_->synchronize();
}

}  // namespace sparsecomm
