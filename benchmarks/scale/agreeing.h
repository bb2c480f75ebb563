// How simulated ranks agree on what they run, without a communicator's thread.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/comparison.h"
#include "engine/coordinator.h"

namespace sparsecomm {

// A group's exchange as the others see it, which moves nothing.
class Group final : public Operation {
 public:
  explicit Group(int number) : text_(concat("operation=exchange;group=", number)) {}
  Proposal prepare() override { return {.text = text_, .key = key_, .version = 0}; }
  void run(Channel& /*channel*/, Agreement const& /*agreement*/) override {}

 private:
  std::string text_;
  std::uint64_t key_ = Digest().add(std::string_view(text_)).value();
};

class Agreeing {
 public:
  Agreeing(int ranks, int groups) : comparison_(ranks, nullptr) {
    for (int group = 0; group < groups; ++group) groups_.push_back(std::make_shared<Group>(group));
  }

  // All groups at once, by their names.
  void by_name(Channel& channel) {
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      coordinator_->add({.operation = groups_[i], .name = concat("gradients ", i)});
    }
    while (!coordinator_->empty()) {
      Scheduled next;
      coordinator_->round(channel, next, false, nullptr);
      if (next.error) std::rethrow_exception(next.error);
    }
  }
  // One group after the other, which all ranks compare.
  void by_comparison(Channel& channel) {
    for (auto const& group : groups_) comparison_.run(channel, prepare(group.get()));
  }

 private:
  std::vector<std::shared_ptr<Operation>> groups_;
  Comparison comparison_;
  Timeline timeline_{{}, 0, steady_clock()};
  std::unique_ptr<Coordinator> coordinator_ =
      make_coordinator(comparison_, {.capacity = 1024,
                                     .timeout = std::chrono::hours(24),
                                     .fusion_bytes = 0,
                                     .timeline = timeline_});
};

}  // namespace sparsecomm
