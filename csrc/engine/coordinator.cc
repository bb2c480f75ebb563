// The coordinator of operations that have names, which ranks add in any order.
//
// A name has a number, the same on all ranks (response_cache.h), under which each rank keeps what
// it proposed when all of them last agreed. As long as that is the same everywhere nothing but "it
// is pending" is to be said of an operation, which takes two bits (standings.h). A round:
//
// 1. If a former round has left operations pending on some ranks only, all ranks idle until one
//    has something new to say, and wake each other: whoever knows rings rank + 2^i. Else a rank
//    begins as soon as it has an operation, or has joined, and waits for the others in step 3,
//    without which none can run.
// 2. Prepare what is pending and ready: all that have names, and the first of those that have none,
//    which goes by the key of its proposal instead.
// 3. Allreduce the standings, together with the payload of a rank's only operation if the former
//    round ran but one, which had a payload. What is pending on all ranks runs, in the order of
//    priorities and numbers. If a rank says so, what is to run before all else is compared and run
//    at once.
// 4. If a rank has joined: allgather of what is pending, with descriptions, of which ranks that
//    have joined make stand-ins where all others have it (join.h); then step 3 once more.
// 5. If a rank has names without numbers, or something is late: allgather of the names that are
//    pending and do not run. New ones get their numbers in the order of the ranks. What is late on
//    one rank and not pending on another ends the communicator.
// 6. What ranks do not know, or must differ, is compared without regard to names: the operations
//    without one, if all ranks have any and none of them runs; and whatever each rank has first, if
//    they have broken off different numbers of steps, or if nothing can run and no rank will submit
//    more. That makes them known, or tells all ranks what differs.
// 7. Allgather the payloads of those that run as last agreed and have any, unless step 3 has.
// 8. Decide which of them are exchanged together (fusion.h): of those that run as last agreed.
// 9. One after another, run them; what is changed is compared when its turn comes (comparison.h),
//    which tells all ranks what is wrong, or makes it agreed.
#include "engine/coordinator.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include "engine/candidates.h"
#include "engine/join.h"
#include "engine/listen.h"
#include "engine/names_of_ranks.h"
#include "engine/payload_allgather.h"
#include "engine/pending_batches.h"
#include "engine/pending_list.h"
#include "engine/response_cache.h"
#include "engine/riders.h"
#include "engine/standings.h"

namespace sparsecomm {
namespace {

using Id = ResponseCache::Id;
using Entry = PendingList::Entry;

// Bytes of all ranks' standings, above which payloads do not go with them.
constexpr std::size_t most_with_payloads = std::size_t{1} << 14;

class ByName final : public Coordinator {
 public:
  ByName(Comparison& comparison, CoordinatorOptions const& options)
      : comparison_(comparison),
        cache_(options.capacity),
        timeout_(std::min(options.timeout, longest_duration)),
        timeline_(options.timeline),
        fusion_(options.fusion_bytes),
        joined_(options.runtime) {}

  bool add(Pending pending) override { return pending_.add(std::move(pending)); }
  bool empty() const override { return pending_.empty(); }
  bool listens() const override { return pending_.listens(); }

  Turn round(Channel& channel, Scheduled& next, bool callers, Operation* first) override {
    if (next_ == selected_.size()) {
      select_none();
      if (listens()) listen(channel, pending_, comparison_, entries_);
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

  // What cannot be prepared yet stays out, so that it holds up nothing else; the oldest is waited
  // for if there is nothing else.
  void find_ready() {
    pending_.find_candidates(entries_);
    std::size_t ready = 0;
    for (auto const& entry : entries_) {
      if (entry->is_ready()) entries_[ready++] = entry;
    }
    std::size_t const taken = std::max(ready, std::min<std::size_t>(1, entries_.size()));
    leaves_out_ = taken < entries_.size();
    entries_.resize(taken);
  }

  void hold_round(Channel& channel, Operation* first) {
    find_ready();
    candidates_.clear();
    for (auto const& entry : entries_) candidates_.push_back({.entry = entry});
    // Whoever watches the first one sees it wait.
    StageObserver* const observer =
        entries_.empty() ? nullptr : entries_.front()->pending.operation->observer();
    ObservedStage const whole(observer, Stage::whole);
    for (Candidate& candidate : candidates_) prepare_one(candidate);
    if (!entries_.empty()) entries_.front()->show(comparison_, entries_.size() - 1);
    ObservedStage const agreeing(observer, Stage::agree);
    TimePoint const began = channel.deadline().now();
    bool const requests = comparison_.take_request();
    auto const find_standings = [&] {
      state_standings(began);
      standings_.set(AnyFlag::requests, requests);
      standings_.set(AnyFlag::has_first, first != nullptr);
      allreduce_standings(channel);
    };
    find_standings();
    if (standings_.holds(AnyFlag::joins)) {
      add_stand_ins(channel);
      find_standings();
    } else {
      joined_.clear();
    }
    bool const has_first = standings_.holds(AnyFlag::has_first);
    failed_first_ = has_first ? comparison_.run_first(channel, first) : nullptr;
    bool const left = select_all(channel);
    end_batches(left);
    exchange_payloads(channel);
    fuse();
    put_back(channel);
    pending_.set_listens(left);
    requested_ = standings_.holds(AnyFlag::requests);
    if (!selected_.empty()) {
      selected_.front().agreement.waited = channel.deadline().now() - began;
    } else if (requests) {
      comparison_.request();  // again, with the next operation
    }
    timeline_.end_round(channel.operation(), began, candidates_.size(), selected_.size());
  }

  // Selects what runs, in an order that is the same on all ranks. Returns whether something stays
  // pending on some of them only, but for joins.
  bool select_all(Channel& channel) {
    bool const all_have_some = standings_.holds(AllFlag::has_some);
    if (all_have_some && !standings_.steps_agree()) {
      select_unlike(candidates_.front());
      return false;
    }
    for (Candidate& candidate : candidates_) {
      if (!candidate.id) continue;
      Standing const standing = standings_.of(*candidate.id);
      if (standing == Standing::ready || standing == Standing::changed) {
        select(candidate, standing == Standing::changed);
      }
    }
    bool left = standings_.holds(AnyFlag::has_unnamed) && !standings_.holds(AllFlag::has_unnamed);
    standings_.for_each_mixed([&](std::size_t id) {
      left = left || PendingList::is_given(cache_.name(static_cast<Id>(id)));
    });
    if (standings_.holds(AnyFlag::has_new) || standings_.holds(AnyFlag::late)) {
      left = exchange_names(channel) || left;
    }
    auto const priority = [&](Selected const& one) {
      auto const* const agreed = one.id ? &cache_.agreed(*one.id) : nullptr;
      return agreed != nullptr && *agreed ? (*agreed)->priority : 0;
    };
    std::ranges::sort(selected_, {}, [&](Selected const& one) {
      return std::pair(-std::int64_t{priority(one)}, one.id);
    });
    auto const is_unnamed = [](auto const& one) { return !one.entry->is_named(); };
    if (standings_.holds(AllFlag::has_unnamed) && std::ranges::none_of(selected_, is_unnamed)) {
      select_unlike(*std::ranges::find_if(candidates_, is_unnamed));
    } else if (selected_.empty() && all_have_some && standings_.holds(AllFlag::closed)) {
      select_unlike(candidates_.front());
      return false;
    }
    return left;
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
      Timeline::Preparing const preparing(timeline_, entry.pending.name);
      entry.prepared = prepare(operation);
      entry.prepared->priority = entry.pending.priority;
      if (!entry.is_named() && entry.prepared->intent == Intent::go) {
        entry.set_key(entry.prepared->proposal.key);
      }
    }
    if (!entry.known_as().empty()) candidate.id = cache_.find(entry.known_as());
  }

  // Step 4.
  void add_stand_ins(Channel& channel) {
    Join* join = nullptr;
    names_.begin(cache_.capacity());
    for (auto const& [entry, id, selected] : candidates_) {
      Prepared const& prepared = *entry->prepared;
      bool const goes = prepared.intent == Intent::go;
      if (entry->is_join() && !goes) continue;
      if (entry->is_join()) join = prepared.operation->as_join();
      std::uint64_t const key = prepared.proposal.key;
      bool const describes = goes && !joined_.knows(key);
      names_.add(
          {.name = entry->listed_as(),
           .goes = goes,
           .priority = prepared.priority,
           .key = key,
           .description = describes ? prepared.operation->description(prepared.proposal) : ""});
    }
    NamesOfRanks const all = names_.run(channel, cache_.capacity());
    joined_.update(all, channel.size());
    if (join == nullptr) return;
    for (Pending& pending : joined_.make_stand_ins(all, channel.rank(), *join)) {
      candidates_.push_back({.entry = pending_.add_stand_in(std::move(pending))});
      prepare_one(candidates_.back());
    }
  }

  // Puts back all that does not run. A Join is late only if there has been no round for so long.
  void put_back(Channel& channel) {
    for (Candidate const& candidate : candidates_) {
      if (candidate.selected) continue;
      Entry& entry = *candidate.entry;
      if (entry.pending.stands_in) {
        pending_.take(candidate.entry);
        continue;
      }
      if (entry.is_join()) entry.late_from = channel.deadline().now() + timeout_;
      entry.put_back();
    }
  }

  bool is_agreed(Prepared const& prepared, Id id) const {
    return prepared.intent == Intent::go && prepared.proposal.finite &&
           cache_.agreed(id) == proposed(prepared);
  }

  // Of this rank, for step 3.
  void state_standings(TimePoint now) {
    standings_.reset(cache_.size());
    batches_.clear();
    bool closed = !leaves_out_, has_unnamed = false, has_new = false, late = false, joins = false;
    for (auto const& [entry, id, selected] : candidates_) {
      Operation const& operation = *entry->pending.operation;
      batches_.add(operation.batch(), entry->known_as());
      closed = closed && operation.is_last();
      if (std::exchange(entry->is_new, false)) entry->late_from = now + timeout_;
      if (id) {
        standings_.set(*id, is_agreed(*entry->prepared, *id) ? Standing::ready : Standing::changed);
      }
      has_unnamed = has_unnamed || !entry->is_named();
      has_new = has_new || (!id && entry->is_named());
      late = late || entry->is_late(now);
      joins = joins || (entry->is_join() && entry->prepared->intent == Intent::go);
    }
    standings_.set(AllFlag::has_some, !candidates_.empty());
    standings_.set(AllFlag::has_unnamed, has_unnamed);
    standings_.set(AllFlag::completes, batches_.complete());
    standings_.set(AllFlag::closed, closed);
    standings_.set(AnyFlag::has_unnamed, has_unnamed);
    standings_.set(AnyFlag::has_new, has_new);
    standings_.set(AnyFlag::late, late);
    standings_.set(AnyFlag::joins, joins);
    standings_.set_batches(batches_.digest());
    standings_.set_steps(comparison_.steps_broken_off());
  }

  void allreduce_standings(Channel& channel) {
    riders_.clear();
    // What a rank knows of many names is not to be received P - 1 times.
    std::size_t const received = channel.size() * Standings::bytes(standings_.count());
    if (!expects_payload_ || received > most_with_payloads) {
      standings_.allreduce(channel);
      return;
    }
    if (candidates_.size() == 1) {
      auto const& [entry, id, selected] = candidates_.front();
      Prepared const& prepared = *entry->prepared;
      if (id && is_agreed(prepared, *id) && prepared.has_unknown_payload()) {
        riders_.set_own(*id, prepared.proposal.payload);
      }
    }
    standings_.allreduce_with(channel, riders_.own(), Riders::longest, riders_.arrived());
  }

  void select(Candidate& candidate, bool compare) {
    candidate.selected = true;
    selected_.push_back({.entry = candidate.entry, .id = candidate.id, .compare = compare});
  }

  // Step 5. Returns whether a name that has a number from now on is not pending everywhere.
  bool exchange_names(Channel& channel) {
    bool const late = standings_.holds(AnyFlag::late);
    TimePoint const now = channel.deadline().now();
    names_.begin(cache_.capacity());
    for (auto const& [entry, id, selected] : candidates_) {
      if (late ? selected : (id || !entry->is_named())) continue;
      names_.add({.name = entry->listed_as(), .late = entry->is_late(now)});
    }
    NamesOfRanks const all = names_.run(channel, cache_.capacity());
    bool left = false;
    auto const is_everywhere = [&](std::string_view name) {
      return all.holders(name).ranks.size() == static_cast<std::size_t>(channel.size());
    };
    for (std::string_view const view : all.names()) {
      std::string const name(view);
      if (PendingList::is_key(name) || cache_.find(name)) continue;
      give_number(name);
      left = left || !is_everywhere(name);
    }
    for (Candidate& candidate : candidates_) {
      if (candidate.id || !candidate.entry->is_named()) continue;
      if (!is_everywhere(candidate.entry->pending.name)) continue;
      candidate.id = cache_.find(candidate.entry->pending.name);
      select(candidate, true);
    }
    if (late) all.require_none_late(channel.size(), joined_);
    return left;
  }

  // That of a name that is pending nowhere may go to another one.
  Id give_number(std::string const& name) {
    Id const id = cache_.add(name, [&](Id other) {
      return other < standings_.count() && standings_.of(other) == Standing::absent;
    });
    if (id < standings_.count()) standings_.set(id, Standing::mixed);  // not to be given again
    return id;
  }

  // Step 6: what the others may not have.
  void select_unlike(Candidate& candidate) {
    candidate.id.reset();
    select(candidate, true);
  }

  // Decides which operations end their batches, of those that are not compared, which decides that
  // too. `left`: some stay pending, which may belong to the batches of others.
  void end_batches(bool left) {
    bool const complete = !left && standings_.holds(AllFlag::completes) &&
                          !standings_.holds(AnyFlag::has_new) && standings_.batches_agree();
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

  // Step 7. Operations whose payloads do not go together are compared, which says why.
  void exchange_payloads(Channel& channel) {
    payloads_.clear();
    for (Selected const& selected : selected_) {
      if (!selected.needs_payloads()) continue;
      Prepared const& prepared = selected.prepared();
      payloads_.push_back({.operation = prepared.operation, .payload = prepared.proposal.payload});
    }
    bool const alone = selected_.size() == 1;
    if (!payloads_.empty() || selected_.size() > 1) expects_payload_ = alone;
    auto const arrived = alone && !payloads_.empty() ? riders_.take(*selected_.front().id)
                                                     : std::span<const Riders::Bytes>();
    if (arrived.empty()) {
      gather_.run(channel, Phase::explain, payloads_);
    } else {
      gather_.merge(channel, payloads_, arrived);
    }
    auto part = payloads_.begin();
    for (Selected& selected : selected_) {
      if (!selected.needs_payloads()) continue;
      selected.agreement.payload = part->merged;
      selected.compare = !part->agrees;
      ++part;
    }
  }

  // Step 8.
  void fuse() {
    fusion_.clear();
    if (selected_.size() < 2) return;
    for (Selected const& selected : selected_) {
      auto const payload = selected.agreement.payload;
      fusion_.add(selected.compare ? nullptr : selected.prepared().operation->fusible(payload));
    }
  }

  // Step 9.
  void hand_over(Channel& channel, Scheduled& next) {
    Selected const& selected = selected_[next_];
    Entry const& entry = *selected.entry;
    next.whole.begin(entry.pending.operation->observer(), Stage::whole);
    timeline_.begin_run(entry.pending.name, entry.pending.submitted, fusion_.leader_of(next_));
    next.agreement = selected.agreement;
    if (failed_first_) {
      next.error = failed_first_;
    } else if (selected.compare) {
      compare(channel, selected, next);
    } else {
      bool const is_shown = candidates_.size() == 1 && !standings_.holds(AnyFlag::has_first);
      if (!is_shown) entry.show(comparison_, 0);
      next.agreement.fused = fusion_.led_by(next_);
    }
    if (Join* const join = entry.pending.operation->as_join()) {
      join->set_last(joined_.last());
      joined_.clear();
    }
    if (selected.id) cache_.use(*selected.id);
    if (std::exchange(requested_, false)) comparison_.add_requested();
    next.pending = take();
  }

  void compare(Channel& channel, Selected const& selected, Scheduled& next) {
    Entry const& entry = *selected.entry;
    Prepared const& prepared = *entry.prepared;
    std::optional<Id> id = selected.id;
    TimePoint const began = channel.deadline().now();
    std::optional<ResponseCache::Proposed> agreed;
    ObservedStage const comparing(&timeline_, Stage::agree);
    try {
      auto const result =
          comparison_.run(channel, prepared, entry.pending.name, /*same_name=*/id.has_value());
      next.agreement = result.agreement;
      next.agreement.waited = selected.agreement.waited + (channel.deadline().now() - began);
      if (result.alike) agreed = proposed(prepared);
      if (!id && !entry.is_named()) id = give_number(entry.known_as());
    } catch (AgreedError const&) {
      next.error = std::current_exception();
    }
    if (id) cache_.set_agreed(*id, agreed);
  }

  Comparison& comparison_;
  PendingList pending_;  // listens if a round has left something pending on some ranks only
  // Of the thread that has the turn.
  ResponseCache cache_;
  Duration const timeout_;
  Timeline& timeline_;
  Standings standings_;
  std::vector<PendingList::Iterator> entries_;
  bool leaves_out_ = false;  // this round, what is not ready
  std::vector<Candidate> candidates_;
  std::vector<Selected> selected_;  // in their order, those before next_ are handed over
  std::size_t next_ = 0;
  std::exception_ptr failed_first_;
  bool requested_ = false;  // by some rank, with this round
  PendingBatches batches_;
  std::vector<Batch const*> ended_;
  NamesAllgather names_;
  std::vector<PayloadAllgather::Part> payloads_;
  PayloadAllgather gather_;
  Fusion fusion_;
  JoinedRanks joined_;
  bool expects_payload_ = false;  // the same on all ranks
  Riders riders_;
};

}  // namespace

std::unique_ptr<Coordinator> make_coordinator(Comparison& comparison,
                                              CoordinatorOptions const& options) {
  return std::make_unique<ByName>(comparison, options);
}

Cost agreement_cost(int ranks, std::size_t payload_bytes, std::size_t names) {
  std::size_t const bytes = Standings::bytes(names);
  if (payload_bytes == 0) return census_cost(ranks, bytes);
  return allgather_cost(ranks, header_bytes + bytes + sizeof(Id) + payload_bytes);
}

}  // namespace sparsecomm
