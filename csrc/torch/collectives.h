// The lossless collectives of one communicator, on tensors.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "signal_check.h"
#include "tensor_collective.h"

namespace sparsecomm {

// A collective that was started. Its future holds the tensor, or the list of tensors of an
// allgather.
class CollectiveWork final : public c10d::Work {
 public:
  explicit CollectiveWork(CollectiveKind kind);

  // Throws what the operation threw, as torch.distributed's users know it, or what a signal's
  // handler raises meanwhile; the operation then goes on.
  c10::IValue wait_for_result();
  bool ended() const { return future_->completed(); }
  // See Communicator::Handle.
  bool cancel() const { return handle_.cancel(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  friend class Collectives;
  void end(std::exception_ptr const& failure, std::vector<at::Tensor> results);

  CollectiveKind kind_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  FutureEnd end_;
  Communicator::Handle handle_;
};

// Thread-safe; operations run in the order of the calls, which ranks must make alike.
class Collectives {
 public:
  // Keeps no communicator alive: once it is closed every call throws InvalidArgument.
  explicit Collectives(std::weak_ptr<Communicator> communicator,
                       AlgorithmOptions const& options = {})
      : communicator_(std::move(communicator)), idle_(std::make_shared<CollectivePool>(options)) {}

  std::vector<at::Tensor> run(CollectiveRequest request);
  c10::intrusive_ptr<CollectiveWork> start(CollectiveRequest request);

 private:
  std::shared_ptr<Communicator> communicator() const;
  std::shared_ptr<TensorCollective> bind(Communicator& communicator,
                                         CollectiveRequest request) const;

  std::weak_ptr<Communicator> communicator_;
  std::shared_ptr<CollectivePool> idle_;
};

}  // namespace sparsecomm
