#include "coo_allreduce.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "tensor_memory.h"

namespace sparsecomm {
namespace {

using c10d::ReduceOp;

struct CooReduction {
  ReduceOp::RedOpType op;
  char const* name;
  Fold fold;
  bool floating, integral, complex;  // the kinds of dtype it is defined for
};

constexpr CooReduction coo_reductions[] = {
    {ReduceOp::SUM, "sum", Fold::sum, true, true, true},
    {ReduceOp::AVG, "avg", Fold::sum, true, false, true},
    {ReduceOp::PRODUCT, "product", Fold::product, true, true, false},
    {ReduceOp::MIN, "min", Fold::min, true, true, false},
    {ReduceOp::MAX, "max", Fold::max, true, true, false},
    {ReduceOp::BAND, "band", Fold::band, false, true, false},
    {ReduceOp::BOR, "bor", Fold::bor, false, true, false},
    {ReduceOp::BXOR, "bxor", Fold::bxor, false, true, false},
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

// Sums and products of integers wrap alike in a wider type.
bool is_widened(at::ScalarType dtype) {
  return dtype == at::kBool || dtype == at::kChar || dtype == at::kByte || dtype == at::kShort;
}

at::Tensor make_coalesced(at::Tensor const& indices, at::Tensor const& values,
                          at::IntArrayRef sizes) {
  return at::_sparse_coo_tensor_unsafe(indices, values, sizes, values.options().layout(at::kSparse),
                                       /*is_coalesced=*/true);
}

}  // namespace

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

CooAllreduce::CooAllreduce(at::Tensor tensor, ReduceOp::RedOpType op, Communicator& communicator,
                           std::shared_ptr<CollectivePool> pool, double loss_scale)
    : tensor_(std::move(tensor)),
      op_(op),
      communicator_(communicator),
      pool_(std::move(pool)),
      loss_scale_{loss_scale},
      inference_mode_(c10::InferenceMode::is_enabled()) {
  if (!tensor_.device().is_cpu()) {
    stream_ = c10::impl::VirtualGuardImpl(tensor_.device().type()).getStream(tensor_.device());
  }
}

Proposal CooAllreduce::prepare() {
  ThreadState const state(*this);
  at::ScalarType const dtype = tensor_.scalar_type();
  CooReduction const& reduction = find_reduction(op_, dtype);
  require(tensor_.unsafeGetTensorImpl()->allow_tensor_metadata_change(),
          "allreduce of sparse tensors: the result cannot be written into a tensor made by "
          "detach() or .data; pass the original or a clone");
  require_memory(tensor_);
  CollectiveRequest request{.tensor = to_exchanged(),
                            .fold = reduction.fold,
                            .average = op_ == ReduceOp::AVG,
                            .absent_is_zero = true,
                            .note = concat("torch dtype=", at::toString(dtype))};
  collective_ = pool_->take(request.tensor.scalar_type(), communicator_);
  collective_->bind(std::move(request));
  Proposal proposal = collective_->prepare();
  auto const scale = payload_of(loss_scale_);
  require<Error>(scale.size() + proposal.payload.size() <= payload_.size(), "a payload of ",
                 proposal.payload.size(), " bytes leaves no room for a loss scale");
  auto const end = std::ranges::copy(scale, payload_.begin()).out;
  std::ranges::copy(proposal.payload, end);
  proposal.payload = std::span(payload_).first(scale.size() + proposal.payload.size());
  return proposal;
}

bool CooAllreduce::merge(std::span<std::byte> into, std::span<const std::byte> other) const {
  constexpr std::size_t first = sizeof(LossScale);
  bool const same_scale = merge_payload<LossScale>(into.first(first), other.first(first));
  return collective_->merge(into.subspan(first), other.subspan(first)) && same_scale;
}

std::string CooAllreduce::changing_fields(std::span<const std::byte> payload) const {
  return loss_scale_.field(read_payload<LossScale>(payload.first(sizeof(LossScale))));
}

// On the CPU, coalesced, in a type that is exchanged: complex numbers as rows of two.
at::Tensor CooAllreduce::to_exchanged() const {
  at::Tensor const coalesced = tensor_.detach().coalesce();
  at::Tensor values = coalesced.values().cpu();
  std::vector<std::int64_t> sizes = tensor_.sizes().vec();
  if (values.is_complex()) {
    values = at::view_as_real(values.resolve_conj());
    sizes.push_back(2);
  } else if (is_widened(values.scalar_type())) {
    values = values.to(at::kInt);
  }
  return make_coalesced(coalesced.indices().cpu(), values, sizes);
}

at::Tensor CooAllreduce::from_exchanged(at::Tensor const& reduced) const {
  at::Tensor const values = reduced.values();
  return make_coalesced(reduced.indices(),
                        tensor_.is_complex() ? at::view_as_complex(values.contiguous())
                                             : values.to(tensor_.scalar_type()),
                        tensor_.sizes());
}

void CooAllreduce::run(Channel& channel, Agreement const& agreement) {
  ThreadState const state(*this);
  collective_->run(channel, {agreement.all_finite, agreement.payload.subspan(sizeof(LossScale))});
  tensor_.copy_(from_exchanged(collective_->release().front()));
  if (stream_) stream_->synchronize();
  pool_->give(std::move(collective_));
}

}  // namespace sparsecomm
