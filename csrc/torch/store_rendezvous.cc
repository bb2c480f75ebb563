#include "store_rendezvous.h"

#include <algorithm>
#include <charconv>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "failure_board.h"

namespace sparsecomm {
namespace {

// Between two looks at the store.
constexpr Duration shortest_pause = std::chrono::microseconds(200);
constexpr Duration longest_pause = std::chrono::milliseconds(50);

// Each part as "length:bytes".
std::string join(std::vector<std::string> const& parts) {
  std::string text;
  for (std::string const& part : parts) text += concat(part.size(), ':', part);
  return text;
}

std::vector<std::string> split(std::string_view text, int count) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    std::size_t length = 0;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), length);
    auto const digits = static_cast<std::size_t>(end - text.data());
    require<Error>(error == std::errc() && digits < text.size() && *end == ':' &&
                       length <= text.size() - digits - 1,
                   "what rank 0 put into the store is damaged after ", parts.size(), " ranks");
    parts.emplace_back(text.substr(digits + 1, length));
    text.remove_prefix(digits + 1 + length);
  }
  require<Error>(parts.size() == static_cast<std::size_t>(count), "rank 0 put ", parts.size(),
                 " ranks' words into the store, not ", count);
  return parts;
}

class StoreRendezvous final : public Rendezvous {
 public:
  StoreRendezvous(int rank, int size, c10::intrusive_ptr<c10d::Store> const& store,
                  Duration timeout, std::atomic<bool> const& interrupted)
      : rank_(rank),
        size_(size),
        store_(c10::make_intrusive<c10d::PrefixStore>("meeting", store)),
        timeout_(timeout),
        interrupted_(interrupted),
        board_(c10::make_intrusive<c10d::PrefixStore>("failures", store), size) {}

  // Rank 0 collects and hands out, so that the store answers P questions and not P squared.
  std::vector<std::string> allgather(std::string const& own) override {
    check();
    std::string const prefix = concat(round_++, '/');
    std::string const all = prefix + "all";
    Deadline const deadline(steady_clock(), timeout_);
    put(prefix + std::to_string(rank_), own);
    if (rank_ != 0) {
      wait_for({all}, prefix, deadline);
      return split(get(all), size_);
    }
    std::vector<std::string> keys, texts;
    for (int rank = 0; rank < size_; ++rank) keys.push_back(prefix + std::to_string(rank));
    wait_for(keys, prefix, deadline);
    for (std::string const& key : keys) texts.push_back(get(key));
    put(all, join(texts));
    return texts;
  }

  void check() const override {
    require<Aborted>(!interrupted_, "the group was closed before all ranks had joined it");
  }
  void post_failure(FailureReport const& report) noexcept override { board_.post(rank_, report); }
  std::vector<std::optional<FailureReport>> failures() noexcept override {
    return board_.reports();
  }
  void post_status(std::string_view status) noexcept override { board_.post_status(rank_, status); }
  std::vector<std::string> statuses() noexcept override { return board_.statuses(); }

 private:
  void put(std::string const& key, std::string const& text) {
    store_->set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
  }
  std::string get(std::string const& key) {
    std::vector<std::uint8_t> const bytes = store_->get(key);
    return {bytes.begin(), bytes.end()};
  }

  // Asks again and again, since a wait of the store's cannot be broken off.
  void wait_for(std::vector<std::string> const& keys, std::string const& prefix,
                Deadline const& deadline) {
    for (Duration pause = shortest_pause; !store_->check(keys);
         pause = std::min(2 * pause, longest_pause)) {
      check();
      if (deadline.passed()) {
        std::vector<int> missing;
        for (int rank = 0; rank < size_; ++rank) {
          if (!store_->check({prefix + std::to_string(rank)})) missing.push_back(rank);
        }
        if (missing.empty()) missing.push_back(0);  // it has not handed out what it has
        throw Timeout(concat(join_ranks(missing), " did not join the operation within ",
                             deadline.allowance_seconds(), " s"),
                      missing);
      }
      std::this_thread::sleep_for(std::min(pause, deadline.remaining()));
    }
  }

  int rank_, size_;
  c10::intrusive_ptr<c10d::Store> store_;
  Duration timeout_;
  std::atomic<bool> const& interrupted_;
  std::uint64_t round_ = 0;
  FailureBoard board_;
};

}  // namespace

std::shared_ptr<Rendezvous> make_store_rendezvous(int rank, int size,
                                                  c10::intrusive_ptr<c10d::Store> store,
                                                  Duration timeout,
                                                  std::atomic<bool> const& interrupted) {
  return std::make_shared<StoreRendezvous>(rank, size, store, timeout, interrupted);
}

}  // namespace sparsecomm
