#include "transport/inproc.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "transport/thread_board.h"

namespace sparsecomm {
namespace {

// What the ranks share. One lock: this transport is for tests, not for speed.
struct Hub {
  using Message = std::vector<std::byte>;
  struct Mailbox {
    explicit Mailbox(Runtime runtime) : changed(runtime, "a message") {}

    std::map<std::pair<int, Tag>, std::deque<Message>> messages;  // by (sender, tag)
    Condition changed;  // its owner's: a message wakes nobody else
  };

  Hub(int size, Runtime its_runtime)
      : runtime(its_runtime), aborted(size, false), gone(size, false) {
    for (int rank = 0; rank < size; ++rank) {
      mailboxes.emplace_back(runtime);
      doorbells.emplace_back(runtime);
    }
  }

  Runtime const runtime;
  std::mutex mutex;
  std::deque<Mailbox> mailboxes;
  std::deque<Doorbell> doorbells;
  std::vector<bool> aborted;
  std::vector<bool> gone;  // as its peers see it
};

class InprocTransport final : public Transport {
 public:
  InprocTransport(int rank, int size, std::shared_ptr<Hub> hub, std::shared_ptr<Board> board)
      : Transport(rank, size), hub_(std::move(hub)), board_(std::move(board)) {}
  ~InprocTransport() override { leave(); }

  std::string_view name() const override { return "inproc"; }
  bool interruptible() const override { return true; }

  std::size_t wait(Request& request, Deadline const& deadline) override {
    Slot const slot = std::exchange(slots_.at(request.slot), Slot{});
    free_.push_back(std::exchange(request, Request{}).slot);
    if (!slot.receive) return 0;
    std::unique_lock lock(hub_->mutex);
    Hub::Mailbox& mailbox = hub_->mailboxes[rank()];
    auto const place = mailbox.messages.try_emplace({slot.peer, slot.tag}).first;
    auto& queue = place->second;
    auto const settled = [&] {
      return !queue.empty() || hub_->gone[slot.peer] || hub_->aborted[rank()];
    };
    bool const in_time = mailbox.changed.wait_until(lock, deadline, settled);
    if (hub_->aborted[rank()]) throw Interrupted(aborted_here, {slot.peer});
    if (queue.empty()) {
      if (in_time) {
        throw PeerLost(concat("rank ", slot.peer, " is gone"), {slot.peer});
      }
      throw Timeout(
          concat("rank ", slot.peer, " sent nothing within ", deadline.allowance_seconds(), " s"),
          {slot.peer});
    }
    Hub::Message const message = std::move(queue.front());
    queue.pop_front();
    if (queue.empty()) mailbox.messages.erase(place);  // few tags are used twice
    lock.unlock();
    std::size_t const size = std::min(message.size(), slot.capacity);
    std::copy_n(message.begin(), size, slot.receive);
    return size;
  }

  Woken idle(std::uint32_t heard, Deadline const& deadline) override {
    return hub_->doorbells[rank()].idle(heard, deadline);
  }
  void wake() noexcept override { hub_->doorbells[rank()].wake(); }

  void interrupt() noexcept override {
    hub_->doorbells[rank()].interrupt();
    std::lock_guard const lock(hub_->mutex);
    hub_->aborted[rank()] = true;
    hub_->mailboxes[rank()].changed.notify_all();
  }
  void abort() noexcept override { leave(); }

  Board& board() override { return *board_; }

 protected:
  void do_ring(int peer, std::uint32_t number) override {
    {
      std::lock_guard const lock(hub_->mutex);
      if (hub_->aborted[rank()]) throw Interrupted(aborted_here, {peer});
    }
    hub_->doorbells[peer].ring(number);
  }

  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    Hub::Mailbox& mailbox = hub_->mailboxes[peer];
    {
      std::lock_guard const lock(hub_->mutex);
      if (hub_->aborted[rank()]) throw Interrupted(aborted_here, {peer});
      if (hub_->gone[peer]) throw PeerLost(concat("rank ", peer, " is gone"), {peer});
      mailbox.messages[{rank(), tag}].emplace_back(bytes.begin(), bytes.end());
    }
    mailbox.changed.notify_all();
    return take_slot({});
  }

  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    return take_slot({peer, tag, bytes.data(), bytes.size()});
  }

 private:
  struct Slot {
    int peer = 0;
    Tag tag = 0;
    std::byte* receive = nullptr;  // null for a send
    std::size_t capacity = 0;
  };

  void leave() noexcept {
    for (int peer = 0; peer < size(); ++peer) {
      peer == rank() ? hub_->doorbells[peer].interrupt() : hub_->doorbells[peer].lose(rank());
    }
    std::lock_guard const lock(hub_->mutex);
    hub_->aborted[rank()] = hub_->gone[rank()] = true;
    for (Hub::Mailbox& mailbox : hub_->mailboxes) mailbox.changed.notify_all();
  }

  Request take_slot(Slot const& slot) {
    if (free_.empty()) {
      slots_.push_back(slot);
      return {static_cast<std::uint32_t>(slots_.size() - 1)};
    }
    Request const request{free_.back()};
    free_.pop_back();
    slots_[request.slot] = slot;
    return request;
  }

  std::shared_ptr<Hub> hub_;
  std::shared_ptr<Board> board_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_inproc_transports(int size, Runtime runtime) {
  auto const hub = std::make_shared<Hub>(size, runtime);
  auto const boards = make_thread_boards(size);
  std::vector<std::unique_ptr<Transport>> transports;
  transports.reserve(size);
  for (int rank = 0; rank < size; ++rank) {
    transports.push_back(std::make_unique<InprocTransport>(rank, size, hub, boards[rank]));
  }
  return transports;
}

}  // namespace sparsecomm
