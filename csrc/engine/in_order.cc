#include <deque>
#include <mutex>
#include <utility>

#include "engine/coordinator.h"

namespace sparsecomm {
namespace {

class InOrder final : public Coordinator {
 public:
  explicit InOrder(Comparison& comparison) : comparison_(comparison) {}

  bool add(Pending pending) override {
    std::lock_guard const lock(mutex_);
    queue_.push_back(std::move(pending));
    return false;
  }

  bool empty() const override {
    std::lock_guard const lock(mutex_);
    return queue_.empty();
  }

  bool listens() const override { return false; }

  Turn round(Channel& channel, Scheduled& next, bool /*callers*/, Operation* first) override {
    if (first != nullptr) next.error = comparison_.run_first(channel, first);
    Pending& head = front();
    bool const cancelled = head.ticket && head.ticket->begin();
    next.whole.begin(head.operation->observer(), Stage::whole);
    if (!next.error) compare(channel, cancelled ? nullptr : head.operation.get(), next);
    next.pending = take();
    return Turn::taken;
  }

  void add_ticket(std::shared_ptr<Ticket> ticket) override { front().ticket = std::move(ticket); }

  Pending take() override {
    std::lock_guard const lock(mutex_);
    Pending first = std::move(queue_.front());
    queue_.pop_front();
    if (first.ticket) first.ticket->begin();
    return first;
  }

 private:
  void compare(Channel& channel, Operation* operation, Scheduled& next) {
    try {
      Prepared const prepared = prepare(operation);
      TimePoint const began = channel.deadline().now();
      next.agreement = comparison_.run(channel, prepared).agreement;
      next.agreement.waited = channel.deadline().now() - began;
    } catch (AgreedError const&) {
      next.error = std::current_exception();
    }
  }

  // Stays where it is, whatever is added.
  Pending& front() {
    std::lock_guard const lock(mutex_);
    return queue_.front();
  }

  Comparison& comparison_;
  mutable std::mutex mutex_;  // guards what follows
  std::deque<Pending> queue_;
};

}  // namespace

std::unique_ptr<Coordinator> make_in_order(Comparison& comparison) {
  return std::make_unique<InOrder>(comparison);
}

}  // namespace sparsecomm
