// The coordinator of operations that have names, which ranks add in any order.
//
// A name has a number, the same on all ranks (response_cache.h), under which each rank keeps a
// digest of what it proposed when all of them last agreed. As long as that is the same everywhere
// nothing but "it is pending" is to be said of an operation, which takes two bits (standings.h).
// A round:
//
// 1. If a former round has left operations pending on some ranks only, all ranks idle until one
//    has something new to say, and wake each other: whoever knows rings rank + 2^i. Else a rank
//    begins as soon as it has an operation, and waits for the others in step 3, without which none
//    can run.
// 2. Prepare what is pending: all that have names, and the first of those that have none, which
//    goes by the key of its proposal instead.
// 3. Allreduce the standings. What is pending on all ranks runs, in the order of the numbers. If a
//    rank says so, what is to run before all else is compared and run at once.
// 4. If a rank has names without numbers, or something is late: allgather of the names that are
//    pending and do not run. New ones get their numbers in the order of the ranks. What is late on
//    one rank and not pending on another ends the communicator.
// 5. If all ranks have operations without names pending and no two are alike, those are compared,
//    which tells all ranks what differs.
// 6. Allgather the payloads of those that run as last agreed and have any.
// 7. One after another, run them; what is changed is compared when its turn comes (comparison.h),
//    which tells all ranks what is wrong, or makes it agreed.
#include <algorithm>
#include <chrono>
#include <optional>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include "collectives/allgather_bytes.h"
#include "engine/coordinator.h"
#include "engine/names_of_ranks.h"
#include "engine/payload_allgather.h"
#include "engine/pending_list.h"
#include "engine/response_cache.h"
#include "engine/standings.h"

namespace sparsecomm {
namespace {

using Id = ResponseCache::Id;
using Entry = PendingList::Entry;

// In place of the key of what has no proposal.
constexpr std::string_view no_key(&PendingList::key_mark, 1);

bool is_key(std::string_view name) { return name.front() == PendingList::key_mark; }

// A digest of what ranks must agree on, but for what evolves from what they have agreed on.
std::uint64_t digest_of(Prepared const& prepared) {
  Proposal const& proposal = prepared.proposal;
  return Digest()
      .add(proposal.key)
      .add(proposal.version.has_value())
      .add(proposal.version.value_or(proposal.changing))
      .add(proposal.payload.size())
      .add(proposal.payload_is_known)
      .add(prepared.ends_alone())
      .value();
}

// Takes part in a round.
struct Candidate {
  PendingList::Iterator entry;
  std::optional<Id> id = {};
  bool selected = false;
};

// Runs.
struct Selected {
  PendingList::Iterator entry;
  std::optional<Id> id;  // none: it differs from the others'
  bool compare = false;
  Agreement agreement = {};

  Prepared const& prepared() const { return *entry->prepared; }
  // Of the other ranks, whose proposals are else as this one's.
  bool needs_payloads() const {
    Proposal const& proposal = prepared().proposal;
    return !compare && !proposal.payload_is_known && !proposal.payload.empty();
  }
};

class Cached final : public Coordinator {
 public:
  Cached(Comparison& comparison, std::size_t capacity, Duration timeout)
      : comparison_(comparison), cache_(capacity), timeout_(std::min(timeout, longest_duration)) {}

  bool add(Pending pending) override { return pending_.add(std::move(pending)); }
  bool empty() const override { return pending_.empty(); }
  bool listens() const override { return pending_.listens(); }

  Turn round(Channel& channel, Scheduled& next, bool callers, Operation* first) override {
    if (next_ == selected_.size()) {
      select_none();
      if (listens()) listen(channel);
      try {
        hold_round(channel, first);
      } catch (...) {
        select_none();
        throw;
      }
    }
    if (next_ == selected_.size()) return Turn::nothing;
    if (callers && selected_[next_].entry->pending.ticket) return Turn::others;
    hand_over(channel, next);
    return Turn::taken;
  }

  void add_ticket(std::shared_ptr<Ticket> ticket) override {
    auto const entry = pending_.add_ticket(std::move(ticket));
    if (std::ranges::find(selected_, entry, &Selected::entry) != selected_.end()) entry->begin();
  }

  Pending take() override {
    return pending_.take(next_ < selected_.size() ? selected_[next_++].entry : pending_.first());
  }

 private:
  void select_none() {
    selected_.clear();
    next_ = 0;
  }

  void show(Entry const& entry, std::size_t others) const {
    comparison_.show(entry.prepared->proposal, entry.pending.name, others);
  }

  // Step 1, after a round that has left something.
  void listen(Channel& channel) {
    TimePoint const began = channel.deadline().now();
    for (;;) {
      pending_.find_candidates(entries_);
      Entry const* waits = nullptr;
      bool has_new = false;
      TimePoint late_from = TimePoint::max();
      for (auto const& entry : entries_) {
        has_new = has_new || entry->is_new;
        if (entry->is_new || entry->is_cancelled()) continue;
        if (waits == nullptr) waits = &*entry;
        late_from = std::min(late_from, entry->late_from);
      }
      TimePoint const now = channel.deadline().now();
      if (has_new || late_from <= now) break;
      if (waits != nullptr) show(*waits, entries_.size() - 1);
      Duration const left = waits != nullptr ? late_from - now : longest_duration;
      auto const waiting = channel.waiting_for(waits != nullptr ? everybody : anybody);
      if (channel.idle(channel.deadline().restarted(left)) == Woken::rung) break;
    }
    for (int distance = 1; distance < channel.size(); distance *= 2) {
      channel.ring((channel.rank() + distance) % channel.size());
    }
    channel.postpone(channel.deadline().now() - began);
  }

  void hold_round(Channel& channel, Operation* first) {
    pending_.find_candidates(entries_);
    candidates_.clear();
    for (auto const& entry : entries_) candidates_.push_back({.entry = entry});
    // Whoever watches the first one sees it wait.
    StageObserver* const observer =
        entries_.empty() ? nullptr : entries_.front()->pending.operation->observer();
    ObservedStage const whole(observer, Stage::whole);
    for (Candidate& candidate : candidates_) prepare_one(candidate);
    if (!entries_.empty()) show(*entries_.front(), entries_.size() - 1);
    ObservedStage const agreeing(observer, Stage::agree);
    TimePoint const began = channel.deadline().now();
    bool const requests = comparison_.take_request();
    state_standings(began);
    standings_.set(AnyFlag::requests, requests);
    standings_.set(AnyFlag::has_first, first != nullptr);
    standings_.allreduce(channel);
    bool const has_first = standings_.holds(AnyFlag::has_first);
    failed_first_ = has_first ? comparison_.run_first(channel, first) : nullptr;
    for (Candidate& candidate : candidates_) {
      if (!candidate.id) continue;
      Standing const standing = standings_.of(*candidate.id);
      if (standing == Standing::ready || standing == Standing::changed) {
        select(candidate, standing == Standing::changed);
      }
    }
    bool left = false, left_unnamed = false;
    auto const leave = [&](std::string_view name) { (is_key(name) ? left_unnamed : left) = true; };
    standings_.for_each_mixed([&](std::size_t id) { leave(cache_.name(static_cast<Id>(id))); });
    if (standings_.holds(AnyFlag::has_new) || standings_.holds(AnyFlag::late)) {
      exchange_names(channel, leave);
    }
    std::ranges::sort(selected_, {}, &Selected::id);
    bool const unlike = select_unlike();
    left = left || (left_unnamed && !unlike);
    end_batches(left);
    exchange_payloads(channel);
    for (Candidate const& candidate : candidates_) {
      if (!candidate.selected) candidate.entry->put_back();
    }
    pending_.set_listens(left);
    requested_ = standings_.holds(AnyFlag::requests);
    if (!selected_.empty()) {
      selected_.front().agreement.waited = channel.deadline().now() - began;
    } else if (requests) {
      comparison_.request();  // again, with the next operation
    }
  }

  // Step 2.
  void prepare_one(Candidate& candidate) {
    Entry& entry = *candidate.entry;
    Operation* const operation = entry.pending.operation.get();
    if (entry.begin()) {
      entry.prepared = prepare(nullptr);
    } else if (!entry.prepared) {
      bool const is_first = &candidate == candidates_.data();
      ObservedStage const whole(is_first ? nullptr : operation->observer(), Stage::whole);
      entry.prepared = prepare(operation);
      if (!entry.is_named() && entry.prepared->intent == Intent::go) {
        entry.set_key(entry.prepared->proposal.key);
      }
    }
    if (!entry.known_as().empty()) candidate.id = cache_.find(entry.known_as());
  }

  bool is_agreed(Prepared const& prepared, Id id) const {
    return prepared.intent == Intent::go && prepared.proposal.finite &&
           cache_.agreed(id) == digest_of(prepared);
  }

  static bool is_late(Entry const& entry, TimePoint now) {
    return entry.prepared->intent != Intent::cancelled && entry.late_from <= now;
  }

  // Of this rank, for step 3.
  void state_standings(TimePoint now) {
    standings_.reset(cache_.size());
    bool has_unnamed = false, has_new = false, late = false;
    for (auto const& [entry, id, selected] : candidates_) {
      if (std::exchange(entry->is_new, false)) entry->late_from = now + timeout_;
      if (id) {
        standings_.set(*id, is_agreed(*entry->prepared, *id) ? Standing::ready : Standing::changed);
      }
      has_unnamed = has_unnamed || !entry->is_named();
      has_new = has_new || (!id && !entry->known_as().empty());
      late = late || is_late(*entry, now);
    }
    auto const [complete, digest] = describe_batches();
    standings_.set(AllFlag::has_unnamed, has_unnamed);
    standings_.set(AllFlag::completes, complete);
    standings_.set(AnyFlag::has_new, has_new);
    standings_.set(AnyFlag::late, late);
    standings_.set_digest(digest);
  }

  struct Batches {
    bool complete;         // all that is left of those that have something pending is pending
    std::uint64_t digest;  // of which operation belongs to which
  };
  Batches describe_batches() {
    parts_.clear();
    for (auto const& entry : entries_) {
      Batch const* const batch = entry->pending.operation->batch();
      if (batch == nullptr || batch == &batch_of_one) continue;
      auto part = std::ranges::find(parts_, batch, &Part::batch);
      if (part == parts_.end()) part = parts_.insert(part, {.batch = batch});
      ++part->pending;
      part->names += Digest().add(entry->known_as()).value();
    }
    Batches all{.complete = true, .digest = 0};
    for (Part const& part : parts_) {
      all.complete = all.complete && part.batch->left() == part.pending;
      all.digest += Digest().add(part.names).value();
    }
    return all;
  }

  void select(Candidate& candidate, bool compare) {
    candidate.selected = true;
    selected_.push_back({.entry = candidate.entry, .id = candidate.id, .compare = compare});
  }

  // Step 4. Calls leave(name) for each that has a number from now on but is not pending everywhere.
  template <class Leave>
  void exchange_names(Channel& channel, Leave&& leave) {
    bool const late = standings_.holds(AnyFlag::late);
    TimePoint const now = channel.deadline().now();
    NamesOfRanks::begin(list_, cache_.capacity());
    for (auto const& [entry, id, selected] : candidates_) {
      std::string_view const name = entry->known_as();
      if (late ? selected : (id || name.empty())) continue;
      NamesOfRanks::append(list_, name.empty() ? no_key : name, is_late(*entry, now));
    }
    NamesOfRanks all;
    auto const lists = gather_names(channel);
    for (int rank = 0; rank < channel.size(); ++rank) {
      channel.decode_from(rank, [&] { all.read(rank, lists[rank], cache_.capacity()); });
    }
    auto const ranks = static_cast<std::size_t>(channel.size());
    std::size_t const counted = cache_.size();
    for (std::string_view const view : all.names()) {
      std::string const name(view);
      if (name == no_key || cache_.find(name)) continue;
      Id const id = cache_.add(name, [&](Id other) {
        return other < counted && standings_.of(other) == Standing::absent;
      });
      if (id < counted) standings_.set(id, Standing::mixed);  // not to be given again
      if (all.holders(name).ranks.size() < ranks) leave(name);
    }
    for (Candidate& candidate : candidates_) {
      std::string const& name = candidate.entry->known_as();
      if (candidate.id || name.empty() || all.holders(name).ranks.size() < ranks) continue;
      candidate.id = cache_.find(name);
      select(candidate, true);
    }
    if (late) require_all_submitted(channel, all);
  }

  std::span<const std::span<const std::byte>> gather_names(Channel& channel) {
    try {
      return names_.run(channel, list_);
    } catch (AgreedError const& error) {
      throw Error(concat("names of operations: ", error.what()));
    }
  }

  // Throws NotSubmitted, the same on all ranks, if what is late on one is not pending on another.
  static void require_all_submitted(Channel const& channel, NamesOfRanks const& all) {
    NamesOfRanks::Holders unnamed;
    auto const require_all = [&](std::string const& what, NamesOfRanks::Holders const& holders) {
      if (!holders.late) return;
      std::vector<int> missing;
      for (int rank = 0; rank < channel.size(); ++rank) {
        bool const has_it = std::ranges::find(holders.ranks, rank) != holders.ranks.end();
        if (!has_it) missing.push_back(rank);
      }
      if (missing.empty()) return;
      std::string const text =
          concat(what, " was submitted by ", join_ranks(holders.ranks), " only");
      throw NotSubmitted(text, std::move(missing));
    };
    for (std::string_view const name : all.names()) {
      NamesOfRanks::Holders const& holders = all.holders(name);
      if (!is_key(name)) {
        require_all(concat("operation '", name, "'"), holders);
        continue;
      }
      unnamed.ranks.insert(unnamed.ranks.end(), holders.ranks.begin(), holders.ranks.end());
      unnamed.late = unnamed.late || holders.late;
    }
    require_all("an operation without a name", unnamed);
  }

  // Step 5. Returns whether it has selected one.
  bool select_unlike() {
    auto const is_unnamed = [](auto const& one) { return !one.entry->is_named(); };
    if (!standings_.holds(AllFlag::has_unnamed) || std::ranges::any_of(selected_, is_unnamed)) {
      return false;
    }
    Candidate& candidate = *std::ranges::find_if(candidates_, is_unnamed);
    candidate.id.reset();
    select(candidate, true);
    return true;
  }

  // Decides which operations end their batches, of those that are not compared, which decides that
  // too. `left`: some stay pending, which may belong to the batches of others.
  void end_batches(bool left) {
    bool const complete = !left && standings_.holds(AllFlag::completes) &&
                          !standings_.holds(AnyFlag::has_new) && standings_.digests_agree();
    ended_.clear();
    for (Selected& last : std::views::reverse(selected_)) {
      Batch const* const batch = last.entry->pending.operation->batch();
      if (batch == &batch_of_one) {
        last.agreement.ends_batch = true;
      } else if (complete && batch != nullptr && std::ranges::find(ended_, batch) == ended_.end()) {
        ended_.push_back(batch);
        last.agreement.ends_batch = true;
      }
    }
  }

  // Step 6. Operations whose payloads do not go together are compared, which says why.
  void exchange_payloads(Channel& channel) {
    payloads_.clear();
    for (Selected const& selected : selected_) {
      if (!selected.needs_payloads()) continue;
      Prepared const& prepared = selected.prepared();
      payloads_.push_back({.operation = prepared.operation, .payload = prepared.proposal.payload});
    }
    gather_.run(channel, Phase::explain, payloads_);
    auto part = payloads_.begin();
    for (Selected& selected : selected_) {
      if (!selected.needs_payloads()) continue;
      selected.agreement.payload = part->merged;
      selected.compare = !part->agrees;
      ++part;
    }
  }

  // Step 7.
  void hand_over(Channel& channel, Scheduled& next) {
    Selected const& selected = selected_[next_];
    Entry const& entry = *selected.entry;
    next.whole.begin(entry.pending.operation->observer(), Stage::whole);
    next.agreement = selected.agreement;
    if (failed_first_) {
      next.error = failed_first_;
    } else if (selected.compare) {
      compare(channel, selected, next);
    } else {
      show(entry, 0);
    }
    if (selected.id) cache_.use(*selected.id);
    if (std::exchange(requested_, false)) comparison_.add_requested();
    next.pending = take();
  }

  void compare(Channel& channel, Selected const& selected, Scheduled& next) {
    TimePoint const began = channel.deadline().now();
    std::optional<std::uint64_t> agreed;
    try {
      auto const result =
          comparison_.run(channel, selected.prepared(), selected.entry->pending.name);
      next.agreement = result.agreement;
      next.agreement.waited = selected.agreement.waited + (channel.deadline().now() - began);
      if (result.alike) agreed = digest_of(selected.prepared());
    } catch (AgreedError const&) {
      next.error = std::current_exception();
    }
    if (selected.id) cache_.set_agreed(*selected.id, agreed);
  }

  // A batch in a round.
  struct Part {
    Batch const* batch;
    std::size_t pending = 0;
    std::uint64_t names = 0;  // the sum of their digests
  };

  Comparison& comparison_;
  PendingList pending_;  // listens if a round has left something pending on some ranks only
  // Of the thread that has the turn.
  ResponseCache cache_;
  Duration const timeout_;
  Standings standings_;
  std::vector<PendingList::Iterator> entries_;
  std::vector<Candidate> candidates_;
  std::vector<Selected> selected_;  // in their order, those before next_ are handed over
  std::size_t next_ = 0;
  std::exception_ptr failed_first_;
  bool requested_ = false;  // by some rank, with this round
  std::vector<Part> parts_;
  std::vector<Batch const*> ended_;
  std::vector<std::byte> list_;
  BytesAllgather names_{PendingList::longest_list};
  std::vector<PayloadAllgather::Part> payloads_;
  PayloadAllgather gather_;
};

}  // namespace

std::unique_ptr<Coordinator> make_cached(Comparison& comparison, std::size_t capacity,
                                         Duration timeout) {
  return std::make_unique<Cached>(comparison, capacity, timeout);
}

}  // namespace sparsecomm
