#include "transport/lazy.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/wrapped.h"

namespace sparsecomm {
namespace {

using Connect = std::function<std::unique_ptr<Transport>(std::function<void()> const& check)>;

// The board of a transport, once there is one.
class LazyBoard final : public Board {
 public:
  explicit LazyBoard(int size) : size_(size) {}

  void set(Board& board) {
    std::unique_lock lock(mutex_);
    board_ = &board;
    auto const alarm = std::exchange(alarm_, {});
    lock.unlock();
    if (alarm) board.on_failure(alarm);
  }

  bool post_failure(FailureReport const& report) noexcept override {
    Board* const board = get();
    return board && board->post_failure(report);
  }
  std::vector<std::optional<FailureReport>> failures() override {
    Board* const board = get();
    return board ? board->failures() : std::vector<std::optional<FailureReport>>(size_);
  }
  Duration patience() const override {
    Board* const board = get();
    return board ? board->patience() : Duration::zero();
  }
  void on_failure(std::function<void()> const& alarm) override {
    std::unique_lock lock(mutex_);
    if (!board_) {
      alarm_ = alarm;
      return;
    }
    lock.unlock();
    board_->on_failure(alarm);
  }
  std::string decide(std::string const& proposal) override {
    Board* const board = get();
    return board ? board->decide(proposal) : proposal;
  }
  std::optional<std::string> decision() override {
    Board* const board = get();
    return board ? board->decision() : std::nullopt;
  }
  void post_status(std::string_view status) noexcept override {
    if (Board* const board = get()) board->post_status(status);
  }
  std::vector<std::string> statuses() override {
    Board* const board = get();
    return board ? board->statuses() : std::vector<std::string>(size_);
  }

 private:
  Board* get() const {
    std::lock_guard const lock(mutex_);
    return board_;
  }

  std::size_t size_;
  mutable std::mutex mutex_;  // guards what follows
  Board* board_ = nullptr;
  std::function<void()> alarm_;
};

// Connects in every call that it does not override, since inner() does.
class LazyTransport final : public WrappedTransport {
 public:
  LazyTransport(int rank, int size, Connect connect)
      : WrappedTransport(rank, size),
        connect_(std::move(connect)),
        board_(static_cast<std::size_t>(size)) {}

  std::string_view name() const override {
    std::lock_guard const lock(mutex_);
    return transport_ ? transport_->name() : "unconnected";
  }
  std::uint32_t run() override { return size() == 1 ? 0 : WrappedTransport::run(); }
  bool interruptible() const override {
    std::lock_guard const lock(mutex_);
    return transport_ && transport_->interruptible();
  }
  void wake() noexcept override {
    std::lock_guard const lock(mutex_);
    transport_ ? transport_->wake() : void(woken_ = true);
  }
  // Null until it has connected: from then on, what that transport has.
  NativeAllreduce* native() override {
    std::lock_guard const lock(mutex_);
    return transport_ ? transport_->native() : nullptr;
  }
  void interrupt() noexcept override {
    aborted_ = true;
    std::lock_guard const lock(mutex_);
    if (transport_) transport_->interrupt();
  }
  void abort() noexcept override {
    interrupt();
    if (transport_) transport_->abort();
  }
  Board& board() override { return board_; }

 private:
  Transport& inner() override {
    if (!transport_) {
      std::unique_ptr<Transport> transport = connect_([this] {
        require<Aborted>(!aborted_, "the group was closed before all ranks had joined it");
      });
      connect_ = nullptr;
      {
        std::lock_guard const lock(mutex_);
        transport_ = std::move(transport);
        if (aborted_) transport_->interrupt();
        if (woken_) transport_->wake();
      }
      board_.set(transport_->board());
    }
    return *transport_;
  }

  Connect connect_;
  std::atomic<bool> aborted_ = false;
  LazyBoard board_;
  mutable std::mutex mutex_;  // guards what follows against calls from other threads
  bool woken_ = false;        // before there was a transport
  std::unique_ptr<Transport> transport_;
};

}  // namespace

std::unique_ptr<Transport> make_lazy_transport(int rank, int size, Connect connect) {
  return std::make_unique<LazyTransport>(rank, size, std::move(connect));
}

}  // namespace sparsecomm
