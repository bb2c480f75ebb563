// A link to aggregators that misbehaves at one chosen message.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ina_run.h"
#include "transport/fault.h"
#include "wrapped_link.h"

namespace sparsecomm::test {

struct LinkFault {
  enum class Kind : std::uint8_t {
    none,
    lost,       // the connection to the aggregator ends
    restart,    // so do all, and there is a new one in its place; of every rank
    silent,     // nothing comes or goes from then on
    corrupt,    // a bit of the message is flipped
    truncate,   // the second half is missing
    duplicate,  // it comes twice
    former,     // one of the operation before comes instead
    die,        // this rank is gone
    stall,      // this rank sleeps
  };
  static constexpr int every_rank = -1;

  Kind kind = Kind::none;
  int aggregator = 0;
  int rank = every_rank;  // whose link
  int operation = 1;      // counted from 0
  int message = 0;        // of those from and to the aggregator in that operation, on this rank
  int byte = 0;           // to corrupt; negative: from the end. The last, if there is none such.
};

inline std::string_view name(LinkFault::Kind kind) {
  constexpr std::string_view names[] = {"none",     "lost",      "restart", "silent", "corrupt",
                                        "truncate", "duplicate", "former",  "die",    "stall"};
  return names[std::size_t(kind)];
}

// What the links of all ranks know of the fault.
struct FaultScene {
  LinkFault fault;
  // Of the aggregator itself, where the fault is on every rank: then it dies or stops.
  std::function<void(int)> kill, restart, stop;
  std::function<void()> stall;
  std::atomic<int> met = 0;
};

class FaultyLink final : public WrappedLink {
 public:
  FaultyLink(std::shared_ptr<AggregatorLink> inner, FaultScene& scene, int rank)
      : WrappedLink(std::move(inner)), scene_(scene), rank_(rank) {}

  // Before each operation, while none runs.
  void begin() {
    ++operation_;
    seen_ = 0;
    former_sent_ = std::exchange(sent_, {});
    former_come_ = std::exchange(come_, {});
    messages_.assign(std::size_t(size()), 0);
  }
  // Of this operation, from and to that aggregator.
  int messages(int aggregator) const { return messages_[std::size_t(aggregator)]; }

  void send(int aggregator, std::uint32_t instance, InaMessage const& message) override {
    ++messages_[std::size_t(aggregator)];
    Bytes bytes = assemble(message);
    if (aggregator == scene_.fault.aggregator) sent_.push_back(bytes);
    bool const wrong = is_at_fault(aggregator);
    if (wrong && break_down()) return;
    if (silent_ && aggregator == scene_.fault.aggregator) return;
    if (wrong) change(bytes, sent_.size(), former_sent_);
    InaMessage changed;
    changed.add(bytes);
    inner().send(aggregator, instance, changed);
    if (wrong && scene_.fault.kind == LinkFault::Kind::duplicate) {
      inner().send(aggregator, instance, changed);
    }
  }

  Event next(Deadline const& deadline) override {
    for (;;) {
      if (std::exchange(to_tell_, false))
        return {Event::Kind::lost, scene_.fault.aggregator, 0, {}};
      if (twice_) return *std::exchange(twice_, std::nullopt);
      Event event = inner().next(deadline);
      if (event.kind != Event::Kind::message || take(event)) return event;
    }
  }

  void close(int aggregator, std::string const& why) override {
    if (aggregator == scene_.fault.aggregator) {
      twice_.reset();
      to_tell_ = false;
    }
    inner().close(aggregator, why);
  }

 private:
  using Kind = LinkFault::Kind;

  bool on_every_rank() const { return scene_.fault.rank == LinkFault::every_rank; }

  bool is_at_fault(int aggregator) {
    LinkFault const& fault = scene_.fault;
    if (fault.kind == Kind::none || aggregator != fault.aggregator) return false;
    if (operation_ != fault.operation || (!on_every_rank() && fault.rank != rank_)) return false;
    if (seen_++ != fault.message) return false;
    ++scene_.met;
    return true;
  }

  // Whether the message is not to arrive.
  bool break_down() {
    int const aggregator = scene_.fault.aggregator;
    switch (scene_.fault.kind) {
      case Kind::lost:
        if (on_every_rank()) {
          scene_.kill(aggregator);
        } else {
          close(aggregator, "the connection was cut");
          to_tell_ = true;
        }
        return true;
      case Kind::restart:
        scene_.restart(aggregator);
        return true;
      case Kind::silent:
        if (on_every_rank()) scene_.stop(aggregator);
        silent_ = true;
        return true;
      case Kind::die:
        for (int i = 0; i < size(); ++i) close(i, "the rank is gone");
        throw Died("the rank died at a message of an aggregator");
      case Kind::stall:
        scene_.stall();
        return false;
      default:
        return false;
    }
  }

  // `count`: of messages this way in this operation, this one included.
  void change(Bytes& bytes, std::size_t count, std::vector<Bytes> const& former) const {
    LinkFault const& fault = scene_.fault;
    int const last = static_cast<int>(bytes.size()) - 1;
    switch (fault.kind) {
      case Kind::corrupt: {
        int const byte = fault.byte < 0 ? last + 1 + fault.byte : fault.byte;
        bytes[std::size_t(std::clamp(byte, 0, last))] ^= std::byte(1 << fault.message % 8);
        break;
      }
      case Kind::truncate:
        bytes.resize(bytes.size() / 2);
        break;
      case Kind::former:
        bytes = former.at(std::min(count, former.size()) - 1);
        break;
      default:
        break;
    }
  }

  // Whether the event is to be told.
  bool take(Event& event) {
    int const aggregator = event.aggregator;
    ++messages_[std::size_t(aggregator)];
    if (aggregator != scene_.fault.aggregator) return true;
    if (silent_) return false;
    Bytes bytes(event.bytes.begin(), event.bytes.end());
    come_.push_back(bytes);
    bool const wrong = is_at_fault(aggregator);
    if (wrong && break_down()) return false;
    if (!wrong) return true;
    change(bytes, come_.size(), former_come_);
    kept_ = std::move(bytes);
    event.bytes = kept_;
    if (scene_.fault.kind == Kind::duplicate) twice_ = event;
    return true;
  }

  FaultScene& scene_;
  int const rank_;
  int operation_ = -1;
  int seen_ = 0;
  std::vector<int> messages_;                                   // [aggregator]
  std::vector<Bytes> sent_, come_, former_sent_, former_come_;  // by and from the one at fault
  bool silent_ = false, to_tell_ = false;
  Bytes kept_;
  std::optional<Event> twice_;
};

}  // namespace sparsecomm::test
