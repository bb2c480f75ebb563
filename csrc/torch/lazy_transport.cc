#include "lazy_transport.h"

#include <atomic>
#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "c10d_transport.h"

namespace sparsecomm {
namespace {

// How long one look at the store may block, and so delay an abort().
constexpr std::chrono::milliseconds patience{250};

std::string join_key(int rank) { return concat("joined/", rank); }

class LazyTransport final : public Transport {
 public:
  LazyTransport(c10::intrusive_ptr<c10d::Backend> gloo,
                c10::intrusive_ptr<c10d::Backend::Options> options,
                c10::intrusive_ptr<c10d::Store> store, Duration timeout)
      : Transport(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        options_(std::move(options)),
        store_(std::move(store)),
        timeout_(timeout) {}

  std::string_view name() const override { return "c10d/gloo"; }

  std::size_t wait(Request& request, Deadline const& deadline) override {
    return transport_->wait(request, deadline);
  }

  void abort() noexcept override {
    aborted_ = true;
    std::lock_guard const lock(mutex_);
    if (transport_) transport_->abort();
  }

  void post_failure(FailureReport const& report) noexcept override {
    if (transport_) transport_->post_failure(report);
  }
  std::vector<std::optional<FailureReport>> failures() noexcept override {
    return transport_ ? transport_->failures() : std::vector<std::optional<FailureReport>>(size());
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
      std::unique_ptr<Transport> transport = connect();
      std::lock_guard const lock(mutex_);
      transport_ = std::move(transport);
      if (aborted_) transport_->abort();
    }
    return *transport_;
  }

  std::unique_ptr<Transport> connect() {
    // The application goes on using its own connection, which a wait here would block.
    auto const store = store_->clone();
    meet(*store);
    std::vector<int> ranks(size());
    std::iota(ranks.begin(), ranks.end(), 0);
    try {
      auto group =
          gloo_->split(c10::make_intrusive<c10d::PrefixStore>("gloo", store), ranks, options_);
      return make_c10d_transport(std::move(group),
                                 c10::make_intrusive<c10d::PrefixStore>("failures", store));
    } catch (std::exception const& error) {
      throw Aborted(
          concat("the ", size(), " ranks of the group could not be connected: ", error.what()));
    }
  }

  // Waits until every rank has come here.
  void meet(c10d::Store& store) const {
    Deadline const deadline(steady_clock(), timeout_);
    std::vector<std::string> keys;
    for (int rank = 0; rank < size(); ++rank) keys.push_back(join_key(rank));
    store.set(join_key(rank()), std::vector<std::uint8_t>{1});
    while (!store.check(keys)) {
      require<Aborted>(!aborted_, "the group was closed before all ranks had joined the operation");
      if (deadline.passed()) {
        std::vector<int> missing;
        for (int rank = 0; rank < size(); ++rank) {
          if (!store.check({join_key(rank)})) missing.push_back(rank);
        }
        if (missing.empty()) return;
        throw Timeout(concat(join_ranks(missing), " did not join the operation within ",
                             deadline.allowance_seconds(), " s"),
                      missing);
      }
      try {
        auto const left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
        store.wait(keys, std::clamp(left, std::chrono::milliseconds(1), patience));
      } catch (std::exception const&) {
        // Not yet; where the store itself is gone, check() throws.
      }
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Backend::Options> options_;
  c10::intrusive_ptr<c10d::Store> store_;
  Duration timeout_;
  std::atomic<bool> aborted_ = false;
  std::mutex mutex_;  // guards transport_ against abort(), which may come from another thread
  std::unique_ptr<Transport> transport_;
};

}  // namespace

std::unique_ptr<Transport> make_lazy_transport(c10::intrusive_ptr<c10d::Backend> gloo,
                                               c10::intrusive_ptr<c10d::Backend::Options> options,
                                               c10::intrusive_ptr<c10d::Store> store,
                                               Duration timeout) {
  return std::make_unique<LazyTransport>(std::move(gloo), std::move(options), std::move(store),
                                         timeout);
}

}  // namespace sparsecomm
