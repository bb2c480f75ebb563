#include "c10d_transport.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "c10d_rings.h"
#include "store_board.h"

namespace sparsecomm {
namespace {

at::ScalarType reduced_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return at::kFloat;
    case DType::f64:
      return at::kDouble;
    case DType::f16:
      return at::kHalf;
    case DType::bf16:
      return at::kBFloat16;
    case DType::i32:
      return at::kInt;
    case DType::i64:
      return at::kLong;
  }
  throw InvalidArgument(concat("dtype ", name(dtype), " cannot be reduced"));
}

c10d::ReduceOp torch_reduction(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return c10d::ReduceOp::SUM;
    case Reduction::product:
      return c10d::ReduceOp::PRODUCT;
    case Reduction::min:
      return c10d::ReduceOp::MIN;
    case Reduction::max:
      return c10d::ReduceOp::MAX;
  }
  throw InvalidArgument(concat("reduction ", int(reduction), " is unknown"));
}

// Gloo has a set of connections for each of its interfaces, and a message's tag modulo their number
// chooses the set. How many there are it does not say; no machine has more.
constexpr int most_interfaces = 64;

// At least one, since zero would mean "no timeout" to some engines.
std::chrono::milliseconds time_left(Deadline const& deadline) {
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining()),
                  std::chrono::milliseconds(1));
}

class C10dTransport final : public Transport, private NativeAllreduce {
 public:
  C10dTransport(c10::intrusive_ptr<c10d::Backend> group, c10::intrusive_ptr<c10d::Store> store,
                std::uint32_t run, std::vector<ForkGuard> guards)
      : Transport(group->getRank(), group->getSize(), run),
        name_(concat("c10d/", group->getBackendName())),
        board_(make_store_board(std::move(store), rank(), size())),
        group_(std::move(group)),
        guards_(std::move(guards)) {}

  ~C10dTransport() override {
    if (process_ == ::getpid()) {
      {
        std::lock_guard const lock(mutex_);
        stopped_ = true;
      }
      expiry_changed_.notify_all();
      timer_.join();
      rings_.reset();
    } else {
      timer_.detach();  // a fork has not copied it
      std::ignore = rings_.release();
    }
    slots_.clear();
  }

  std::string_view name() const override { return name_; }

  std::size_t wait(Request& request, Deadline const& deadline) override {
    Slot slot = std::exchange(slots_.at(request.slot), Slot{});
    free_.push_back(std::exchange(request, Request{}).slot);
    bool complete = false;
    std::string reason;
    try {
      if (start_waiting(slot.work, deadline)) complete = slot.work->wait(C10dRings::endless);
    } catch (std::exception const& error) {
      reason = error.what();
    }
    bool const aborted = stop_waiting();
    if (aborted) throw Interrupted(aborted_here, {slot.peer});
    if (complete) return slot.bytes;  // gloo does not say how many came
    if (deadline.passed()) {
      throw Timeout(concat("no message to or from rank ", slot.peer, " got through within ",
                           deadline.allowance_seconds(), " s"),
                    {slot.peer});
    }
    throw PeerLost(concat("the connection to rank ", slot.peer, " broke: ", reason), {slot.peer});
  }

  NativeAllreduce* native() override { return this; }

  void allreduce(std::span<std::byte> bytes, DType dtype, Reduction reduction,
                 Deadline const& deadline) override {
    auto const elements = static_cast<std::int64_t>(bytes.size() / size_of(dtype));
    std::vector<at::Tensor> tensors{at::from_blob(bytes.data(), {elements}, reduced_type(dtype))};
    c10d::AllreduceOptions options;
    options.reduceOp = torch_reduction(reduction);
    options.timeout = time_left(deadline);
    c10::intrusive_ptr<c10d::Work> work;
    std::string reason;
    bool complete = false;
    if (start_reducing()) {
      try {
        work = group_->allreduce(tensors, options);
        complete = work->wait(options.timeout);
      } catch (std::exception const& error) {
        reason = error.what();
      }
    }
    bool const aborted = stop_waiting();
    if (complete && !aborted) return;
    bool const late = !aborted && deadline.passed();
    std::vector<int> const suspects = late || aborted ? peers() : broken_peers();
    if (work && !work->isCompleted()) {  // it still uses the caller's memory
      close_connections(*group_);
      try {
        work->wait();
      } catch (std::exception const&) {  // that it was broken off is known
      }
    }
    if (aborted) throw Interrupted(aborted_here, suspects);
    if (late) {
      throw Timeout(concat("an allreduce of ", elements, " elements did not end within ",
                           deadline.allowance_seconds(), " s"),
                    suspects);
    }
    throw PeerLost(concat("an allreduce of ", elements, " elements broke: ", reason), suspects);
  }

  Woken idle(std::uint32_t heard, Deadline const& deadline) override {
    if (is_aborted()) throw Interrupted(aborted_here, {});
    rings();
    return doorbell_.idle(heard, deadline);
  }
  void wake() noexcept override { doorbell_.wake(); }

  void interrupt() noexcept override {
    doorbell_.interrupt();
    c10::intrusive_ptr<c10d::Work> waiting;
    c10::intrusive_ptr<c10d::Backend> reducing;
    {
      std::lock_guard const lock(mutex_);
      aborted_ = true;
      waiting = waiting_;
      reducing = reducing_;
    }
    if (waiting) waiting->abort();
    if (reducing) close_connections(*reducing);
  }
  // Closes the connections, which takes dropping every work that keeps them.
  void abort() noexcept override {
    interrupt();
    rings_.reset();
    slots_.clear();
    free_.clear();
    guards_.clear();
    group_.reset();
  }

  Board& board() override { return *board_; }

 protected:
  void do_ring(int peer, std::uint32_t number) override {
    if (is_aborted()) throw Interrupted(aborted_here, {peer});
    rings().ring(peer, number);
  }

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
    if (is_aborted()) throw Interrupted(aborted_here, {peer});
    std::vector<at::Tensor> message{
        at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte)};
    Slot slot{peer, bytes.size(), {}};
    try {
      std::lock_guard const lock(posting_);
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

  std::vector<int> peers() const {
    std::vector<int> peers;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) peers.push_back(peer);
    }
    return peers;
  }

  // Those whose connections are closed; all where none is. Gloo does not say which one broke an
  // allreduce, but refuses a receive from it.
  std::vector<int> broken_peers() const {
    std::vector<int> broken;
    for (int const peer : peers()) {
      try {
        for (int way = 0; way < most_interfaces; ++way) probe(*group_, peer, way);
      } catch (std::exception const&) {
        broken.push_back(peer);
      }
    }
    return broken.empty() ? peers() : broken;
  }

  // An allreduce cannot be aborted, but a receive that times out closes all connections of its
  // interface.
  void close_connections(c10d::Backend& group) const noexcept {
    for (int const peer : peers()) {
      for (int way = 0; way < most_interfaces; ++way) {
        try {
          probe(group, peer, way)->wait(std::chrono::milliseconds(1));
        } catch (std::exception const&) {  // as meant to
        }
      }
    }
  }

  // A receive that nothing is sent to, by that interface modulo their number.
  static c10::intrusive_ptr<c10d::Work> probe(c10d::Backend& group, int peer, int way) {
    std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
    return group.recv(nothing, peer, std::numeric_limits<int>::max() - way);
  }

  C10dRings& rings() {
    if (!rings_)
      rings_ = std::make_unique<C10dRings>(group_, Transport::run(), doorbell_, posting_);
    return *rings_;
  }

  bool is_aborted() {
    std::lock_guard const lock(mutex_);
    return aborted_;
  }
  // False when it is too late to wait.
  bool start_waiting(c10::intrusive_ptr<c10d::Work> work, Deadline const& deadline) {
    std::lock_guard const lock(mutex_);
    waiting_ = std::move(work);
    expiry_ = steady_clock().now() + deadline.remaining();
    if (expiry_ < looks_at_) expiry_changed_.notify_all();
    return !aborted_;
  }
  // Ends waits whose deadline has passed. Were gloo told of it, it would close all connections of
  // this rank, and others would name this rank before its report says whom it has waited for. Wakes
  // up once in a deadline, not in every wait.
  void end_late_waits() {
    std::unique_lock lock(mutex_);
    while (!stopped_) {
      if (waiting_ && steady_clock().now() >= expiry_) {
        auto const late = std::exchange(waiting_, {});
        lock.unlock();
        late->abort();
        lock.lock();
        continue;
      }
      looks_at_ = waiting_ ? expiry_ : TimePoint::max();
      if (looks_at_ == TimePoint::max()) {
        expiry_changed_.wait(lock);
      } else {
        expiry_changed_.wait_until(lock, looks_at_);
      }
    }
  }
  bool start_reducing() {
    std::lock_guard const lock(mutex_);
    if (!aborted_) reducing_ = group_;
    return !aborted_;
  }
  bool stop_waiting() {
    std::lock_guard const lock(mutex_);
    waiting_.reset();
    reducing_.reset();
    return aborted_;
  }

  std::string name_;
  std::shared_ptr<Board> board_;
  c10::intrusive_ptr<c10d::Backend> group_;
  std::vector<ForkGuard> guards_;  // destroyed before what they guard
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::mutex posting_;
  Doorbell doorbell_;
  std::unique_ptr<C10dRings> rings_;  // from the first use of it on
  pid_t process_ = ::getpid();
  std::mutex mutex_;  // guards what follows
  bool aborted_ = false;
  bool stopped_ = false;
  c10::intrusive_ptr<c10d::Work> waiting_;
  TimePoint expiry_{};                     // of that wait
  TimePoint looks_at_ = TimePoint::max();  // when the timer wakes up
  std::condition_variable expiry_changed_;
  c10::intrusive_ptr<c10d::Backend> reducing_;       // while it does
  std::thread timer_{[this] { end_late_waits(); }};  // last, so that it starts when all is ready
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::Backend> group,
                                               c10::intrusive_ptr<c10d::Store> store,
                                               std::uint32_t run, std::vector<ForkGuard> guards) {
  return std::make_unique<C10dTransport>(std::move(group), std::move(store), run,
                                         std::move(guards));
}

}  // namespace sparsecomm
