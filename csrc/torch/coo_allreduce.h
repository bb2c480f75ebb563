// Allreduce of sparse COO tensors: exactly the dense allreduce of their to_dense(), without making
// it.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "collectives/allgather_bytes.h"
#include "engine/communicator.h"

namespace sparsecomm {

// Every rank sends its coalesced entries to all others, and each reduces them in rank order, so
// that all get the same bits. A rank without an entry counts as zero there. float16 and bfloat16
// are reduced in float32 and rounded once.
class CooAllreduce final : public Operation {
 public:
  // The result replaces the contents of `tensor`, coalesced; a failed operation leaves them as they
  // were. `gather` must stay until the operation has ended, and is used by one operation at a time.
  CooAllreduce(at::Tensor tensor, c10d::ReduceOp::RedOpType op, BytesAllgather& gather);

  Proposal prepare() override;
  void run(Channel& channel, Agreement const& agreement) override;

 private:
  struct Shape;
  struct Entries;
  class ThreadState;

  void pack(Shape const& shape, at::Tensor const& coalesced);
  Entries unpack(Shape const& shape, std::span<const std::byte> bytes) const;

  at::Tensor tensor_;
  c10d::ReduceOp::RedOpType op_;
  BytesAllgather& gather_;
  bool inference_mode_;
  std::string text_;                   // of the proposal
  std::optional<c10::Stream> stream_;  // the caller's, on a device that has any
  std::vector<std::byte> packed_;      // positions, then values
};

}  // namespace sparsecomm
