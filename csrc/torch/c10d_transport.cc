#include "c10d_transport.h"

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "failure_board.h"

namespace sparsecomm {
namespace {

class C10dTransport final : public Transport {
 public:
  C10dTransport(c10::intrusive_ptr<c10d::Backend> group, c10::intrusive_ptr<c10d::Store> store)
      : Transport(group->getRank(), group->getSize()),
        name_(concat("c10d/", group->getBackendName())),
        board_(std::move(store), group->getSize()),
        group_(std::move(group)) {}

  ~C10dTransport() override { slots_.clear(); }

  std::string_view name() const override { return name_; }

  std::size_t wait(Request& request, Deadline const& deadline) override {
    Slot slot = std::exchange(slots_.at(request.slot), Slot{});
    free_.push_back(std::exchange(request, Request{}).slot);
    auto const left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
    bool complete = false;
    std::string reason = "this rank's transport was aborted";
    try {
      if (start_waiting(slot.work)) {
        // Zero would mean "no timeout" to some engines.
        complete = slot.work->wait(std::max(left, std::chrono::milliseconds(1)));
      }
    } catch (std::exception const& error) {
      reason = error.what();
    }
    bool const aborted = stop_waiting();
    if (complete && !aborted) return slot.bytes;  // gloo does not say how many came
    if (!aborted && deadline.passed()) {
      throw Timeout(concat("no message to or from rank ", slot.peer, " got through within ",
                           deadline.allowance_seconds(), " s"),
                    {slot.peer});
    }
    throw PeerLost(concat("the connection to rank ", slot.peer, " broke: ", reason), {slot.peer});
  }

  // From another thread: breaks off what the user of the transport waits for, who then aborts too.
  // From the user's own: closes the connections, which takes dropping every work that keeps them.
  void abort() noexcept override {
    c10::intrusive_ptr<c10d::Work> waiting;
    {
      std::lock_guard const lock(mutex_);
      aborted_ = true;
      waiting = waiting_;
    }
    if (waiting) waiting->abort();
    if (user_ == std::thread::id() || user_ == std::this_thread::get_id()) {
      slots_.clear();
      free_.clear();
      group_.reset();
    }
  }

  void post_failure(FailureReport const& report) noexcept override { board_.post(rank(), report); }
  std::vector<std::optional<FailureReport>> failures() noexcept override {
    return board_.reports();
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
    user_ = std::this_thread::get_id();
    if (is_aborted()) throw PeerLost("this rank's transport was aborted", {peer});
    std::vector<at::Tensor> message{
        at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte)};
    Slot slot{peer, bytes.size(), {}};
    try {
      slot.work = start(*group_, message);
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

  bool is_aborted() {
    std::lock_guard const lock(mutex_);
    return aborted_;
  }
  // False when it is too late to wait.
  bool start_waiting(c10::intrusive_ptr<c10d::Work> work) {
    std::lock_guard const lock(mutex_);
    waiting_ = std::move(work);
    return !aborted_;
  }
  bool stop_waiting() {
    std::lock_guard const lock(mutex_);
    waiting_.reset();
    return aborted_;
  }

  std::string name_;
  FailureBoard board_;
  std::atomic<std::thread::id> user_;  // the thread that sends and receives
  c10::intrusive_ptr<c10d::Backend> group_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::mutex mutex_;  // guards what follows
  bool aborted_ = false;
  c10::intrusive_ptr<c10d::Work> waiting_;
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::Backend> group,
                                               c10::intrusive_ptr<c10d::Store> store) {
  return std::make_unique<C10dTransport>(std::move(group), std::move(store));
}

}  // namespace sparsecomm
