// A lossless collective on one tensor: from the tensor to the engine's operation and back.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/algorithm.h"
#include "engine/communicator.h"
#include "engine/row_allreduce.h"

namespace sparsecomm {

enum class CollectiveKind : std::uint8_t { allreduce, allgather, reduce_scatter };

// What a caller asks for.
struct CollectiveRequest {
  CollectiveKind kind = CollectiveKind::allreduce;
  at::Tensor tensor;
  AlgorithmEntry const* algorithm = nullptr;  // of an allreduce; null: chosen by the engine
  Fold fold = Fold::sum;
  bool average = false;
  bool in_rank_order = false;  // see CollectiveConfig
  // Whether an index that a rank does not have is a zero there, as torch.distributed has it;
  // otherwise it takes no part. Only of sparse tensors.
  bool absent_is_zero = false;
  bool by_numel = false;  // of a dense tensor: ranks may have other shapes of as many entries
  std::string note;       // what ranks must agree on besides, as "name=value"

  // Throws InvalidArgument where `op`, `algorithm` or the tensor's dtype is none of those that can.
  static CollectiveRequest make(CollectiveKind kind, at::Tensor tensor, std::string_view algorithm,
                                std::string_view op);
  // Makes one that contributes nothing to operations of that text, see Proposal: neutral elements
  // if they are of dense tensors, else no entries. Throws InvalidArgument if there can be none.
  static CollectiveRequest neutral_for(std::string_view text);
  // Throws InvalidArgument where the tensor's device, layout or shape cannot be served.
  void require_servable(int ranks) const;
};

// Whether tensors of that dtype can be.
bool can_exchange(at::ScalarType dtype);

// Serves tensors of one dtype, one after another, and keeps its scratch between them.
class TensorCollective : public Operation {
 public:
  // For operations of that communicator, which outlives it.
  static std::shared_ptr<TensorCollective> make(at::ScalarType dtype, Communicator& communicator,
                                                AlgorithmOptions const& options = {});

  at::ScalarType dtype() const { return dtype_; }
  // Throws as CollectiveRequest::require_servable(). The entries are read later, in prepare().
  virtual void bind(CollectiveRequest request) = 0;
  // Of the operation that has ended: the dense tensor that was reduced in place, or new coalesced
  // COO tensors. Lets go of the tensor.
  virtual std::vector<at::Tensor> release() = 0;

 protected:
  explicit TensorCollective(at::ScalarType dtype) : dtype_(dtype) {}

 private:
  at::ScalarType dtype_;
};

// Operations of one communicator that are not in use, with their scratch. Thread-safe.
class CollectivePool {
 public:
  explicit CollectivePool(AlgorithmOptions const& options = {}) : options_(options) {}

  std::shared_ptr<TensorCollective> take(at::ScalarType dtype, Communicator& communicator);
  void give(std::shared_ptr<TensorCollective> operation);

 private:
  AlgorithmOptions const options_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<TensorCollective>> operations_;
};

}  // namespace sparsecomm
