#include "process_group.h"

#include <ATen/Context.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <numeric>

#include "coo_allreduce.h"
#include "group_works.h"
#include "interpreter.h"
#include "packed_tensors.h"
#include "signal_check.h"
#include "transport/lazy.h"

namespace sparsecomm {
namespace {

template <class T>
at::Device device_of(std::vector<T> const& tensors) {
  TORCH_CHECK(!tensors.empty(), "no tensors were given");
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return tensors.front().device();
  } else {
    return device_of(tensors.front());
  }
}

}  // namespace

ProcessGroup::ProcessGroup(Parts parts)
    : Backend(parts.gloo->getRank(), parts.gloo->getSize()),
      parts_(std::move(parts)),
      engine_options_(parts_.make_gloo_options()) {
  AlgorithmOptions options;
  options.block_bytes = parts_.block_bytes;
  pool_ = std::make_shared<CollectivePool>(options);
  init();
}

ProcessGroup::~ProcessGroup() { close(/*wait=*/false); }

void ProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  std::lock_guard const lock(mutex_);
  parts_.timeout = timeout;
  parts_.gloo->setTimeout(timeout);
  if (nccl_) nccl_->setTimeout(timeout);
}

void ProcessGroup::setGroupUid(std::string const& uid) {
  Backend::setGroupUid(uid);
  parts_.gloo->setGroupUid(uid);
  if (BackendPtr const nccl = nccl_if_made()) nccl->setGroupUid(uid);
}

std::uint64_t ProcessGroup::getSequenceNumberForGroup() {
  std::lock_guard const lock(mutex_);
  return parts_.gloo->getSequenceNumberForGroup() + own_operations_;
}

void ProcessGroup::enableCollectivesTiming() {
  parts_.gloo->enableCollectivesTiming();
  if (BackendPtr const nccl = nccl_if_made()) nccl->enableCollectivesTiming();
}

void ProcessGroup::eagerConnectSingleDevice(at::Device device) {
  if (!device.is_cpu()) inner(device)->eagerConnectSingleDevice(device);
}

c10d::ErrorType ProcessGroup::getError() {
  BackendPtr const nccl = nccl_if_made();
  return nccl ? nccl->getError() : c10d::ErrorType::SUCCESS;
}

ProcessGroup::BackendPtr ProcessGroup::nccl() {
  if (BackendPtr made = nccl_if_made()) return made;
  TORCH_CHECK(has_nccl(),
              "backend sparsecomm: CUDA tensors go through NCCL, which this torch does not have; "
              "install a torch with CUDA, or move the tensors to the CPU");
  BackendPtr made = parts_.make_nccl();  // takes the interpreter, so not under the lock
  made->setGroupUid(getGroupUid());
  made->setGroupDesc(getGroupDesc());
  made->setBoundDeviceId(getBoundDeviceId());
  std::lock_guard const lock(mutex_);
  if (!nccl_) nccl_ = std::move(made);
  return nccl_;
}

ProcessGroup::BackendPtr ProcessGroup::nccl_if_made() {
  std::lock_guard const lock(mutex_);
  return nccl_;
}

ProcessGroup::BackendPtr ProcessGroup::inner(at::Device device) {
  if (device.is_cpu()) return parts_.gloo;
  TORCH_CHECK(device.is_cuda(),
              "backend sparsecomm: tensors must be on the CPU or on a CUDA device, not on ",
              device);
  return nccl();
}

template <class F>
ProcessGroup::WorkPtr ProcessGroup::forward(char const* title, at::Device device, F&& start) {
  BackendPtr const group = inner(device);
  PackedTensors packed;
  std::shared_ptr<at::RecordFunction> record;
  if (title != nullptr && at::hasCallbacks()) {
    record = std::make_shared<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (record->isActive()) {
      record->_setAsync();
      record->before(title);
    }
  }
  WorkPtr work = packed.unpack(start(*group, packed));
  if (record && work) {
    if (auto const future = work->getFuture()) {
      future->addCallback(
          at::wrapPropagateTLSState([record](c10::ivalue::Future& /*future*/) { record->end(); }));
    }
  }
  if (device.is_cpu()) {
    std::lock_guard const lock(mutex_);
    if (coalescing_) coalesced_.push_back(work);
  }
  return work;
}

template <class To, class From, class... Parameters, class... Arguments>
ProcessGroup::WorkPtr ProcessGroup::transfer(char const* title, at::Device device,
                                             WorkPtr (Backend::*start)(To&, From&, Parameters...),
                                             To& outputs, From& inputs, Arguments&... arguments) {
  return forward(title, device, [&](Backend& group, PackedTensors& packed) {
    To to = packed.output(outputs);
    From from = packed.input(inputs);
    return (group.*start)(to, from, arguments...);
  });
}

void ProcessGroup::startCoalescing() {
  nccl()->startCoalescing();
  std::lock_guard const lock(mutex_);
  coalescing_ = true;
}

ProcessGroup::WorkPtr ProcessGroup::endCoalescing() {
  WorkPtr work = nccl()->endCoalescing();
  std::lock_guard const lock(mutex_);
  coalescing_ = false;
  if (coalesced_.empty()) return work;
  std::vector<WorkPtr> works = std::exchange(coalesced_, {});
  if (work) works.push_back(std::move(work));
  return c10::make_intrusive<JointWork>(std::move(works));
}

template <class F>
ProcessGroup::BackendPtr ProcessGroup::derive(StorePtr const& store, F&& make_gloo) {
  {
    std::lock_guard const lock(mutex_);
    if (derived_from_.lock() == store) {
      if (BackendPtr made = derived_.lock()) return made;
    }
  }
  Parts parts = parts_;
  parts.gloo = make_gloo();
  if (!parts.gloo) return nullptr;  // this rank is no member
  parts.store = store;
  parts.timeout = parts.gloo->getBackendOptions()->timeout;
  auto made = c10::make_intrusive<ProcessGroup>(std::move(parts));
  std::lock_guard const lock(mutex_);
  derived_from_ = c10::weak_intrusive_ptr<c10d::Store>(store);
  derived_ = c10::weak_intrusive_ptr<c10d::Backend>(made);
  return made;
}

ProcessGroup::BackendPtr ProcessGroup::split(StorePtr const& store, std::vector<int> const& ranks,
                                             OptionsPtr const& opts) {
  TORCH_CHECK(!opts || opts->backend != getBackendName(),
              "backend sparsecomm: a split has its group's options; new_group takes others");
  return derive(store, [&] { return parts_.gloo->split(store, ranks, opts); });
}

ProcessGroup::BackendPtr ProcessGroup::merge(StorePtr const& store, OptionsPtr const& opts,
                                             int const& rank, int const& size) {
  return derive(store, [&] { return parts_.gloo->merge(store, opts, rank, size); });
}

void ProcessGroup::close(bool wait) {
  std::optional<Communicator::Handle> last;
  std::shared_ptr<Communicator> communicator;
  {
    std::lock_guard const lock(mutex_);
    closed_ = true;
    communicator = std::exchange(communicator_, nullptr);
    last = last_;
  }
  if (!communicator) return;
  run_off_own_threads(communicator->on_own_thread(), [communicator, wait, last] {
    SignalCheck signals;
    Interrupt* const interrupt = signals.here();
    std::exception_ptr raised;
    try {
      if (wait && last) interrupt ? last->wait(*interrupt) : last->wait();
    } catch (std::exception const&) {
      // What the work threw it has itself.
      if (interrupt != nullptr && interrupt->raised()) raised = std::current_exception();
    }
    communicator->close();
    if (raised) std::rethrow_exception(raised);
  });
}

void OpenCommunicators::add(std::shared_ptr<Communicator> const& communicator) {
  std::lock_guard const lock(mutex_);
  require<Aborted>(!closed_, "the program ends: no process group can be connected any more");
  std::erase_if(communicators_, [](auto const& known) { return known.expired(); });
  communicators_.push_back(communicator);
}

void OpenCommunicators::close() {
  std::vector<std::weak_ptr<Communicator>> communicators;
  {
    std::lock_guard const lock(mutex_);
    closed_ = true;
    communicators.swap(communicators_);
  }
  for (auto const& open : communicators) close_communicator(open.lock());
}

std::shared_ptr<Communicator> ProcessGroup::communicator() {
  std::lock_guard const lock(mutex_);
  return communicator_;
}

Communicator& ProcessGroup::engine() {
  TORCH_CHECK(!closed_, "backend sparsecomm: the process group was shut down or aborted");
  if (!communicator_) {
    std::chrono::milliseconds const timeout = parts_.engine_timeout.value_or(parts_.timeout);
    CommunicatorOptions options{.timeout = timeout, .stall = parts_.connect.stall};
    options.aggregator_addresses = parts_.aggregators;
    options.timeline = parts_.connect.timeline;
    communicator_ = std::make_shared<Communicator>(make_transport(timeout), options);
    parts_.open->add(communicator_);
  }
  return *communicator_;
}

std::unique_ptr<Transport> ProcessGroup::make_transport(std::chrono::milliseconds timeout) {
  engine_options_->timeout = timeout;
  ConnectPlace place{getRank(), getSize(), parts_.store,
                     [gloo = parts_.gloo, options = engine_options_](StorePtr const& store) {
                       std::vector<int> ranks(gloo->getSize());
                       std::iota(ranks.begin(), ranks.end(), 0);
                       return gloo->split(store, ranks, options);
                     },
                     parts_.warn};
  ConnectOptions options = parts_.connect;
  options.timeout = timeout;
  return make_lazy_transport(
      getRank(), getSize(),
      [place = std::move(place), options](std::function<void()> const& check) {
        try {
          return connect(place, options, check);
        } catch (Error const&) {
          throw;
        } catch (std::exception const& error) {
          throw Aborted(concat("the ", place.size,
                               " ranks of the group could not be connected: ", error.what()));
        }
      });
}

void ProcessGroup::shutdown() {
  close(/*wait=*/true);
  InterpreterRelease const release;
  parts_.gloo->shutdown();
  if (BackendPtr const nccl = nccl_if_made()) nccl->shutdown();
}

void ProcessGroup::abort() {
  close(/*wait=*/false);
  InterpreterRelease const release;
  parts_.gloo->abort();
  if (BackendPtr const nccl = nccl_if_made()) nccl->abort();
}

ProcessGroup::WorkPtr ProcessGroup::allreduce(Tensors& tensors,
                                              c10d::AllreduceOptions const& opts) {
  if (!tensors.empty() && tensors.front().layout() == at::kSparse)
    return allreduce_sparse(tensors, opts);
  if (may_aggregate(tensors, opts.reduceOp)) return allreduce_dense(tensors, opts.reduceOp);
  return forward("sparsecomm:all_reduce", device_of(tensors),
                 [&](Backend& group, PackedTensors& packed) {
                   Tensors own = packed.in_place(tensors);
                   return group.allreduce(own, opts);
                 });
}

ProcessGroup::WorkPtr ProcessGroup::allreduce_sparse(Tensors& tensors,
                                                     c10d::AllreduceOptions const& opts) {
  TORCH_CHECK(tensors.size() == 1 && tensors.front().layout() == at::kSparse,
              "backend sparsecomm: allreduce takes one sparse COO tensor at a time");
  std::lock_guard const lock(mutex_);
  return submit(tensors,
                std::make_shared<CooAllreduce>(tensors.front(), opts.reduceOp, engine(), pool_));
}

bool ProcessGroup::may_aggregate(Tensors const& tensors, c10d::ReduceOp::RedOpType op) const {
  if (parts_.aggregators.addresses.empty() || getSize() == 1 || tensors.size() != 1) return false;
  at::Tensor const& tensor = tensors.front();
  // One message may hold all of it.
  constexpr std::int64_t most_bytes = (std::int64_t{1} << 32) - 4096;
  std::int64_t const value_bytes = std::max<std::int64_t>(tensor.itemsize(), sizeof(float));
  return tensor.is_cpu() && tensor.layout() == at::kStrided && can_exchange(tensor.scalar_type()) &&
         tensor.numel() <= most_bytes / value_bytes &&
         (!tensor.is_inference() || c10::InferenceMode::is_enabled()) &&
         (op == c10d::ReduceOp::SUM || (op == c10d::ReduceOp::AVG && tensor.is_floating_point()));
}

ProcessGroup::WorkPtr ProcessGroup::allreduce_dense(Tensors& tensors,
                                                    c10d::ReduceOp::RedOpType op) {
  std::lock_guard const lock(mutex_);
  at::Tensor const& tensor = tensors.front();
  CollectiveRequest request{
      .tensor = tensor, .average = op == c10d::ReduceOp::AVG, .by_numel = true, .note = {}};
  if (at::globalContext().deterministicAlgorithms()) {
    // A choice would follow measured times, which do not repeat.
    request.algorithm = &find_algorithm("ina");
    request.in_rank_order = true;
  }
  auto const operation = pool_->take(tensor.scalar_type(), engine());
  try {
    operation->bind(std::move(request));
  } catch (InvalidArgument const& error) {
    TORCH_CHECK(false, error.what());  // as the inner group says it
  }
  return submit(tensors, operation, [operation, pool = pool_](std::exception_ptr const& failure) {
    operation->release();
    if (!failure) pool->give(operation);
  });
}

ProcessGroup::WorkPtr ProcessGroup::submit(Tensors& tensors, std::shared_ptr<Operation> operation,
                                           std::function<void(std::exception_ptr const&)> ended) {
  auto work = c10::make_intrusive<EngineWork>(getRank(), tensors, ++own_operations_);
  last_ = engine().submit(std::move(operation),
                          [work, ended = std::move(ended)](std::exception_ptr const& failure) {
                            if (ended) ended(failure);
                            work->end(failure);
                          });
  work->started(*last_);
  if (coalescing_) coalesced_.emplace_back(work);
  return work;
}

ProcessGroup::WorkPtr ProcessGroup::broadcast(Tensors& tensors,
                                              c10d::BroadcastOptions const& opts) {
  return forward("sparsecomm:broadcast", device_of(tensors),
                 [&](Backend& group, PackedTensors& packed) {
                   bool const sends = opts.rootRank == getRank();
                   Tensors own = sends ? packed.input(tensors) : packed.output(tensors);
                   return group.broadcast(own, opts);
                 });
}

ProcessGroup::WorkPtr ProcessGroup::allreduce_coalesced(
    Tensors& tensors, c10d::AllreduceCoalescedOptions const& opts) {
  return forward("sparsecomm:all_reduce", device_of(tensors),
                 [&](Backend& group, PackedTensors& packed) {
                   Tensors own = packed.in_place(tensors);
                   return group.allreduce_coalesced(own, opts);
                 });
}

ProcessGroup::WorkPtr ProcessGroup::reduce(Tensors& tensors, c10d::ReduceOptions const& opts) {
  return forward("sparsecomm:reduce", device_of(tensors),
                 [&](Backend& group, PackedTensors& packed) {
                   bool const receives = opts.rootRank == getRank();
                   Tensors own = receives ? packed.in_place(tensors) : packed.input(tensors);
                   return group.reduce(own, opts);
                 });
}

ProcessGroup::WorkPtr ProcessGroup::allgather(TensorLists& outputs, Tensors& inputs,
                                              c10d::AllgatherOptions const& opts) {
  return transfer("sparsecomm:all_gather", device_of(inputs), &Backend::allgather, outputs, inputs,
                  opts);
}

ProcessGroup::WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    c10d::AllgatherOptions const& opts) {
  return transfer("sparsecomm:_all_gather_base", input.device(), &Backend::_allgather_base, output,
                  input, opts);
}

ProcessGroup::WorkPtr ProcessGroup::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                        c10d::AllgatherOptions const& opts) {
  return transfer("sparsecomm:all_gather", device_of(inputs), &Backend::allgather_coalesced,
                  outputs, inputs, opts);
}

ProcessGroup::WorkPtr ProcessGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, c10d::AllgatherOptions const& opts) {
  return transfer("sparsecomm:all_gather", device_of(inputs),
                  &Backend::allgather_into_tensor_coalesced, outputs, inputs, opts);
}

ProcessGroup::WorkPtr ProcessGroup::gather(TensorLists& outputs, Tensors& inputs,
                                           c10d::GatherOptions const& opts) {
  return transfer("sparsecomm:gather", device_of(inputs), &Backend::gather, outputs, inputs, opts);
}

ProcessGroup::WorkPtr ProcessGroup::scatter(Tensors& outputs, TensorLists& inputs,
                                            c10d::ScatterOptions const& opts) {
  return transfer("sparsecomm:scatter", device_of(outputs), &Backend::scatter, outputs, inputs,
                  opts);
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                   c10d::ReduceScatterOptions const& opts) {
  return transfer("sparsecomm:reduce_scatter", device_of(outputs), &Backend::reduce_scatter,
                  outputs, inputs, opts);
}

ProcessGroup::WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         c10d::ReduceScatterOptions const& opts) {
  return transfer("sparsecomm:_reduce_scatter_base", input.device(), &Backend::_reduce_scatter_base,
                  output, input, opts);
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, c10d::ReduceScatterOptions const& opts) {
  return transfer("sparsecomm:reduce_scatter", device_of(inputs),
                  &Backend::reduce_scatter_tensor_coalesced, outputs, inputs, opts);
}

ProcessGroup::WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<std::int64_t>& output_sizes,
                                                  std::vector<std::int64_t>& input_sizes,
                                                  c10d::AllToAllOptions const& opts) {
  return transfer("sparsecomm:all_to_all", input.device(), &Backend::alltoall_base, output, input,
                  output_sizes, input_sizes, opts);
}

ProcessGroup::WorkPtr ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                             c10d::AllToAllOptions const& opts) {
  return transfer("sparsecomm:all_to_all", device_of(inputs), &Backend::alltoall, outputs, inputs,
                  opts);
}

ProcessGroup::WorkPtr ProcessGroup::send(Tensors& tensors, int destination, int tag) {
  return forward(nullptr, device_of(tensors), [&](Backend& group, PackedTensors& packed) {
    Tensors own = packed.input(tensors);
    return group.send(own, destination, tag);
  });
}

ProcessGroup::WorkPtr ProcessGroup::recv(Tensors& tensors, int source, int tag) {
  return forward(nullptr, device_of(tensors), [&](Backend& group, PackedTensors& packed) {
    Tensors own = packed.output(tensors);
    return group.recv(own, source, tag);
  });
}

ProcessGroup::WorkPtr ProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  return forward(nullptr, device_of(tensors), [&](Backend& group, PackedTensors& packed) {
    Tensors own = packed.output(tensors);
    return group.recvAnysource(own, tag);
  });
}

ProcessGroup::WorkPtr ProcessGroup::barrier(c10d::BarrierOptions const& opts) {
  // torch passes the ids of CUDA devices, but not the device whose backend it calls.
  at::Device const device =
      opts.device.value_or(opts.device_ids.empty() ? at::Device(at::kCPU) : at::Device(at::kCUDA));
  return forward("sparsecomm:barrier", device,
                 [&](Backend& group, PackedTensors&) { return group.barrier(opts); });
}

void ProcessGroup::monitoredBarrier(c10d::BarrierOptions const& opts, bool wait_all_ranks) {
  parts_.gloo->monitoredBarrier(opts, wait_all_ranks);
}

}  // namespace sparsecomm
