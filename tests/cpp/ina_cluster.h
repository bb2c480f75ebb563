// Workers that are threads, and aggregators that they reach over a kind of link.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "daemon/server.h"
#include "ina/client.h"
#include "ina/inproc_link.h"
#include "ina/tcp_link.h"
#include "ina_run.h"
#include "ucx_ranks.h"

namespace sparsecomm::test {

inline constexpr JobId some_job{0x1234, 0x5678};

// A server and the thread that serves.
class RunningServer {
 public:
  explicit RunningServer(AggregatorOptions options = {}) {
    if (options.listen.empty()) options.listen = "127.0.0.1:0";
    server_ = std::make_unique<AggregatorServer>(options, [this](LogEntry const& entry) {
      std::lock_guard const lock(mutex_);
      log_ += entry.text + "\n";
    });
    thread_ = std::thread([this] {
      server_->run();
      ended_.set_value();
    });
  }
  ~RunningServer() { stop(); }
  void stop() {
    if (!thread_.joinable()) return;
    server_->stop();
    thread_.join();
    server_.reset();
  }
  std::string address() const { return server_->address(); }
  AggregatorServer& server() { return *server_; }
  // In the thread that serves.
  template <class Task>
  auto call(Task task) {
    return server_->ask(task).get();
  }
  bool ends_within(Duration time) { return has_ended_.wait_for(time) == std::future_status::ready; }
  std::string log() const {
    std::lock_guard const lock(mutex_);
    return log_;
  }

 private:
  mutable std::mutex mutex_;
  std::string log_;
  std::unique_ptr<AggregatorServer> server_;
  std::promise<void> ended_;
  std::future<void> has_ended_ = ended_.get_future();
  std::thread thread_;
};

inline Deadline within(Duration time) { return {steady_clock(), time}; }

// The aggregators of one test.
class Aggregators {
 public:
  virtual ~Aggregators() = default;
  virtual std::shared_ptr<AggregatorLink> connect(JobMember const& member) = 0;
  virtual void kill(int aggregator) = 0;
};

class InprocCluster final : public Aggregators {
 public:
  InprocCluster(int count, std::size_t memory, Duration limit) : hub_(count, memory, limit) {}
  std::shared_ptr<AggregatorLink> connect(JobMember const& member) override {
    return hub_.connect(member);
  }
  void kill(int aggregator) override { hub_.kill(aggregator); }
  InprocAggregators& hub() { return hub_; }

 private:
  InprocAggregators hub_;
};

inline MessageOptions messages_over(MessageTransport transport) {
  return {.transport = transport, .ucx = ucx_options_here()};
}

class ServerCluster final : public Aggregators {
 public:
  ServerCluster(int count, std::size_t memory, Duration limit, MessageTransport transport)
      : messages_(messages_over(transport)) {
    for (int i = 0; i < count; ++i) {
      AggregatorOptions options;
      options.memory = memory;
      options.limit = limit;
      options.messages = messages_;
      servers_.push_back(std::make_unique<RunningServer>(options));
      addresses_.push_back(servers_.back()->address());
    }
  }
  std::shared_ptr<AggregatorLink> connect(JobMember const& member) override {
    return connect_aggregators(addresses_, member, within(std::chrono::seconds(10)), messages_);
  }
  void kill(int aggregator) override { servers_[std::size_t(aggregator)]->stop(); }

 private:
  MessageOptions messages_;
  std::vector<std::unique_ptr<RunningServer>> servers_;
  std::vector<std::string> addresses_;
};

// Why UCX cannot be used here; empty where it can.
inline std::string ucx_problem_here() {
  std::string problem = ucx_problem(ucx_options_here());
  if (problem.empty()) load_ucx_modules();
  return problem;
}

struct ClusterKind {
  std::string_view name;
  std::string (*problem)();  // why there can be none here
  std::unique_ptr<Aggregators> (*make)(int count, std::size_t memory, Duration limit);
};
inline constexpr ClusterKind cluster_kinds[] = {
    {"inproc", [] { return std::string(); },
     [](int count, std::size_t memory, Duration limit) -> std::unique_ptr<Aggregators> {
       return std::make_unique<InprocCluster>(count, memory, limit);
     }},
    {"tcp", [] { return std::string(); },
     [](int count, std::size_t memory, Duration limit) -> std::unique_ptr<Aggregators> {
       return std::make_unique<ServerCluster>(count, memory, limit, MessageTransport::tcp);
     }},
    {"ucx", ucx_problem_here,
     [](int count, std::size_t memory, Duration limit) -> std::unique_ptr<Aggregators> {
       return std::make_unique<ServerCluster>(count, memory, limit, MessageTransport::ucx);
     }},
};

// Calls f(rank) in a thread for each; an exception that leaves it fails the test.
inline void for_each_rank(int workers, std::function<void(int rank)> const& f) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < workers; ++rank) {
    threads.emplace_back([&f, rank] {
      try {
        f(rank);
      } catch (std::exception const& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// Each block is zero with probability `zero`; other elements are small integers, so that every sum
// is exact.
template <class T>
Bytes random_blocks(InaPlan const& plan, double zero, std::mt19937_64& random) {
  std::vector<T> values(plan.elements);
  std::size_t const each = plan.block_bytes / sizeof(T);
  for (std::size_t begin = 0; begin < values.size(); begin += each) {
    if (std::uniform_real_distribution<>()(random) < zero) continue;
    for (std::size_t i = begin; i < std::min(begin + each, values.size()); ++i) {
      values[i] = static_cast<T>(static_cast<int>(random() % 17) - 8);
    }
  }
  auto const bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

}  // namespace sparsecomm::test
