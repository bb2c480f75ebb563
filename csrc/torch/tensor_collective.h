// A lossless collective on one tensor: from the tensor to the engine's operation and back.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string_view>
#include <vector>

#include "collectives/algorithm.h"
#include "engine/communicator.h"

namespace sparsecomm {

enum class CollectiveKind : std::uint8_t { allreduce, allgather, reduce_scatter };

// What a caller asks for.
struct CollectiveRequest {
  CollectiveKind kind = CollectiveKind::allreduce;
  at::Tensor tensor;
  AlgorithmEntry const* algorithm = nullptr;  // of an allreduce; null: chosen by the engine
  Reduction reduction = Reduction::sum;
  bool average = false;

  // Throws InvalidArgument where `op`, `algorithm` or the tensor's dtype is none of those that can.
  static CollectiveRequest make(CollectiveKind kind, at::Tensor tensor, std::string_view algorithm,
                                std::string_view op);
};

// Serves tensors of one dtype, one after another, and keeps its scratch between them.
class TensorCollective : public Operation {
 public:
  // For operations of that communicator, which outlives it.
  static std::shared_ptr<TensorCollective> make(at::ScalarType dtype, Communicator& communicator);

  at::ScalarType dtype() const { return dtype_; }
  // Throws InvalidArgument where the tensor's device, layout or shape cannot be served. The
  // entries are read later, in prepare().
  virtual void bind(CollectiveRequest request) = 0;
  // Of the operation that has ended: the dense tensor that was reduced in place, or new coalesced
  // COO tensors. Lets go of the tensor.
  virtual std::vector<at::Tensor> release() = 0;

 protected:
  explicit TensorCollective(at::ScalarType dtype) : dtype_(dtype) {}

 private:
  at::ScalarType dtype_;
};

}  // namespace sparsecomm
