#include "c10d_transport.h"

#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace sparsecomm {
namespace {

std::string board_key(int rank) { return concat("failure/", rank); }

std::vector<std::uint8_t> serialize(FailureReport const& report) {
  std::ostringstream out;
  out << report.operation << ' ' << int(report.cause) << ' ' << report.suspects.size();
  for (int const rank : report.suspects) out << ' ' << rank;
  for (auto const count : report.sent) out << ' ' << count;
  for (auto const count : report.received) out << ' ' << count;
  out << '\n' << report.text;
  std::string const text = out.str();
  return {text.begin(), text.end()};
}

// Null where the bytes are not a report of one of `size` ranks.
std::optional<FailureReport> parse_report(std::vector<std::uint8_t> const& bytes, int size) {
  std::istringstream in(std::string(bytes.begin(), bytes.end()));
  FailureReport report;
  int cause = -1;
  std::size_t suspects = 0;
  in >> report.operation >> cause >> suspects;
  if (!in || cause < 0 || cause > int(FailureReport::Cause::invalid) ||
      suspects > static_cast<std::size_t>(size)) {
    return std::nullopt;
  }
  report.cause = static_cast<FailureReport::Cause>(cause);
  report.suspects.resize(suspects);
  for (int& rank : report.suspects) {
    in >> rank;
    if (!in || rank < 0 || rank >= size) return std::nullopt;
  }
  report.sent.resize(size);
  report.received.resize(size);
  for (auto* const counts : {&report.sent, &report.received}) {
    for (std::uint64_t& count : *counts) in >> count;
  }
  if (!in) return std::nullopt;
  in.get();
  report.text.assign(std::istreambuf_iterator<char>(in), {});
  return report;
}

class C10dTransport final : public Transport {
 public:
  C10dTransport(c10::intrusive_ptr<c10d::Backend> group, c10::intrusive_ptr<c10d::Store> store)
      : Transport(group->getRank(), group->getSize()),
        name_(concat("c10d/", group->getBackendName())),
        group_(std::move(group)),
        store_(std::move(store)) {}

  ~C10dTransport() override { slots_.clear(); }

  std::string_view name() const override { return name_; }

  std::size_t wait(Request& request, Deadline const& deadline) override {
    Slot slot = std::exchange(slots_.at(request.slot), Slot{});
    free_.push_back(std::exchange(request, Request{}).slot);
    auto const left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
    try {
      // Zero would mean "no timeout" to some engines.
      slot.work->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (std::exception const& error) {
      if (deadline.passed()) {
        throw Timeout(concat("no message to or from rank ", slot.peer, " got through within ",
                             deadline.allowance_seconds(), " s"),
                      {slot.peer});
      }
      throw PeerLost(concat("the connection to rank ", slot.peer, " broke: ", error.what()),
                     {slot.peer});
    }
    return slot.bytes;  // gloo does not say how many came
  }

  void abort() noexcept override {
    std::lock_guard const lock(mutex_);
    group_.reset();
  }

  void post_failure(FailureReport const& report) noexcept override {
    try {
      store_->set(board_key(rank()), serialize(report));
    } catch (std::exception const&) {
      // The board is gone, most likely with the rank that served it: each survivor judges by
      // itself.
    }
  }

  std::vector<std::optional<FailureReport>> failures() noexcept override {
    std::vector<std::optional<FailureReport>> reports(size());
    try {
      for (int rank = 0; rank < size(); ++rank) {
        if (store_->check({board_key(rank)})) {
          reports[rank] = parse_report(store_->get(board_key(rank)), size());
        }
      }
    } catch (std::exception const&) {
      // As above.
    }
    return reports;
  }

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    // The engine only reads a tensor that it sends.
    return post(peer, {const_cast<std::byte*>(bytes.data()), bytes.size()},
                [&](c10d::Backend& group, std::vector<at::Tensor>& message) {
                  return group.send(message, peer, static_cast<int>(tag));
                });
  }

  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    return post(peer, bytes, [&](c10d::Backend& group, std::vector<at::Tensor>& message) {
      return group.recv(message, peer, static_cast<int>(tag));
    });
  }

 private:
  struct Slot {
    int peer = 0;
    std::size_t bytes = 0;
    c10::intrusive_ptr<c10d::Work> work;
  };

  template <class F>
  Request post(int peer, std::span<std::byte> bytes, F&& start) {
    c10::intrusive_ptr<c10d::Backend> group;
    {
      std::lock_guard const lock(mutex_);
      group = group_;
    }
    if (!group) throw PeerLost("this rank's transport was aborted", {peer});
    std::vector<at::Tensor> message{
        at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte)};
    Slot slot{peer, bytes.size(), {}};
    try {
      slot.work = start(*group, message);
    } catch (std::exception const& error) {
      throw PeerLost(concat("the connection to rank ", peer, " broke: ", error.what()), {peer});
    }
    if (free_.empty()) {
      slots_.push_back(std::move(slot));
      return {static_cast<std::uint32_t>(slots_.size() - 1)};
    }
    Request const request{free_.back()};
    free_.pop_back();
    slots_[request.slot] = std::move(slot);
    return request;
  }

  std::string name_;
  std::mutex mutex_;  // guards group_, which abort() may reset from another thread
  c10::intrusive_ptr<c10d::Backend> group_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::Backend> group,
                                               c10::intrusive_ptr<c10d::Store> store) {
  return std::make_unique<C10dTransport>(std::move(group), std::move(store));
}

}  // namespace sparsecomm
