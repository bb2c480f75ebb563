#include "delivered_gradient.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <utility>

namespace sparsecomm {
namespace {

// Reads no further than the first entry that is not zero, on the processor.
bool only_zeros(at::Tensor const& tensor) {
  if (!tensor.is_cpu() || !tensor.is_non_overlapping_and_dense()) {
    return !tensor.any().item<bool>();
  }
  auto const* const bytes = static_cast<char const*>(tensor.const_data_ptr());
  std::size_t const size = tensor.nbytes();
  return size == 0 || (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, size - 1) == 0);
}

}  // namespace

// A hook of the accumulator: those of the tensor are dropped as soon as somebody registers one in
// Python.
class DeliveredGradient::BeforeAccumulation final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulation(std::weak_ptr<DeliveredGradient> followed)
      : followed_(std::move(followed)) {}
  torch::autograd::variable_list operator()(
      torch::autograd::variable_list const& gradients) override {
    auto const followed = followed_.lock();
    if (followed && gradients.at(0).defined()) followed->before_accumulation();
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}

 private:
  std::weak_ptr<DeliveredGradient> followed_;
};

std::shared_ptr<DeliveredGradient> DeliveredGradient::follow(at::Tensor const& parameter,
                                                             bool has_moment) {
  if (!parameter.requires_grad()) return nullptr;
  std::shared_ptr<DeliveredGradient> followed(new DeliveredGradient(parameter, has_moment));
  followed->accumulator_ = torch::autograd::impl::grad_accumulator(parameter);
  followed->accumulator_->add_pre_hook(std::make_unique<BeforeAccumulation>(followed));
  return followed;
}

// Settles whether what was sent has been delivered.
void DeliveredGradient::settle() {
  if (held_ != Held::sent) return;
  bool const stood = *std::exchange(stands_, nullptr);
  held_ = stood ? Held::delivered : had_former_ ? Held::both : Held::own;
}

void DeliveredGradient::before_accumulation() {
  std::lock_guard const lock(mutex_);
  settle();
  if (held_ == Held::own) return;
  c10::NoGradGuard const no_grad;
  at::Tensor const& grad = parameter_.grad();
  bool const stepped = parameter_._version() != version_;
  // Somebody has put another tensor there. Where a moment would take in what it had taken before,
  // that is not enough to know: DDP does so as it rebuilds its buckets.
  bool const replaced = grad.defined() && !has_moment_ && grad_ && held_ != Held::both &&
                        grad_->_unsafe_get_target() != grad.unsafeGetTensorImpl();
  // A device is not waited for after a step, though it keeps what may be zeros.
  bool const looks = grad.defined() && (grad.is_cpu() || !stepped || held_ == Held::both);
  if (!grad.defined() || grad.is_sparse() || replaced || (looks && only_zeros(grad))) {
    held_ = Held::own;
    return;
  }
  if (held_ == Held::both) return;
  if (!former_.defined()) former_ = at::empty_like(grad);
  former_.copy_(grad);
  continues_ = !stepped;
  held_ = Held::both;
}

DeliveredGradient::Fresh DeliveredGradient::take_fresh(
    at::Tensor const& gradient, std::shared_ptr<std::atomic<bool> const> stands) {
  std::lock_guard const lock(mutex_);
  c10::NoGradGuard const no_grad;
  settle();
  bool const used = held_ != Held::delivered;
  if (held_ == Held::delivered && parameter_.grad().defined() && !only_zeros(gradient)) {
    if (!former_.defined()) former_ = at::empty_like(parameter_);
    former_.copy_(gradient.reshape(former_.sizes()));
    continues_ = parameter_._version() == version_;
    held_ = Held::both;
  }
  had_former_ = held_ == Held::both;
  if (had_former_) gradient.sub_(former_.reshape(gradient.sizes()));
  held_ = Held::sent;
  grad_.reset();
  if (at::Tensor const& grad = parameter_.grad(); grad.defined())
    grad_.emplace(grad.getIntrusivePtr());
  version_ = parameter_._version();
  stands_ = std::move(stands);
  return {used, had_former_ && continues_, had_former_ ? former_ : at::Tensor()};
}

}  // namespace sparsecomm
