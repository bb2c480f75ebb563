#include "collectives.h"

#include "distributed_error.h"
#include "engine/join.h"
#include "engine/mismatch.h"
#include "grouped_collective.h"

namespace sparsecomm {
namespace {

c10::TypePtr result_type(bool is_list) {
  if (is_list) return c10::ListType::create(c10::TensorType::get());
  return c10::TensorType::get();
}

// Stands in for tensors.
class CollectiveJoin final : public Join {
 public:
  // `communicator`: outlives the operation.
  CollectiveJoin(Communicator& communicator, std::shared_ptr<CollectivePool> idle)
      : communicator_(communicator), idle_(std::move(idle)) {}

  Pending stand_in(std::string_view description) override {
    std::vector<CollectiveRequest> requests;
    bool const is_group = field_of(description, "operation") == GroupedCollective::name;
    if (is_group) description.remove_prefix(first_line(description).size());
    while (!description.empty()) {
      if (is_group) description.remove_prefix(1);
      std::string_view const line = first_line(description);
      requests.push_back(CollectiveRequest::neutral_for(line));
      description.remove_prefix(line.size());
    }
    auto task = is_group ? CollectiveTask::make(communicator_, idle_, std::move(requests))
                         : CollectiveTask::make(communicator_, idle_, std::move(requests.front()));
    return {.operation = std::move(task.operation),
            .completion = [release = std::move(task.release)](std::exception_ptr const& failure) {
              release(failure == nullptr);
            }};
  }

 private:
  static std::string_view first_line(std::string_view text) {
    return text.substr(0, text.find('\n'));
  }

  Communicator& communicator_;
  std::shared_ptr<CollectivePool> idle_;
};

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

CollectiveTask CollectiveTask::make(Communicator& communicator,
                                    std::shared_ptr<CollectivePool> idle,
                                    CollectiveRequest request) {
  auto operation = idle->take(request.tensor.scalar_type(), communicator);
  operation->bind(std::move(request));
  return {operation, [operation, idle = std::move(idle)](bool good) {
            auto results = operation->release();
            if (good) idle->give(operation);
            return results;
          }};
}

CollectiveTask CollectiveTask::make(Communicator& communicator,
                                    std::shared_ptr<CollectivePool> idle,
                                    std::vector<CollectiveRequest> requests) {
  auto operation =
      std::make_shared<GroupedCollective>(std::move(requests), communicator, std::move(idle));
  return {operation, [operation](bool good) { return operation->release(good); }};
}

int Collectives::join() {
  auto const alive = communicator();
  auto const operation = std::make_shared<CollectiveJoin>(*alive, idle_);
  run_task(*alive, {operation, [](bool) { return std::vector<at::Tensor>(); }}, {}, 0);
  return operation->last();
}

std::vector<at::Tensor> Collectives::run_task(Communicator& communicator,
                                              CollectiveTask const& task, std::string name,
                                              int priority) {
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
                                                           CollectiveTask const& task, bool is_list,
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
