#include "collectives.h"

#include "distributed_error.h"

namespace sparsecomm {
namespace {

c10::TypePtr result_type(CollectiveKind kind) {
  if (kind == CollectiveKind::allgather) return c10::ListType::create(c10::TensorType::get());
  return c10::TensorType::get();
}

}  // namespace

CollectiveWork::CollectiveWork(CollectiveKind kind)
    : kind_(kind),
      future_(c10::make_intrusive<c10::ivalue::Future>(result_type(kind))),
      end_(*future_) {}

c10::IValue CollectiveWork::wait_for_result() {
  if (!future_->completed()) {
    handle_.require_waitable();
    end_.wait();
  }
  future_->waitAndThrow();
  return future_->value();
}

void CollectiveWork::end(std::exception_ptr const& failure, std::vector<at::Tensor> results) {
  if (failure) {
    future_->setError(as_distributed_error(failure));
  } else if (kind_ == CollectiveKind::allgather) {
    future_->markCompleted(std::move(results));
  } else {
    future_->markCompleted(std::move(results.front()));
  }
}

std::shared_ptr<Communicator> Collectives::communicator() const {
  auto communicator = communicator_.lock();
  require(communicator != nullptr && !communicator->closed(),
          "this communicator is closed; make a new one");
  return communicator;
}

std::shared_ptr<TensorCollective> Collectives::bind(Communicator& communicator,
                                                    CollectiveRequest request) const {
  auto operation = idle_->take(request.tensor.scalar_type(), communicator);
  operation->bind(std::move(request));
  return operation;
}

std::vector<at::Tensor> Collectives::run(CollectiveRequest request) {
  auto const communicator = this->communicator();
  auto operation = bind(*communicator, std::move(request));
  std::vector<at::Tensor> results;
  SignalCheck signals;
  try {
    communicator->run(operation, signals.here());
    results = operation->release();
  } catch (...) {
    operation->release();
    std::rethrow_exception(as_distributed_error(std::current_exception()));
  }
  idle_->give(std::move(operation));
  return results;
}

c10::intrusive_ptr<CollectiveWork> Collectives::start(CollectiveRequest request) {
  auto const communicator = this->communicator();
  auto work = c10::make_intrusive<CollectiveWork>(request.kind);
  auto operation = bind(*communicator, std::move(request));
  auto const end = [work, operation, idle = idle_](std::exception_ptr const& failure) {
    auto results = operation->release();
    if (!failure) idle->give(operation);
    work->end(failure, std::move(results));
  };
  work->handle_ = communicator->submit(operation, end);
  return work;
}

}  // namespace sparsecomm
