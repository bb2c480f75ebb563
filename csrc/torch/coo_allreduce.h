// Allreduce of sparse COO tensors in place, as torch.distributed has it: exactly the dense
// allreduce of their to_dense(), without making it.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <array>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "engine/payload.h"
#include "tensor_collective.h"

namespace sparsecomm {

// Takes any device, reduction and element type that torch.distributed does, and runs the same
// operation as sparsecomm.allreduce; an index that a rank does not have is a zero there.
// float16 and bfloat16 are reduced in float32 and rounded once.
class CooAllreduce final : public Operation {
 public:
  // The result replaces the contents of `tensor`, coalesced; a failed operation leaves them as they
  // were. `pool` is of `communicator`, which outlives the operation. `loss_scale`: of the tensor;
  // 0: this rank names none.
  CooAllreduce(at::Tensor tensor, c10d::ReduceOp::RedOpType op, Communicator& communicator,
               std::shared_ptr<CollectivePool> pool, double loss_scale = 0);

  Proposal prepare() override;
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override;
  std::string changing_fields(std::span<const std::byte> payload) const override;
  void run(Channel& channel, Agreement const& agreement) override;

 private:
  class ThreadState;

  at::Tensor to_exchanged() const;
  at::Tensor from_exchanged(at::Tensor const& reduced) const;

  at::Tensor tensor_;
  c10d::ReduceOp::RedOpType op_;
  Communicator& communicator_;
  std::shared_ptr<CollectivePool> pool_;
  std::shared_ptr<TensorCollective> collective_;  // between prepare() and the end of run()
  LossScale loss_scale_;
  std::array<std::byte, max_payload_bytes> payload_{};  // the scale, then the collective's
  bool inference_mode_;
  std::optional<c10::Stream> stream_;  // the caller's, on a device that has any
};

}  // namespace sparsecomm
