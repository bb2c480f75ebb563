// The results that exchanges have left in a parameter's grad, which this rank must not send again.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace sparsecomm {

// DDP averages what grad holds after a backward pass. A pass that adds to the grad of a former one,
// since nobody has cleared it, so brings that one's result again, on every rank. Nothing is kept
// where grads are cleared by setting them to None; where they are filled with zeros, a look at
// each.
class DeliveredGradient {
 public:
  // Follows what autograd adds to the parameter's grad, as long as this lives. Null if it requires
  // no gradient, so that there is nothing to follow. `has_moment`: of what keeps its gradients.
  static std::shared_ptr<DeliveredGradient> follow(at::Tensor const& parameter, bool has_moment);

  // A pass's gradient, as it was in grad or in a copy.
  struct Fresh {
    bool used;          // this rank has added to grad since the last exchange
    bool continues;     // the former result is still there, and no optimizer has used it
    at::Tensor former;  // what must be added to the result; undefined: nothing
  };
  // Takes what was delivered out of the gradient. `stands` will say, before the next pass, whether
  // what is sent now has been delivered.
  Fresh take_fresh(at::Tensor const& gradient, std::shared_ptr<std::atomic<bool> const> stands);

 private:
  enum class Held {
    own,        // all of grad is to be sent
    sent,       // grad was exchanged and nothing has been added since; what it holds depends
    delivered,  // all of grad is the result of exchanges
    both,       // former_ is, and the rest is to be sent
  };

  DeliveredGradient(at::Tensor parameter, bool has_moment)
      : parameter_(std::move(parameter)), has_moment_(has_moment) {}
  class BeforeAccumulation;
  void before_accumulation();
  void settle();

  std::mutex mutex_;
  at::Tensor parameter_;
  bool has_moment_;
  // Kept, so that the parameter has no other as long as it is of its type and device. Torch's
  // releases differ in the kind of pointer.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>())) accumulator_;
  Held held_ = Held::own;
  bool had_former_ = false;   // of what was sent
  bool continues_ = false;    // see Fresh
  std::int64_t version_ = 0;  // of the parameter when it was sent
  at::Tensor former_;         // kept for the next time
  // The grad that was sent, if there was one.
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> grad_;
  std::shared_ptr<std::atomic<bool> const> stands_;
};

}  // namespace sparsecomm
