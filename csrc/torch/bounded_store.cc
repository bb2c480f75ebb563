#include "bounded_store.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace sparsecomm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Bytes = std::vector<std::uint8_t>;
using Keys = std::vector<std::string>;

constexpr Duration longest_call = std::chrono::seconds(30);
constexpr Duration checking_time = std::chrono::milliseconds(50);
// Between two looks for keys that are waited for.
constexpr Duration shortest_key_pause = std::chrono::milliseconds(1);
constexpr Duration longest_key_pause = std::chrono::milliseconds(50);

// Outlives the store in the thread of a call that was given up.
class Connection {
 public:
  explicit Connection(StorePtr origin) : origin_(std::move(origin)) {}

  // Of the thread that a call runs on, one at a time. Throws if nobody waits for the call.
  c10d::Store& get() {
    if (!own_) {
      own_ = origin_->clone();
      origin_.reset();
    }
    require<Error>(!given_up_, "the call was given up");
    return *own_;
  }

  void give_up() { given_up_ = true; }
  bool given_up() const { return given_up_; }
  // The connection itself at first: who asks goes on where the bounded store's calls have ended.
  StorePtr clone() {
    if (!own_) return origin_->clone();
    return given_up_ || std::exchange(handed_on_, true) ? own_->clone() : own_;
  }

 private:
  StorePtr origin_;  // until it has been cloned: it may hold the server
  StorePtr own_;
  bool handed_on_ = false;
  std::atomic<bool> given_up_ = false;
};

class BoundedStore final : public c10d::Store {
 public:
  BoundedStore(StorePtr store, Duration timeout, std::function<void()> check)
      : Store(std::chrono::duration_cast<std::chrono::milliseconds>(timeout)),
        extended_(store->hasExtendedApi()),
        connection_(std::make_shared<Connection>(std::move(store))),
        limit_(std::min(timeout, longest_call)),
        check_(std::move(check)) {}

  StorePtr clone() override { return connection_->clone(); }
  bool hasExtendedApi() const override { return extended_; }

  void set(std::string const& key, Bytes const& value) override {
    ask([=](Store& store) { store.set(key, value); });
  }
  Bytes compareSet(std::string const& key, Bytes const& expected, Bytes const& desired) override {
    return ask([=](Store& store) { return store.compareSet(key, expected, desired); });
  }
  Bytes get(std::string const& key) override {
    wait({key});
    return ask([=](Store& store) { return store.get(key); });
  }
  std::int64_t add(std::string const& key, std::int64_t value) override {
    return ask([=](Store& store) { return store.add(key, value); });
  }
  bool deleteKey(std::string const& key) override {
    return ask([=](Store& store) { return store.deleteKey(key); });
  }
  bool check(Keys const& keys) override {
    return ask([=](Store& store) { return store.check(keys); });
  }
  std::int64_t getNumKeys() override {
    return ask([](Store& store) { return store.getNumKeys(); });
  }
  void append(std::string const& key, Bytes const& value) override {
    ask([=](Store& store) { store.append(key, value); });
  }
  std::vector<Bytes> multiGet(Keys const& keys) override {
    wait(keys);
    return ask([=](Store& store) { return store.multiGet(keys); });
  }
  void multiSet(Keys const& keys, std::vector<Bytes> const& values) override {
    ask([=](Store& store) { store.multiSet(keys, values); });
  }
  // Looks again and again: a wait of the server's cannot be broken off.
  void wait(Keys const& keys) override { wait(keys, getTimeout()); }
  void wait(Keys const& keys, std::chrono::milliseconds const& timeout) override {
    Deadline const deadline(steady_clock(), timeout);
    for (Duration pause = shortest_key_pause; !check(keys);
         pause = std::min(2 * pause, longest_key_pause)) {
      if (deadline.passed()) {
        throw Error(concat("another rank did not set '", keys.front(), "' in the store within ",
                           deadline.allowance_seconds(), " s"));
      }
      std::this_thread::sleep_for(std::min(pause, deadline.remaining()));
    }
  }

 private:
  template <class Call>
  std::invoke_result_t<Call, Store&> ask(Call call) {
    check_();
    Deadline const deadline(steady_clock(), limit_);
    auto const no_answer = [&] {
      return Error(concat("the process group's store did not answer within ",
                          deadline.allowance_seconds(),
                          " s; is the process that serves it, torchrun's agent or that of rank 0, "
                          "still running?"));
    };
    if (connection_->given_up()) throw no_answer();
    std::packaged_task<std::invoke_result_t<Call, Store&>()> task(
        [connection = connection_, call = std::move(call)] { return call(connection->get()); });
    auto answer = task.get_future();
    // Ready when the thread holds nothing of the connection any more.
    std::thread([task = std::move(task)]() mutable { task.make_ready_at_thread_exit(); }).detach();
    try {
      while (answer.wait_for(std::min(checking_time, deadline.remaining())) !=
             std::future_status::ready) {
        check_();
        if (deadline.passed()) throw no_answer();
      }
    } catch (...) {
      connection_->give_up();
      throw;
    }
    return answer.get();
  }

  bool extended_;
  std::shared_ptr<Connection> connection_;
  Duration limit_;
  std::function<void()> check_;
};

}  // namespace

StorePtr make_bounded_store(StorePtr store, Duration timeout, std::function<void()> check) {
  return c10::make_intrusive<BoundedStore>(std::move(store), timeout, std::move(check));
}

}  // namespace sparsecomm
