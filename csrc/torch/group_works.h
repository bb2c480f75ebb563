// The works that the backend returns beside those of its inner groups.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "distributed_error.h"
#include "engine/communicator.h"
#include "signal_check.h"

namespace sparsecomm {

// Of an allreduce on the engine.
class EngineWork final : public c10d::Work {
 public:
  EngineWork(int rank, std::vector<at::Tensor> tensors, std::uint64_t sequence_number)
      : Work(rank, c10d::OpType::ALLREDUCE, "sparsecomm:all_reduce", tensors),
        tensors_(std::move(tensors)),
        sequence_number_(sequence_number) {
    at::Device const device = tensors_.front().device();
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        device.is_cpu() ? std::vector<at::Device>{} : std::vector{device});
    end_.emplace(*future_);
  }

  std::vector<at::Tensor> result() override {
    TORCH_CHECK(isCompleted(), "the work has not completed; call wait() before result()");
    return tensors_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return sequence_number_; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!isCompleted()) {
      handle_.require_waitable();
      if (timeout == kNoTimeout) end_->wait();
    }
    return Work::wait(timeout);
  }

  void started(Communicator::Handle handle) { handle_ = std::move(handle); }
  void end(std::exception_ptr const& failure) {
    std::exception_ptr const error = failure ? as_distributed_error(failure) : nullptr;
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(tensors_);
    }
    finish(error);
  }

 private:
  std::vector<at::Tensor> tensors_;
  std::uint64_t sequence_number_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::optional<FutureEnd> end_;
  Communicator::Handle handle_;
};

// Several works as one.
class JointWork final : public c10d::Work {
 public:
  explicit JointWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : works_(std::move(works)) {}

  bool isCompleted() override {
    return std::ranges::all_of(works_, [](auto const& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::ranges::all_of(works_, [](auto const& work) { return work->isSuccess(); });
  }
  void synchronize() override {
    for (auto const& work : works_) work->synchronize();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    bool done = true;
    for (auto const& work : works_) done = work->wait(timeout) && done;
    return done;
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace sparsecomm
