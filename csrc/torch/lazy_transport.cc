#include <mutex>
#include <vector>

#include "connect.h"

namespace sparsecomm {
namespace {

using Connect = std::function<std::unique_ptr<Transport>(std::atomic<bool> const& interrupted)>;

class LazyTransport final : public Transport {
 public:
  LazyTransport(int rank, int size, Connect connect)
      : Transport(rank, size), connect_(std::move(connect)) {}

  std::string_view name() const override {
    std::lock_guard const lock(mutex_);
    return transport_ ? transport_->name() : "unconnected";
  }

  std::size_t wait(Request& request, Deadline const& deadline) override {
    return transport_->wait(request, deadline);
  }

  void abort() noexcept override {
    aborted_ = true;
    std::lock_guard const lock(mutex_);
    if (transport_) transport_->abort();
  }

  void post_failure(FailureReport const& report) noexcept override {
    std::lock_guard const lock(mutex_);
    if (transport_) transport_->post_failure(report);
  }
  std::vector<std::optional<FailureReport>> failures() noexcept override {
    return transport_ ? transport_->failures() : std::vector<std::optional<FailureReport>>(size());
  }
  void post_status(std::string_view status) noexcept override {
    std::lock_guard const lock(mutex_);
    if (transport_) transport_->post_status(status);
  }
  std::vector<std::string> statuses() noexcept override {
    std::lock_guard const lock(mutex_);
    return transport_ ? transport_->statuses() : Transport::statuses();
  }

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    return connected().isend(peer, tag, bytes);
  }
  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    return connected().irecv(peer, tag, bytes);
  }

 private:
  Transport& connected() {
    if (!transport_) {
      std::unique_ptr<Transport> transport = connect_(aborted_);
      connect_ = nullptr;
      std::lock_guard const lock(mutex_);
      transport_ = std::move(transport);
      if (aborted_) transport_->abort();
    }
    return *transport_;
  }

  Connect connect_;
  std::atomic<bool> aborted_ = false;
  mutable std::mutex mutex_;  // guards transport_ against calls from other threads
  std::unique_ptr<Transport> transport_;
};

}  // namespace

std::unique_ptr<Transport> make_lazy_transport(int rank, int size, Connect connect) {
  return std::make_unique<LazyTransport>(rank, size, std::move(connect));
}

}  // namespace sparsecomm
