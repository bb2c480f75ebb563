#include "store_rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <concepts>
#include <cstdio>
#include <optional>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "store_board.h"
#include "store_text.h"
#include "transport/process.h"

namespace sparsecomm {
namespace {

// Between two looks at the store.
constexpr Duration shortest_pause = std::chrono::microseconds(200);
constexpr Duration longest_pause = std::chrono::milliseconds(50);
// What the store answers at most, from all ranks that look.
constexpr Duration pause_per_rank = std::chrono::microseconds(500);

using StorePtr = c10::intrusive_ptr<c10d::Store>;

std::string draw_identity() {
  std::random_device system;
  std::array<char, 33> text{};
  std::snprintf(text.data(), text.size(), "%08x%08x%08x%08x", system(), system(), system(),
                system());
  return text.data();
}

std::uint32_t run_of(std::string const& identity) {
  std::uint32_t run = 0;
  auto const [end, error] = std::from_chars(identity.data(), identity.data() + 8, run, 16);
  require<Error>(error == std::errc() && identity.size() == 32, "'", identity,
                 "' is not the identity of a communicator");
  return run;
}

// What the first meeting and later rounds share.
class Place {
 public:
  Place(int rank, int size, StorePtr store, MeetingOptions options)
      : rank_(rank), size_(size), store_(std::move(store)), options_(std::move(options)) {}

  int rank() const { return rank_; }
  int size() const { return size_; }
  StorePtr const& store() const { return store_; }
  Place at(StorePtr store) const { return {rank_, size_, std::move(store), options_}; }

  void check() const { options_.check(); }
  void put(std::string const& key, std::string const& text) { set_text(*store_, key, text); }
  // Requires that the keys exist.
  std::vector<std::string> get(std::vector<std::string> const& keys) {
    std::vector<std::string> texts;
    if (store_->hasExtendedApi() && keys.size() > 1) {
      for (auto const& bytes : store_->multiGet(keys)) texts.push_back(as_text(bytes));
    } else {
      for (std::string const& key : keys) texts.push_back(get_text(*store_, key));
    }
    return texts;
  }
  // Not every store can.
  void forget(std::vector<std::string> const& keys) noexcept {
    try {
      for (std::string const& key : keys) store_->deleteKey(key);
    } catch (std::exception const&) {
      // What is left is a key that nobody reads.
    }
  }

  std::vector<std::string> keys_of_ranks(std::string const& prefix) const {
    std::vector<std::string> keys;
    keys.reserve(static_cast<std::size_t>(size_));
    for (int rank = 0; rank < size_; ++rank) keys.push_back(prefix + std::to_string(rank));
    return keys;
  }

  // Waits for the ranks whose key `prefix` + rank is missing, or else for rank 0's answer.
  template <class Done>
  void until(Done&& done, std::string const& prefix) {
    until(done, [&] { return missing_of(prefix); });
  }
  // Looks again and again, since a wait of the store's cannot be broken off. Throws Timeout naming
  // the ranks that `missing_ranks` returns.
  template <class Done, std::invocable MissingRanks>
  void until(Done&& done, MissingRanks const& missing_ranks) {
    Deadline const deadline(steady_clock(), options_.timeout);
    Duration const longest = std::max(longest_pause, size_ * pause_per_rank);
    TimePoint const began = steady_clock().now();
    Duration silent = options_.stall.limit;
    // Halfway: ranks that are there then may have given up a moment before this one does.
    std::optional<std::vector<int>> early;
    for (Duration pause = shortest_pause; !done(); pause = std::min(2 * pause, longest)) {
      check();
      Duration const waited = steady_clock().now() - began;
      if (options_.stall.log && waited >= silent) {
        silent = 2 * waited;
        // If it is this rank alone, the last one has come since the look.
        std::vector<int> const missing = missing_ranks();
        if (missing != std::vector{rank_}) {
          options_.stall.log(concat("rank ", rank_, " has waited ",
                                    std::chrono::duration<double>(waited).count(), " s in ",
                                    options_.call, " for ", join_ranks(missing),
                                    "; every rank of the group must call it"));
        }
      }
      if (!early && waited >= options_.timeout / 2) early = missing_ranks();
      if (deadline.passed()) {
        std::vector<int> missing = missing_ranks();
        std::erase_if(missing,
                      [&](int rank) { return early && !std::ranges::count(*early, rank); });
        if (missing.empty()) missing.push_back(0);
        throw Timeout(concat(join_ranks(missing), " did not join the operation within ",
                             deadline.allowance_seconds(), " s"),
                      missing);
      }
      std::this_thread::sleep_for(std::min(pause, deadline.remaining()));
    }
  }
  void until_there(std::vector<std::string> const& keys, std::string const& prefix) {
    until([&] { return store_->check(keys); }, prefix);
  }

 private:
  std::vector<int> missing_of(std::string const& prefix) {
    std::vector<int> missing;
    for (int rank = 0; rank < size_; ++rank) {
      if (!store_->check({prefix + std::to_string(rank)})) missing.push_back(rank);
    }
    if (missing.empty()) missing.push_back(0);
    return missing;
  }

  int rank_, size_;
  StorePtr store_;
  MeetingOptions options_;
};

// The first meeting: gets every rank the identity that rank 0 draws.
//
// 1. A rank claims its place, the key "join/<rank>", with a number of its own, its thread and its
//    process. A claim that this thread has left behind, since the store did not answer, is
//    replaced; a process of an earlier job that comes with the rank of another is noticed by
//    whichever of the two comes second.
// 2. Rank 0 replaces every claim by the answer to that very claim.
// 3. Every rank takes its answer away, so that nothing is left. Rank 0 waits for that, and answers
//    again if a claim that had been left behind is replaced.
class JoiningRank {
 public:
  JoiningRank(Place place, std::string const& purpose)
      : place_(std::move(place)),
        process_(ProcessIdentity::own()),
        thread_(own_thread(process_)),
        nonce_(draw_identity() + thread_),
        claim_(concat(nonce_, ' ', process_.text(), '\n', purpose)) {}

  std::string run() {
    std::string answer;
    claim();
    try {
      answer = place_.rank() == 0 ? answer_all() : await_answer();
    } catch (...) {
      place_.forget({own_key()});
      throw;
    }
    place_.forget({own_key()});
    require<TransportUnavailable>(answer.starts_with(accepted), answer);
    return answer.substr(std::string_view(accepted).size());
  }

 private:
  static constexpr char const* prefix = "join/";
  static constexpr char const* accepted = "identity ";
  static constexpr char const* answered = "for ";
  static constexpr char const* taken = "taken";

  std::string own_key() const { return prefix + std::to_string(place_.rank()); }

  // Waits for another communicator that this process is making, at another thread.
  void claim() {
    place_.until(
        [&] {
          std::string found = replace_text(*place_.store(), own_key(), "", claim_);
          if (nonce_of(found).ends_with(thread_)) {
            found = replace_text(*place_.store(), own_key(), found, claim_);
          } else {
            require_own(found);
          }
          return found == claim_;
        },
        prefix);
  }

  // Throws unless what stands in this rank's place is this process's, or of one that has ended,
  // which is taken away.
  void require_own(std::string const& found) {
    std::string const line = found.substr(0, found.find('\n'));
    auto const other =
        ProcessIdentity::parse(line.substr(std::min(line.find(' ') + 1, line.size())));
    if (found.empty() || (other && other->same_host(process_) && other->pid == process_.pid))
      return;
    if (other && other->same_host(process_) && has_ended(*other)) {
      replace_text(*place_.store(), own_key(), found, claim_);
      return;
    }
    throw TransportUnavailable(
        concat("rank ", place_.rank(), " of this process group is process ", process_.pid,
               ", but another process claims that rank, ",
               other ? "process " : "of another release", other ? std::to_string(other->pid) : "",
               other && other->same_host(process_) ? "" : " on another host",
               "; end what is left of an earlier job, or use another MASTER_PORT"));
  }

  std::string await_answer() {
    std::string const mark = concat(answered, nonce_, ' ');
    std::string found;
    place_.until(
        [&] {
          if (!place_.store()->check({own_key()})) {
            throw TransportUnavailable(concat("rank ", place_.rank(),
                                              "'s place was taken away; is a process of an earlier "
                                              "job still running?"));
          }
          found = place_.get({own_key()}).front();
          if (found != claim_ && !found.starts_with(mark)) require_own(found);
          return found.starts_with(mark);
        },
        prefix);
    return found.substr(mark.size());
  }

  std::string answer_all() {
    std::vector<std::string> const keys = place_.keys_of_ranks(prefix);
    std::vector<std::string> claims;
    place_.until(
        [&] {
          if (!place_.store()->check(keys)) return false;
          claims = place_.get(keys);
          // An answer to a rank that had given up, which it will replace.
          return std::ranges::none_of(
              claims, [](std::string const& claim) { return claim.starts_with(answered); });
        },
        prefix);
    std::string answer = accepted + draw_identity();
    std::string const purpose = purpose_of(claims[0]);
    for (std::size_t rank = 1; rank < claims.size(); ++rank) {
      if (purpose_of(claims[rank]) == purpose) continue;
      answer = concat("the ranks ask for different things: ", purpose, " on rank 0 but ",
                      purpose_of(claims[rank]), " on rank ", rank, "; give all ranks the same");
      break;
    }
    for (std::size_t rank = 1; rank < claims.size(); ++rank) {
      reply(keys[rank], claims[rank], answer);
    }
    for (int rank = 1; rank < place_.size(); ++rank) {
      place_.until([&] { return is_taken(keys[static_cast<std::size_t>(rank)], answer); },
                   [&] { return std::vector{rank}; });
    }
    return answer;
  }

  void reply(std::string const& key, std::string const& claim, std::string const& answer) {
    replace_text(*place_.store(), key, claim, concat(answered, nonce_of(claim), ' ', answer));
  }

  bool is_taken(std::string const& key, std::string const& answer) {
    // A get would wait for a key that is being taken away. This replaces nothing.
    std::string const found = replace_text(*place_.store(), key, taken, "");
    if (found == taken || found.empty()) return true;
    if (!found.starts_with(answered)) reply(key, found, answer);
    return false;
  }

  // Of a claim or an answer.
  static std::string nonce_of(std::string found) {
    if (found.starts_with(answered)) found.erase(0, std::string_view(answered).size());
    return found.substr(0, found.find(' '));
  }

  // Without spaces.
  static std::string own_thread(ProcessIdentity const& process) {
    std::string text = concat('@', process.text(), '/', ::gettid());
    std::ranges::replace(text, ' ', '/');
    return text;
  }

  static std::string purpose_of(std::string const& claim) {
    return claim.substr(std::min(claim.find('\n') + 1, claim.size()));
  }

  Place place_;
  ProcessIdentity process_;
  std::string thread_, nonce_, claim_;
};

class StoreRendezvous final : public Rendezvous {
 public:
  StoreRendezvous(Place place, std::uint32_t run)
      : place_(std::move(place)),
        run_(run),
        board_(make_store_board(c10::make_intrusive<c10d::PrefixStore>("failures", place_.store()),
                                place_.rank(), place_.size())) {}

  std::uint32_t run() const override { return run_; }

  // Rank 0 collects and hands out, so that the store answers P questions and not P squared.
  std::string decide(std::string const& own, Conclude const& conclude) override {
    place_.check();
    std::string const prefix = concat(round_++, '/');
    std::string const own_key = prefix + std::to_string(place_.rank());
    std::string const decided = prefix + "decided";
    place_.put(own_key, own);
    std::string conclusion;
    if (place_.rank() == 0) {
      std::vector<std::string> const keys = place_.keys_of_ranks(prefix);
      place_.until_there(keys, prefix);
      conclusion = conclude(place_.get(keys));
      place_.put(decided, conclusion);
    } else {
      place_.until_there({decided}, prefix);
      conclusion = place_.get({decided}).front();
    }
    // Every rank is here, so all have read what stands in earlier rounds.
    done_with_.push_back(own_key);
    place_.forget(std::exchange(done_with_, {}));
    if (place_.rank() == 0) done_with_.push_back(decided);
    return conclusion;
  }

  std::vector<std::string> exchange(std::string const& own, std::span<const int> wanted) override {
    place_.check();
    std::string const prefix = concat(round_++, '/');
    done_with_.push_back(prefix + std::to_string(place_.rank()));
    place_.put(done_with_.back(), own);
    if (wanted.empty()) return {};
    std::vector<std::string> keys;
    keys.reserve(wanted.size());
    for (int const rank : wanted) keys.push_back(prefix + std::to_string(rank));
    place_.until_there(keys, prefix);
    return place_.get(keys);
  }

  void check() const override { place_.check(); }
  Board& board() override { return *board_; }

 private:
  Place place_;
  std::uint32_t run_;
  std::uint64_t round_ = 0;
  std::vector<std::string> done_with_;  // keys of this rank's, until all ranks have read them
  std::shared_ptr<Board> board_;
};

}  // namespace

StoreMeeting meet_in_store(int rank, int size, StorePtr store, std::string const& purpose,
                           MeetingOptions const& options) {
  Place const place(rank, size, std::move(store), options);
  place.check();
  std::string const identity = JoiningRank(place, purpose).run();
  auto own = c10::make_intrusive<c10d::PrefixStore>(identity, place.store());
  return {std::make_shared<StoreRendezvous>(
              place.at(c10::make_intrusive<c10d::PrefixStore>("meeting", own)), run_of(identity)),
          own};
}

}  // namespace sparsecomm
