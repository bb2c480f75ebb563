// Operations that were submitted and have not been handed over, in the order of submission.
#pragma once

#include <array>
#include <atomic>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/comparison.h"
#include "engine/join.h"
#include "engine/ticket.h"

namespace sparsecomm {

class PendingList {
 public:
  // Names are not longer, in bytes, and do not begin with that character.
  static constexpr std::size_t longest_name = 1024;
  static constexpr char key_mark = '#';
  // Names of the caller's, of proposals' keys, and a Join's are told apart.
  static bool is_given(std::string_view name) { return !name.starts_with(key_mark); }
  static bool is_key(std::string_view name) { return !is_given(name) && name != Join::name; }
  // So many may be pending.
  static constexpr std::size_t most_pending = 65000;

  // Stays where it is until it is taken. All but `pending` is for the thread that has the turn.
  struct Entry {
    Pending pending;
    std::optional<Prepared> prepared = {};
    TimePoint late_from{};
    bool is_new = true;  // it has taken part in no round

    bool is_named() const { return !pending.name.empty(); }
    bool is_join() const { return pending.name == Join::name; }
    // All ranks know it by this: its name, or that of its proposal's key; empty: it is not known
    // yet, or has no proposal.
    std::string const& known_as() const { return is_named() ? pending.name : key_name_; }
    // In lists of names, where one is as good as another of what has none.
    std::string_view listed_as() const {
      return is_named() ? std::string_view(pending.name) : std::string_view(&key_mark, 1);
    }
    bool is_late(TimePoint now) const {
      return prepared->intent != Intent::cancelled && late_from <= now;
    }
    void set_key(std::uint64_t key) {
      std::array<char, sizeof key> bytes{};
      std::memcpy(bytes.data(), &key, sizeof key);
      key_name_.assign(1, key_mark).append(bytes.data(), bytes.size());
    }
    // Once it is prepared: tells the watch of it, and that so many others wait with it.
    void show(Comparison const& comparison, std::size_t others) const {
      comparison.show(prepared->proposal, pending.name, others);
    }
    // Whether it can be prepared without waiting.
    bool is_ready() const { return prepared || is_cancelled() || pending.operation->is_ready(); }
    bool is_cancelled() const { return pending.ticket && pending.ticket->cancelled(); }
    // For this round it is not to be cancelled. Returns whether it has been.
    bool begin() const { return pending.ticket && pending.ticket->begin(); }
    void put_back() const {
      if (pending.ticket) pending.ticket->put_back();
    }
    // What is left of it; then it is as new.
    Pending release() {
      prepared.reset();
      is_new = true;
      key_name_.clear();
      return std::exchange(pending, {});
    }

   private:
    std::string key_name_;
  };
  using Iterator = std::list<Entry>::iterator;

  // The following are for any thread.

  // Throws InvalidArgument where the name is none, or one of that name is pending that has not been
  // cancelled, or a Join. Gives a Join its name. Returns whether this rank listens.
  bool add(Pending pending);
  bool empty() const { return pending_ == 0; }
  bool listens() const { return listens_; }

  // The following are for the thread that has the turn.

  void set_listens(bool listens) { listens_ = listens; }
  Iterator first();  // if there is one
  // Those that may run: the first of each name, and of those without one; a Join once nothing else
  // is pending that has not been cancelled.
  void find_candidates(std::vector<Iterator>& candidates);
  // Amid a round, after which it is pending no more. None of that name is.
  Iterator add_stand_in(Pending pending);
  // Gives the one that has no ticket this one.
  Iterator add_ticket(std::shared_ptr<Ticket> ticket);
  Pending take(Iterator entry);

 private:
  // Written with the lock held, but for listens_, which find_candidates() and add() see in the
  // order in which they take it.
  std::atomic<std::size_t> pending_ = 0;
  std::atomic<bool> listens_ = false;
  std::mutex mutex_;  // guards what follows
  std::list<Entry> entries_;
  std::list<Entry> spare_;                                // memory for others
  std::unordered_map<std::string_view, Entry*> by_name_;  // the last one of each
  Entry const* join_ = nullptr;                           // the last one
  std::unordered_set<std::string_view> cancelled_;

  Iterator append(Pending pending);
};

}  // namespace sparsecomm
