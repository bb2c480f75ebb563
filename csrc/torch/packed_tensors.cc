#include "packed_tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>

namespace sparsecomm {
namespace {

using Outputs = PackedTensors::Pairs;
using WorkPtr = PackedTensors::WorkPtr;

bool is_packed(at::Tensor const& tensor) {
  return !tensor.device().is_cpu() || tensor.layout() != at::kStrided || tensor.is_contiguous();
}

// Writes as gloo does, whatever autograd and inference mode know of the tensor.
void overwrite(at::Tensor const& to, at::Tensor const& from) {
  at::AutoDispatchBelowADInplaceOrView const plain;
  to.copy_(from);
}

at::Tensor make_packed(at::Tensor const& tensor) {
  return at::empty(tensor.sizes(), tensor.options());
}

bool shares_no_memory(at::Tensor const& tensor) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dimensions;  // stride, size
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1) dimensions.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::ranges::sort(dimensions);
  bool nested = true;
  std::int64_t extent = 1;  // of the dimensions so far
  for (auto const& [stride, size] : dimensions) {
    nested = nested && stride >= extent;
    extent += stride * (size - 1);
  }
  if (nested) return true;
  at::Tensor const used = at::zeros({extent}, at::kBool);
  used.as_strided(tensor.sizes(), tensor.strides()).fill_(true);
  return used.sum().item<std::int64_t>() == tensor.numel();
}

void require_writable(at::Tensor const& tensor) {
  TORCH_CHECK(shares_no_memory(tensor), "backend sparsecomm: a tensor of shape ", tensor.sizes(),
              " and strides ", tensor.strides(),
              " has several entries in one place, so it cannot take a result; pass "
              "tensor.contiguous()");
}

at::Tensor const& origin(Outputs const& outputs, at::Tensor const& tensor) {
  auto const found = std::ranges::find_if(
      outputs, [&](auto const& output) { return output.first.is_same(tensor); });
  return found == outputs.end() ? tensor : found->second;
}

std::vector<at::Tensor> origins(Outputs const& outputs, std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) tensor = origin(outputs, tensor);
  return tensors;
}

// A future of gloo's holds a list of tensors, or a list of such lists.
c10::IValue origins(Outputs const& outputs, c10::IValue const& value) {
  if (value.isTensorList()) return origins(outputs, value.toTensorVector());
  if (!value.isList()) return value;
  std::vector<std::vector<at::Tensor>> lists;
  for (c10::IValue const& list : value.toListRef()) {
    lists.push_back(origins(outputs, list.toTensorVector()));
  }
  return lists;
}

void copy_back(Outputs const& outputs) {
  for (auto const& [packed, tensor] : outputs) overwrite(tensor, packed);
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (c10::Error const&) {
    return nullptr;  // not implemented
  }
}

// The thread that ends gloo's part copies.
class UnpackedCollective final : public c10d::Work {
 public:
  UnpackedCollective(WorkPtr packed, Outputs outputs, c10::TypePtr type)
      : Work(-1, packed->retrieveOpType()),
        packed_(std::move(packed)),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(std::move(type))) {}

  // Takes the future's value: gloo's work ends only after the callbacks of its own. As with gloo,
  // the first list if there are several.
  std::vector<at::Tensor> result() override {
    TORCH_CHECK(isCompleted(), "the operation has not ended; call wait() before result()");
    c10::IValue const value = future_->value();
    if (value.isTensorList()) return value.toTensorVector();
    auto const lists = value.toListRef();
    return lists.empty() ? std::vector<at::Tensor>() : lists.front().toTensorVector();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return packed_->getSequencenumber(); }

  void end(c10::ivalue::Future& ended) {
    std::exception_ptr error = ended.hasError() ? ended.exception_ptr() : nullptr;
    try {
      if (!error) copy_back(outputs_);
    } catch (...) {
      error = std::current_exception();
    }
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(origins(outputs_, ended.constValue()));
    }
    finish(error);
  }

 private:
  WorkPtr packed_;
  Outputs outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Whoever waits copies, where gloo's part ends in that too: of receives, and of reduce-scatters.
class UnpackedByWaiting final : public c10d::Work {
 public:
  UnpackedByWaiting(WorkPtr packed, Outputs outputs)
      : Work(-1, packed->retrieveOpType()),
        packed_(std::move(packed)),
        outputs_(std::move(outputs)) {}

  bool isCompleted() override { return packed_->isCompleted(); }
  bool isSuccess() const override { return packed_->isSuccess(); }
  std::exception_ptr exception() const override { return packed_->exception(); }
  int sourceRank() const override { return packed_->sourceRank(); }
  void abort() override { packed_->abort(); }
  std::uint64_t getSequencenumber() const override { return packed_->getSequencenumber(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!packed_->wait(timeout)) return false;
    std::call_once(copied_, [this] { copy_back(outputs_); });
    return true;
  }

 private:
  WorkPtr packed_;
  Outputs outputs_;
  std::once_flag copied_;
};

}  // namespace

at::Tensor PackedTensors::input(at::Tensor const& tensor) {
  if (is_packed(tensor)) return tensor;
  at::Tensor packed = make_packed(tensor);
  overwrite(packed, tensor);
  return packed;
}

at::Tensor PackedTensors::output(at::Tensor const& tensor) {
  if (is_packed(tensor)) return tensor;
  require_writable(tensor);
  return outputs_.emplace_back(make_packed(tensor), tensor).first;
}

at::Tensor PackedTensors::in_place(at::Tensor const& tensor) {
  at::Tensor packed = output(tensor);
  if (!packed.is_same(tensor)) overwrite(packed, tensor);
  return packed;
}

WorkPtr PackedTensors::unpack(WorkPtr work) {
  if (outputs_.empty() || !work) return work;
  auto const future = future_of(*work);
  if (!future) return c10::make_intrusive<UnpackedByWaiting>(std::move(work), std::move(outputs_));
  auto unpacked = c10::make_intrusive<UnpackedCollective>(std::move(work), std::move(outputs_),
                                                          future->elementType());
  future->addCallback([unpacked](c10::ivalue::Future& ended) { unpacked->end(ended); });
  return unpacked;
}

}  // namespace sparsecomm
