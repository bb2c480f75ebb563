// The torch.distributed backend "sparsecomm": gloo (on CUDA tensors NCCL), but for the allreduce of
// sparse COO tensors, and of dense ones where there are aggregators, which run on our engine.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "connect.h"
#include "engine/communicator.h"
#include "tensor_collective.h"

namespace sparsecomm {

// Those of all groups, so that they can be closed while Python still answers: a thread that drops a
// Python object later ends the process with an error.
class OpenCommunicators {
 public:
  void add(std::shared_ptr<Communicator> const& communicator);
  // And such as are added later.
  void close();

 private:
  std::mutex mutex_;
  bool closed_ = false;
  std::vector<std::weak_ptr<Communicator>> communicators_;
};

class ProcessGroup final : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  struct Parts {
    BackendPtr gloo;
    // Makes the group for CUDA tensors when the first comes; empty where torch has no NCCL.
    std::function<BackendPtr()> make_nccl;
    std::function<OptionsPtr()> make_gloo_options;  // for the engine's own gloo group
    StorePtr store;
    std::chrono::milliseconds timeout;
    ConnectOptions connect;  // the engine, whose timeout is not the one in there
    AggregatorAddresses aggregators;
    std::uint32_t block_bytes;                                // of what goes through them
    std::optional<std::chrono::milliseconds> engine_timeout;  // the group's if there is none
    std::function<void(std::string const&)> warn;
    std::shared_ptr<OpenCommunicators> open;
  };

  explicit ProcessGroup(Parts parts);
  ~ProcessGroup() override;

  const std::string getBackendName() const override { return "sparsecomm"; }
  OptionsPtr getBackendOptions() override { return parts_.gloo->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setGroupUid(std::string const& uid) override;
  void setSequenceNumberForGroup() override { parts_.gloo->setSequenceNumberForGroup(); }
  std::uint64_t getSequenceNumberForGroup() override;
  void enableCollectivesTiming() override;
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;

  // NCCL must be told which point-to-point calls belong together; those of gloo meanwhile are only
  // collected.
  bool supportsCoalescing() const override { return has_nccl(); }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  bool supportsSplitting() const override { return !has_nccl(); }
  BackendPtr split(StorePtr const& store, std::vector<int> const& ranks,
                   OptionsPtr const& opts) override;
  BackendPtr merge(StorePtr const& store, OptionsPtr const& opts, int const& rank,
                   int const& size) override;

  AggregatorAddresses const& aggregators() const { return parts_.aggregators; }
  std::uint32_t block_bytes() const { return parts_.block_bytes; }
  // Of what has run on the engine; null before the first of it.
  std::shared_ptr<Communicator> communicator();

  // Waits for the sparse allreduces that were started, then closes their connections. From one of
  // their callbacks it returns at once.
  void shutdown() override;
  // Breaks off what runs.
  void abort() override;

  // The sum or average of one dense tensor goes through the engine where there are aggregators: it
  // chooses between them and its other algorithms, and the result differs from the inner group's by
  // rounding alone. All others go to the inner group.
  WorkPtr allreduce(Tensors& tensors, c10d::AllreduceOptions const& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, c10d::AllreduceOptions const& opts) override;

  WorkPtr broadcast(Tensors& tensors, c10d::BroadcastOptions const& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              c10d::AllreduceCoalescedOptions const& opts) override;
  WorkPtr reduce(Tensors& tensors, c10d::ReduceOptions const& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    c10d::AllgatherOptions const& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          c10d::AllgatherOptions const& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              c10d::AllgatherOptions const& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          c10d::AllgatherOptions const& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, c10d::GatherOptions const& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, c10d::ScatterOptions const& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         c10d::ReduceScatterOptions const& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               c10d::ReduceScatterOptions const& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          c10d::ReduceScatterOptions const& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes,
                        c10d::AllToAllOptions const& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, c10d::AllToAllOptions const& opts) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(c10d::BarrierOptions const& opts) override;
  void monitoredBarrier(c10d::BarrierOptions const& opts, bool wait_all_ranks) override;

 private:
  bool has_nccl() const { return static_cast<bool>(parts_.make_nccl); }
  BackendPtr nccl();
  BackendPtr nccl_if_made();
  BackendPtr inner(at::Device device);
  // Starts an operation of the inner group for this device; a profiler sees it under `title`, if
  // there is one. `start` packs the tensors that it hands on.
  template <class F>
  WorkPtr forward(char const* title, at::Device device, F&& start);
  // The same for one that overwrites its outputs with what it reads of its inputs.
  template <class To, class From, class... Parameters, class... Arguments>
  WorkPtr transfer(char const* title, at::Device device,
                   WorkPtr (Backend::*start)(To&, From&, Parameters...), To& outputs, From& inputs,
                   Arguments&... arguments);
  // torch asks once per device type with one store, and one group serves all of them; a second over
  // the same keys of the store would find the first's addresses.
  template <class F>
  BackendPtr derive(StorePtr const& store, F&& make_gloo);
  void close(bool wait);
  // Returns the communicator of all that runs on our engine, and makes it for the first of that.
  // The lock is held.
  Communicator& engine();
  std::unique_ptr<Transport> make_transport(std::chrono::milliseconds timeout);
  bool may_aggregate(Tensors const& tensors, c10d::ReduceOp::RedOpType op) const;
  WorkPtr allreduce_dense(Tensors& tensors, c10d::ReduceOp::RedOpType op);
  // Submits it, with the lock held; `ended` is called before the work ends.
  WorkPtr submit(Tensors& tensors, std::shared_ptr<Operation> operation,
                 std::function<void(std::exception_ptr const&)> ended = {});

  Parts parts_;
  OptionsPtr engine_options_;
  std::mutex mutex_;  // guards what follows
  BackendPtr nccl_;
  c10::weak_intrusive_ptr<c10d::Store> derived_from_{StorePtr()};
  c10::weak_intrusive_ptr<c10d::Backend> derived_{BackendPtr()};
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;  // works of gloo and the engine meanwhile
  bool closed_ = false;
  std::uint64_t own_operations_ = 0;  // of the engine
  std::optional<Communicator::Handle> last_;
  std::shared_ptr<CollectivePool> pool_;
  std::shared_ptr<Communicator> communicator_;
};

}  // namespace sparsecomm
