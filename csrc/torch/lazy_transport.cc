#include "lazy_transport.h"

#include <atomic>
#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "c10d_transport.h"

namespace sparsecomm {
namespace {

// Between two looks at the store.
constexpr Duration shortest_pause = std::chrono::milliseconds(1);
constexpr Duration longest_pause = std::chrono::milliseconds(50);

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

  // Waits until every rank has come here. Asks again and again, since a wait of the store's cannot
  // be broken off.
  void meet(c10d::Store& store) const {
    Deadline const deadline(steady_clock(), timeout_);
    store.set(join_key(rank()), std::vector<std::uint8_t>{1});
    if (store.add("joined", 1) >= size()) store.set("complete", std::vector<std::uint8_t>{1});
    for (Duration pause = shortest_pause; !store.check({"complete"});
         pause = std::min(2 * pause, longest_pause)) {
      require<Aborted>(!aborted_, "the group was closed before all ranks had joined the operation");
      if (deadline.passed()) {
        std::vector<int> const missing = absent(store);
        if (missing.empty()) return;
        throw Timeout(concat(join_ranks(missing), " did not join the operation within ",
                             deadline.allowance_seconds(), " s"),
                      missing);
      }
      std::this_thread::sleep_for(std::min(pause, deadline.remaining()));
    }
  }

  std::vector<int> absent(c10d::Store& store) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank) {
      if (!store.check({join_key(rank)})) ranks.push_back(rank);
    }
    return ranks;
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
