#include "collectives.h"

#include "distributed_error.h"
#include "grouped_collective.h"

namespace sparsecomm {
namespace {

c10::TypePtr result_type(bool is_list) {
  if (is_list) return c10::ListType::create(c10::TensorType::get());
  return c10::TensorType::get();
}

}  // namespace

CollectiveWork::CollectiveWork(bool is_list)
    : is_list_(is_list),
      future_(c10::make_intrusive<c10::ivalue::Future>(result_type(is_list))),
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
  } else if (is_list_) {
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

Collectives::Task Collectives::make(Communicator& communicator, CollectiveRequest request) const {
  auto operation = idle_->take(request.tensor.scalar_type(), communicator);
  operation->bind(std::move(request));
  return {operation, [operation, idle = idle_](bool good) {
            auto results = operation->release();
            if (good) idle->give(operation);
            return results;
          }};
}

Collectives::Task Collectives::make(Communicator& communicator,
                                    std::vector<CollectiveRequest> requests) const {
  auto operation = std::make_shared<GroupedCollective>(std::move(requests), communicator, idle_);
  return {operation, [operation](bool good) { return operation->release(good); }};
}

std::vector<at::Tensor> Collectives::run_task(Communicator& communicator, Task const& task,
                                              std::string name, int priority) {
  SignalCheck signals;
  try {
    communicator.run(task.operation, signals.here(), std::move(name), priority);
    return task.release(true);
  } catch (...) {
    task.release(false);
    std::rethrow_exception(as_distributed_error(std::current_exception()));
  }
}

c10::intrusive_ptr<CollectiveWork> Collectives::start_task(Communicator& communicator,
                                                           Task const& task, bool is_list,
                                                           std::string name, int priority) {
  auto work = c10::make_intrusive<CollectiveWork>(is_list);
  auto const end = [work, release = task.release](std::exception_ptr const& failure) {
    work->end(failure, release(failure == nullptr));
  };
  try {
    work->handle_ = communicator.submit(task.operation, end, std::move(name), priority);
  } catch (...) {
    task.release(false);
    throw;
  }
  return work;
}

}  // namespace sparsecomm
