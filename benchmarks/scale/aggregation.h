// Aggregators as ranks of an MPI: the last ones of a communicator, the others are their workers.
// The machines are those of csrc/ina; the messages of one instance have its number as their tag.
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ina/host.h"
#include "ina/link.h"

namespace sparsecomm {

// Bytes that are being sent, two messages of each instance at a time: an update may still be on its
// way to a slow worker when the next one is made, but no longer when the one after that is.
class MpiOutbox {
 public:
  explicit MpiOutbox(MPI_Comm comm) : comm_(comm) {}
  MpiOutbox(MpiOutbox const&) = delete;
  MpiOutbox& operator=(MpiOutbox const&) = delete;
  ~MpiOutbox() {
    for (auto& [where, slots] : sending_) {
      for (Slot& slot : slots) MPI_Wait(&slot.request, MPI_STATUS_IGNORE);
    }
  }

  template <class Fill>
  void send(int to, std::uint32_t instance, Fill fill) {
    auto& slots = sending_[{to, instance}];
    std::swap(slots[0], slots[1]);
    Slot& slot = slots[0];
    MPI_Wait(&slot.request, MPI_STATUS_IGNORE);
    slot.bytes.clear();
    fill(slot.bytes);
    MPI_Isend(slot.bytes.data(), static_cast<int>(slot.bytes.size()), MPI_BYTE, to,
              static_cast<int>(instance), comm_, &slot.request);
  }
  void send(int to, std::uint32_t instance, InaMessage const& message) {
    send(to, instance, [&](std::vector<std::byte>& bytes) {
      for (auto const piece : message.pieces()) {
        bytes.insert(bytes.end(), piece.begin(), piece.end());
      }
    });
  }

 private:
  struct Slot {
    std::vector<std::byte> bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  MPI_Comm comm_;
  std::map<std::pair<int, std::uint32_t>, Slot[2]> sending_;
};

// The next message from anybody.
struct MpiMessage {
  int from = 0, tag = 0;
  std::span<const std::byte> bytes;
};
// Without a probe, which in SMPI sleeps between two looks.
inline MpiMessage receive_any(MPI_Comm comm, std::vector<std::byte>& buffer) {
  buffer.resize(most_message_bytes(InaPlan{}));  // as AlgorithmOptions has them by default
  MPI_Status status;
  MPI_Recv(buffer.data(), static_cast<int>(buffer.size()), MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG,
           comm, &status);
  int count = 0;
  MPI_Get_count(&status, MPI_BYTE, &count);
  return {.from = status.MPI_SOURCE,
          .tag = status.MPI_TAG,
          .bytes = std::span(buffer).first(static_cast<std::size_t>(count))};
}

constexpr int end_tag = static_cast<int>(AggregatorLink::most_instances);

// A worker's link. Nothing is lost or late: simulated aggregators do not fail.
class MpiAggregatorLink final : public AggregatorLink {
 public:
  MpiAggregatorLink(MPI_Comm comm, int workers) : comm_(comm), workers_(workers), outbox_(comm) {
    int ranks = 0;
    MPI_Comm_size(comm, &ranks);
    for (int i = workers; i < ranks; ++i) names_.push_back(concat("rank ", i));
  }
  // Tells the aggregators that this worker has finished.
  void end() {
    for (int i = 0; i < size(); ++i) {
      MPI_Send(nullptr, 0, MPI_BYTE, workers_ + i, end_tag, comm_);
    }
  }

  int size() const override { return static_cast<int>(names_.size()); }
  std::string const& address(int aggregator) const override {
    return names_[static_cast<std::size_t>(aggregator)];
  }
  std::string const& loss(int /*aggregator*/) const override { return none_; }
  void send(int aggregator, std::uint32_t instance, InaMessage const& message) override {
    outbox_.send(workers_ + aggregator, instance, message);
  }
  bool flushed(int /*aggregator*/) const override { return true; }
  bool flush(int /*aggregator*/, Deadline const& /*deadline*/) override { return true; }
  Event next(Deadline const& /*deadline*/) override {
    MpiMessage const message = receive_any(comm_, buffer_);
    auto const h = parse_ina_header(message.bytes);
    header_bytes_ += sizeof(h);
    number_bytes_ += h.numbers * sizeof(std::uint32_t);
    return {Event::Kind::message, message.from - workers_, static_cast<std::uint32_t>(message.tag),
            message.bytes};
  }
  void close(int /*aggregator*/, std::string const& /*why*/) override {}
  void reconnect(int /*aggregator*/, JobMember const& /*member*/,
                 Deadline const& /*deadline*/) override {
    throw Error("simulated aggregators are not lost");
  }
  void interrupt() noexcept override {}

  // Of what has come.
  double header_bytes() const { return header_bytes_; }
  double number_bytes() const { return number_bytes_; }

 private:
  MPI_Comm comm_;
  int workers_;
  std::vector<std::string> names_;
  std::string none_;
  MpiOutbox outbox_;
  std::vector<std::byte> buffer_;
  double header_bytes_ = 0, number_bytes_ = 0;
};

// Aggregates until all workers have finished.
class MpiAggregator final : private InaHost::Outlet {
 public:
  MpiAggregator(MPI_Comm comm, int workers)
      : comm_(comm),
        workers_(workers),
        host_({.memory = std::size_t{1} << 40, .round = std::chrono::hours(24)}, *this),
        outbox_(comm) {
    for (int i = 0; i < workers; ++i) {
      host_.join(i,
                 {.job = {},
                  .workers = static_cast<std::uint16_t>(workers),
                  .worker = static_cast<std::uint16_t>(i)},
                 TimePoint{});
    }
  }

  void run() {
    for (int left = workers_; left > 0;) {
      MpiMessage const message = receive_any(comm_, buffer_);
      if (message.tag == end_tag) {
        --left;
        continue;
      }
      auto const instance = static_cast<std::uint32_t>(message.tag);
      auto const begin = message.bytes.first(std::min(message.bytes.size(), opening_bytes));
      TimePoint const now{};
      auto const place = host_.place(message.from, instance, message.bytes.size(), begin, now);
      std::ranges::copy(message.bytes, place.bytes.begin());
      host_.receive(message.from, instance, place.bytes, now);
    }
  }

 private:
  void send(int connection, std::uint32_t instance, InaMessage const& message,
            std::shared_ptr<void const> /*memory*/) override {
    outbox_.send(connection, instance, message);
  }
  void send_copy(int connection, std::uint32_t instance,
                 std::span<const std::byte> message) override {
    outbox_.send(connection, instance, [&](std::vector<std::byte>& bytes) {
      bytes.assign(message.begin(), message.end());
    });
  }
  void drop(int /*connection*/, InaHost::DropCause /*cause*/, std::string const& why) override {
    throw Error(why);
  }

  MPI_Comm comm_;
  int workers_;
  InaHost host_;
  MpiOutbox outbox_;
  std::vector<std::byte> buffer_;
};

}  // namespace sparsecomm
