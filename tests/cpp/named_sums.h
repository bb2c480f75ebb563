// Operations whose results tell whether all ranks took part in the same one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/figures.h"
#include "engine/join.h"
#include "engine/operation.h"
#include "engine/payload.h"
#include "engine/step_record.h"

namespace sparsecomm::test {

// What ran on a rank, in this order.
class Log {
 public:
  void add(std::string const& name) {
    std::lock_guard const lock(mutex_);
    names_.push_back(name);
  }
  std::vector<std::string> names() const {
    std::lock_guard const lock(mutex_);
    return names_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> names_;
};

// Moves nothing.
class Quiet final : public Operation {
 public:
  explicit Quiet(std::string text) : text_("operation=" + std::move(text)) {}
  Proposal prepare() override { return {.text = text_}; }
  void run(Channel& /*channel*/, Agreement const& /*agreement*/) override {}

 private:
  std::string text_;
};

// Holds up what is submitted after it until it is opened, so that it all comes to one round. Then
// counts what this rank has sent before.
class Gate final : public Operation {
 public:
  Proposal prepare() override { return {.text = "operation=gate"}; }
  void run(Channel& channel, Agreement const& /*agreement*/) override {
    running_.set_value();
    opened_.get_future().wait();
    before = Traffic::of(channel.transport().counters());
  }
  void await() { running_.get_future().wait(); }
  void open() { opened_.set_value(); }

  Traffic before;

 private:
  std::promise<void> running_, opened_;
};

// Sums one number over the ranks: by its payload, or by messages of its own.
class Sum final : public Operation {
 public:
  Sum(std::string text, std::uint64_t number, bool by_payload, Log* log = nullptr,
      bool commits = true)
      : text_("operation=" + std::move(text)),
        number_(number),
        by_payload_(by_payload),
        commits_(commits),
        log_(log) {}

  Proposal prepare() override {
    return {.text = text_,
            .key = Digest().add(std::string_view(text_)).add(by_payload_).add(commits_).value(),
            .payload = by_payload_ ? payload_of(number_) : std::span<const std::byte>{}};
  }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    if (!by_payload_) return Operation::merge(into, other);
    auto const both = read_payload<std::uint64_t>(into) + read_payload<std::uint64_t>(other);
    std::ranges::copy(payload_of(both), into.begin());
    return true;
  }
  void run(Channel& channel, Agreement const& agreement) override {
    if (log_ != nullptr) log_->add(text_);
    sum = number_;
    if (by_payload_) {
      sum = read_payload<std::uint64_t>(agreement.payload);
    } else {
      census_.run(channel, Phase::reduce, std::span(&sum, 1), std::plus(),
                  [](std::span<const std::uint64_t>, int) {});
    }
    if (commits_) agreement.commit(channel);
  }
  Batch const* batch() const override { return commits_ ? &batch_of_one : nullptr; }
  std::string description(Proposal const& /*proposal*/) const override {
    return concat(by_payload_ ? 'p' : 'm', commits_ ? 'c' : 'o', text_);
  }

  std::uint64_t sum = 0;

 private:
  std::string text_;
  std::uint64_t number_;
  bool by_payload_, commits_;
  Log* log_;
  CensusAllreduce<std::uint64_t> census_;
};

// Stands in for sums.
class SumJoin final : public Join {
 public:
  explicit SumJoin(Log* log = nullptr) : log_(log) {}
  Pending stand_in(std::string_view description) override {
    ++made;
    require(description.size() > 2, "no sum is '", description, "'");
    auto const by = description[0], commits = description[1];
    require((by == 'p' || by == 'm') && (commits == 'c' || commits == 'o'), "no sum is '",
            description, "'");
    return {.operation =
                std::make_shared<Sum>(std::string(description.substr(sizeof "operation=" + 1)), 0,
                                      by == 'p', log_, commits == 'c')};
  }

  int made = 0;

 private:
  Log* log_;
};

}  // namespace sparsecomm::test
