// The lossless collectives of one communicator, on tensors.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "signal_check.h"
#include "tensor_collective.h"

namespace sparsecomm {

// A collective that was started. Its future holds a tensor, or a list of tensors.
class CollectiveWork final : public c10d::Work {
 public:
  explicit CollectiveWork(bool is_list);

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

  bool is_list_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  FutureEnd end_;
  Communicator::Handle handle_;
};

// An operation, and what is to be called once when it has ended, well or not.
struct CollectiveTask {
  std::shared_ptr<Operation> operation;
  std::function<std::vector<at::Tensor>(bool good)> release;

  static CollectiveTask make(Communicator& communicator, std::shared_ptr<CollectivePool> idle,
                             CollectiveRequest request);
  // Several for one operation, see GroupedCollective.
  static CollectiveTask make(Communicator& communicator, std::shared_ptr<CollectivePool> idle,
                             std::vector<CollectiveRequest> requests);
};

// Thread-safe. See Communicator::submit() for names and the order in which operations run.
class Collectives {
 public:
  // Keeps no communicator alive: once it is closed every call throws InvalidArgument.
  explicit Collectives(std::weak_ptr<Communicator> communicator,
                       AlgorithmOptions const& options = {})
      : communicator_(std::move(communicator)), idle_(std::make_shared<CollectivePool>(options)) {}

  // `what`: see CollectiveTask. `name`: empty: it has none. `priority`: see Communicator::submit().
  template <class What>
  std::vector<at::Tensor> run(What what, std::string name, int priority) {
    auto const alive = communicator();
    return run_task(*alive, CollectiveTask::make(*alive, idle_, std::move(what)), std::move(name),
                    priority);
  }
  template <class What>
  c10::intrusive_ptr<CollectiveWork> start(What what, std::string name, int priority) {
    auto const alive = communicator();
    bool const is_list = has_list(what);
    return start_task(*alive, CollectiveTask::make(*alive, idle_, std::move(what)), is_list,
                      std::move(name), priority);
  }

  // See Join. Returns the rank that joined last.
  int join();

 private:
  std::shared_ptr<Communicator> communicator() const;
  static std::vector<at::Tensor> run_task(Communicator& communicator, CollectiveTask const& task,
                                          std::string name, int priority);
  static c10::intrusive_ptr<CollectiveWork> start_task(Communicator& communicator,
                                                       CollectiveTask const& task, bool is_list,
                                                       std::string name, int priority);
  static bool has_list(CollectiveRequest const& request) {
    return request.kind == CollectiveKind::allgather;
  }
  static bool has_list(std::vector<CollectiveRequest> const& /*requests*/) { return true; }

  std::weak_ptr<Communicator> communicator_;
  std::shared_ptr<CollectivePool> idle_;
};

}  // namespace sparsecomm
