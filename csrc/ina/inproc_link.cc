#include "ina/inproc_link.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace sparsecomm {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t most_workers = 1024;
constexpr int ticks_per_limit = 16;

Bytes gather(InaMessage const& message) {
  Bytes bytes;
  bytes.reserve(message.size());
  for (auto const piece : message.pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

}  // namespace

// All of it is guarded by one mutex, so that a message is handled by the thread that sends it.
struct InprocAggregators::Hub {
  struct Delivery {
    AggregatorLink::Event::Kind kind;
    int aggregator;
    std::uint32_t instance;
    Bytes bytes;
  };
  // A worker; its number is that of its connection to each aggregator.
  struct Worker {
    explicit Worker(Runtime runtime) : changed(runtime, "an aggregator") {}

    std::deque<Delivery> inbox;
    Condition changed;
    std::vector<std::string> losses;  // [aggregator]; empty: connected
    int rank = 0;
    bool interrupted = false;
  };
  struct Aggregator final : InaHost::Outlet {
    Aggregator(Hub& its_hub, int its_number, std::size_t memory, Duration limit,
               InaPolicy const& policy)
        : hub(its_hub),
          number(its_number),
          host({.memory = memory, .round = limit, .workers = most_workers}, *this, policy) {}

    void send(int connection, std::uint32_t instance, InaMessage const& message,
              std::shared_ptr<void const> /*memory*/) override {
      hub.deliver(number, connection, instance, gather(message));
    }
    void send_copy(int connection, std::uint32_t instance,
                   std::span<const std::byte> message) override {
      hub.deliver(number, connection, instance, Bytes(message.begin(), message.end()));
    }
    void drop(int connection, InaHost::DropCause /*cause*/, std::string const& why) override {
      hub.lose(number, connection, why);
    }

    Hub& hub;
    int number;
    InaHost host;
    bool stopped = false;
  };

  Hub(int count, std::size_t memory, Duration limit, InaPolicy const& policy, Runtime its_runtime)
      : runtime(its_runtime),
        tick(limit / ticks_per_limit),
        make([this, memory, limit, &policy](int number) {
          return std::make_unique<Aggregator>(*this, number, memory, limit, policy);
        }) {
    for (int i = 0; i < count; ++i) aggregators.push_back(make(i));
  }

  void deliver(int aggregator, int worker, std::uint32_t instance, Bytes bytes) {
    Worker& to = *workers[static_cast<std::size_t>(worker)];
    if (tamper) tamper(aggregator, to.rank, false, bytes);
    to.inbox.push_back(
        {AggregatorLink::Event::Kind::message, aggregator, instance, std::move(bytes)});
    to.changed.notify_all();
  }

  void kill(int number) {
    aggregators.at(static_cast<std::size_t>(number))->stopped = true;
    for (std::size_t worker = 0; worker < workers.size(); ++worker) {
      lose(number, static_cast<int>(worker), "the aggregator was killed");
    }
  }

  // Tells the worker; the host has let it go.
  void lose(int aggregator, int worker, std::string const& why) {
    Worker& to = *workers[static_cast<std::size_t>(worker)];
    std::string& loss = to.losses[static_cast<std::size_t>(aggregator)];
    if (!loss.empty()) return;
    loss = why;
    std::erase_if(to.inbox, [&](auto const& other) { return other.aggregator == aggregator; });
    to.inbox.push_back({AggregatorLink::Event::Kind::lost, aggregator, 0, {}});
    to.changed.notify_all();
  }

  void send(int number, int worker, std::uint32_t instance, InaMessage const& message) {
    Aggregator& aggregator = *aggregators[static_cast<std::size_t>(number)];
    Worker const& from = *workers[static_cast<std::size_t>(worker)];
    if (!from.losses[static_cast<std::size_t>(number)].empty() || aggregator.stopped) return;
    Bytes bytes = gather(message);
    if (tamper) tamper(number, from.rank, true, bytes);
    TimePoint const now = runtime.clock().now();
    try {
      auto const begin = std::span(bytes).first(std::min(bytes.size(), opening_bytes));
      auto const place = aggregator.host.place(worker, instance, bytes.size(), begin, now);
      if (place.bytes.empty()) return;
      std::ranges::copy(bytes, place.bytes.begin());
      aggregator.host.receive(worker, instance, place.bytes, now);
    } catch (MalformedFrame const& error) {
      aggregator.host.leave(worker, error.what());
      lose(number, worker, error.what());
    }
  }

  void expire(TimePoint now) {
    for (auto const& aggregator : aggregators) {
      if (!aggregator->stopped) aggregator->host.expire(now);
    }
  }

  Runtime const runtime;
  Duration const tick;  // between two looks at the aggregators' deadlines
  std::function<std::unique_ptr<Aggregator>(int number)> const make;
  std::mutex mutex;
  std::vector<std::unique_ptr<Aggregator>> aggregators;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::string> names;
  Tamper tamper;
};

namespace {

class InprocLink final : public AggregatorLink {
 public:
  InprocLink(std::shared_ptr<InprocAggregators::Hub> hub, int number)
      : hub_(std::move(hub)),
        number_(number),
        worker_(*hub_->workers[static_cast<std::size_t>(number)]) {}
  ~InprocLink() override {
    std::lock_guard const lock(hub_->mutex);
    for (int i = 0; i < size(); ++i) leave(i, "it was closed");
  }

  int size() const override { return static_cast<int>(hub_->names.size()); }
  std::string const& address(int aggregator) const override {
    return hub_->names[index(aggregator)];
  }
  std::string const& loss(int aggregator) const override {
    return worker_.losses[index(aggregator)];
  }

  void send(int aggregator, std::uint32_t instance, InaMessage const& message) override {
    std::lock_guard const lock(hub_->mutex);
    index(aggregator);
    hub_->send(aggregator, number_, instance, message);
  }

  bool flushed(int /*aggregator*/) const override { return true; }
  bool flush(int /*aggregator*/, Deadline const& /*deadline*/) override { return true; }

  Event next(Deadline const& deadline) override {
    std::unique_lock lock(hub_->mutex);
    for (;;) {
      if (worker_.interrupted) {
        throw Interrupted("the wait for an aggregator was interrupted", {});
      }
      if (!worker_.inbox.empty()) {
        last_ = std::move(worker_.inbox.front());
        worker_.inbox.pop_front();
        return {last_.kind, last_.aggregator, last_.instance, last_.bytes};
      }
      TimePoint const now = hub_->runtime.clock().now();
      deadline.poll_interrupt(now);
      if (deadline.passed()) return {Event::Kind::late, 0, 0, {}};
      hub_->expire(now);
      Duration slice = std::min(deadline.remaining(), hub_->tick);
      if (deadline.interruptible()) slice = std::min(slice, Interrupt::period);
      worker_.changed.wait_for(lock, slice,
                               [&] { return worker_.interrupted || !worker_.inbox.empty(); });
    }
  }

  void close(int aggregator, std::string const& why) override {
    std::lock_guard const lock(hub_->mutex);
    leave(aggregator, why);
  }

  void reconnect(int aggregator, JobMember const& member, Deadline const& /*deadline*/) override {
    std::lock_guard const lock(hub_->mutex);
    auto& again = *hub_->aggregators[index(aggregator)];
    require<Error>(!again.stopped, "aggregator ", address(aggregator), " does not answer");
    again.host.join(number_, member, hub_->runtime.clock().now());
    worker_.losses[index(aggregator)].clear();
  }

  void interrupt() noexcept override {
    std::lock_guard const lock(hub_->mutex);
    worker_.interrupted = true;
    worker_.changed.notify_all();
  }

 private:
  std::size_t index(int aggregator) const {
    require(aggregator >= 0 && aggregator < size(), "aggregator is ", aggregator,
            ", must be less than ", size());
    return static_cast<std::size_t>(aggregator);
  }
  void leave(int aggregator, std::string const& why) {
    std::string& loss = worker_.losses[index(aggregator)];
    if (!loss.empty()) return;
    loss = why;
    std::erase_if(worker_.inbox, [&](auto const& other) { return other.aggregator == aggregator; });
    auto& left = *hub_->aggregators[index(aggregator)];
    if (!left.stopped) left.host.leave(number_, why);
  }

  std::shared_ptr<InprocAggregators::Hub> const hub_;
  int const number_;
  InprocAggregators::Hub::Worker& worker_;
  InprocAggregators::Hub::Delivery last_{};
};

}  // namespace

InprocAggregators::InprocAggregators(int count, std::size_t memory, Duration limit,
                                     InaPolicy const& policy, Runtime runtime)
    : hub_(std::make_shared<Hub>(count, memory, limit, policy, runtime)) {
  for (int i = 0; i < count; ++i) hub_->names.push_back(concat("inproc:", i));
}

InprocAggregators::~InprocAggregators() = default;

std::shared_ptr<AggregatorLink> InprocAggregators::connect(JobMember const& member) {
  std::lock_guard const lock(hub_->mutex);
  int const number = static_cast<int>(hub_->workers.size());
  auto worker = std::make_unique<Hub::Worker>(hub_->runtime);
  worker->losses.resize(hub_->aggregators.size());
  worker->rank = member.worker;
  hub_->workers.push_back(std::move(worker));
  TimePoint const now = hub_->runtime.clock().now();
  for (auto const& aggregator : hub_->aggregators) aggregator->host.join(number, member, now);
  return std::make_shared<InprocLink>(hub_, number);
}

void InprocAggregators::kill(int aggregator) {
  std::lock_guard const lock(hub_->mutex);
  hub_->kill(aggregator);
}

void InprocAggregators::restart(int aggregator) {
  std::lock_guard const lock(hub_->mutex);
  hub_->kill(aggregator);
  hub_->aggregators.at(static_cast<std::size_t>(aggregator)) = hub_->make(aggregator);
}

void InprocAggregators::stop(int aggregator) {
  std::lock_guard const lock(hub_->mutex);
  hub_->aggregators.at(static_cast<std::size_t>(aggregator))->stopped = true;
}

void InprocAggregators::tamper(Tamper with) {
  std::lock_guard const lock(hub_->mutex);
  hub_->tamper = std::move(with);
}

}  // namespace sparsecomm
