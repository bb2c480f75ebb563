// A link to aggregators that passes everything on: the base of those that do something beside it.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "ina/link.h"

namespace sparsecomm::test {

class WrappedLink : public AggregatorLink {
 public:
  explicit WrappedLink(std::shared_ptr<AggregatorLink> inner) : inner_(std::move(inner)) {}

  int size() const override { return inner_->size(); }
  std::string const& address(int aggregator) const override { return inner_->address(aggregator); }
  std::string const& loss(int aggregator) const override { return inner_->loss(aggregator); }
  void send(int aggregator, std::uint32_t instance, InaMessage const& message) override {
    inner_->send(aggregator, instance, message);
  }
  bool flushed(int aggregator) const override { return inner_->flushed(aggregator); }
  bool flush(int aggregator, Deadline const& deadline) override {
    return inner_->flush(aggregator, deadline);
  }
  Event next(Deadline const& deadline) override { return inner_->next(deadline); }
  void close(int aggregator, std::string const& why) override { inner_->close(aggregator, why); }
  void reconnect(int aggregator, JobMember const& member, Deadline const& deadline) override {
    inner_->reconnect(aggregator, member, deadline);
  }
  void interrupt() noexcept override { inner_->interrupt(); }

 protected:
  AggregatorLink& inner() const { return *inner_; }

 private:
  std::shared_ptr<AggregatorLink> inner_;
};

}  // namespace sparsecomm::test
