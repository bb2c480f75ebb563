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
// 3. Allreduce the standings. What is pending on all ranks runs, in the order of the numbers.
// 4. If a rank has names without numbers, or something is late: allgather of the names that are
//    pending and do not run. New ones get their numbers in the order of the ranks. What is late on
//    one rank and not pending on another ends the communicator.
// 5. If all ranks have operations without names pending and no two are alike, those are compared,
//    which tells all ranks what differs.
// 6. Allgather the payloads of those that run as last agreed and have any.
// 7. One after another, run them; what is changed is compared when its turn comes (comparison.h),
//    which tells all ranks what is wrong, or makes it agreed.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "collectives/allgather_bytes.h"
#include "collectives/patterns.h"
#include "engine/coordinator.h"
#include "engine/response_cache.h"
#include "engine/standings.h"

namespace sparsecomm {
namespace {

using Id = ResponseCache::Id;

// Before names in the cache, of operations that have one and of keys of those that have none.
constexpr char named = '=', unnamed = '#';
// Of one that cannot be prepared.
constexpr std::string_view no_key(&unnamed, 1);
constexpr std::uint64_t longest_names = std::uint64_t{64} << 20;  // of one rank, in bytes

std::string name_of_key(std::uint64_t key) {
  std::array<char, sizeof key> bytes{};
  std::memcpy(bytes.data(), &key, sizeof key);
  return unnamed + std::string(bytes.data(), bytes.size());
}

// Of what ranks must agree on, but for what evolves from what they have agreed on.
std::uint64_t digest_of(Prepared const& prepared) {
  Proposal const& proposal = prepared.proposal;
  return Digest()
      .add(proposal.key)
      .add(proposal.version)
      .add(proposal.payload.size())
      .add(proposal.payload_is_known)
      .add(prepared.ends_alone())
      .value();
}

struct Entry {
  Pending pending;
  // Of the thread whose turn it is:
  std::string name = {};  // in the cache; empty: it has none yet
  std::optional<Prepared> prepared = {};
  TimePoint late_from{};
  bool is_new = true;  // it has not stood in a round

  bool is_named() const { return !pending.name.empty(); }
  bool is_cancelled() const { return pending.ticket && pending.ticket->cancelled(); }
};
using Entries = std::list<Entry>;

// One that is pending and takes part in the round.
struct Standee {
  Entries::iterator entry;
  std::optional<Id> id = {};
  bool runs = false;
};

// One that is to run.
struct Runner {
  Entries::iterator entry;
  Id id;
  bool compare = false;
  Agreement agreement = {};
  std::size_t payload_begin = 0;

  Prepared const& prepared() const { return *entry->prepared; }
  bool has_payload() const {
    Proposal const& proposal = prepared().proposal;
    return !compare && !proposal.payload_is_known && !proposal.payload.empty();
  }
};
// After all that have one.
constexpr Id no_id = std::numeric_limits<Id>::max();

// What is pending and does not run, of all ranks.
class NamesOfRanks {
 public:
  struct Holders {
    std::vector<int> ranks;
    bool late = false;
  };

  static void append(std::vector<std::byte>& list, std::string_view name, bool late) {
    Head const head{.length = static_cast<std::uint32_t>(name.size()), .late = late};
    for (auto const bytes : {std::as_bytes(std::span(&head, 1)), std::as_bytes(std::span(name))}) {
      list.insert(list.end(), bytes.begin(), bytes.end());
    }
  }
  // Throws MalformedFrame where these are not what append() makes.
  void read(int rank, std::span<const std::byte> list) {
    while (!list.empty()) {
      Head head{};
      require<MalformedFrame>(list.size() >= sizeof head, "names end amid one");
      std::memcpy(&head, list.data(), sizeof head);
      list = list.subspan(sizeof head);
      require<MalformedFrame>(head.length > 0 && head.length <= list.size() && head.late <= 1,
                              "a name of ", head.length, " bytes where ", list.size(),
                              " are left, late is ", head.late);
      std::string_view const name(reinterpret_cast<char const*>(list.data()), head.length);
      require<MalformedFrame>(name.front() == named || name.front() == unnamed,
                              "a name that begins with character ", int{name.front()});
      list = list.subspan(head.length);
      auto const [place, is_first] = holders_.try_emplace(name);
      Holders& holders = place->second;
      require<MalformedFrame>(is_first || holders.ranks.back() != rank, "a name comes twice");
      if (is_first) names_.push_back(name);
      holders.ranks.push_back(rank);
      holders.late = holders.late || head.late != 0;
    }
  }
  // In the order in which they were read first.
  std::span<const std::string_view> names() const { return names_; }
  Holders const& holders(std::string_view name) const { return holders_.at(name); }

 private:
  struct Head {
    std::uint32_t length, late;
  };

  std::vector<std::string_view> names_;
  std::unordered_map<std::string_view, Holders> holders_;
};

class Cached final : public Coordinator {
 public:
  Cached(Comparison& comparison, std::size_t capacity, Duration timeout)
      : comparison_(comparison), cache_(capacity), timeout_(std::min(timeout, longest_duration)) {}

  bool add(Pending pending) override {
    std::lock_guard const lock(mutex_);
    if (!pending.name.empty()) {
      for (Entry const& entry : pending_) {
        require(entry.pending.name != pending.name || entry.is_cancelled(), "an operation named '",
                pending.name, "' is pending already; wait for it, or choose another name");
      }
    }
    if (spare_.empty()) spare_.emplace_back();
    spare_.front().pending = std::move(pending);
    pending_.splice(pending_.end(), spare_, spare_.begin());
    return listens_;
  }

  bool empty() const override {
    std::lock_guard const lock(mutex_);
    return pending_.empty();
  }

  bool listens() const override {
    std::lock_guard const lock(mutex_);
    return listens_;
  }

  Turn round(Channel& channel, Scheduled& next, bool callers) override {
    if (runners_.empty()) {
      if (listens()) listen(channel);
      hold_round(channel);
    }
    if (runners_.empty()) return Turn::nothing;
    if (callers && runners_.front().entry->pending.ticket) return Turn::others;
    hand_over(channel, next);
    return Turn::taken;
  }

  void add_ticket(std::shared_ptr<Ticket> ticket) override {
    std::lock_guard const lock(mutex_);
    auto const entry = std::ranges::find_if(
        pending_, [](Entry const& candidate) { return !candidate.pending.ticket; });
    bool const runs =
        std::ranges::any_of(runners_, [&](Runner const& runner) { return runner.entry == entry; });
    if (runs) ticket->begin();
    entry->pending.ticket = std::move(ticket);
  }

  Pending take() override {
    std::lock_guard const lock(mutex_);
    auto entry = pending_.begin();
    if (!runners_.empty()) {
      entry = runners_.front().entry;
      runners_.erase(runners_.begin());
    }
    if (entry->pending.ticket) entry->pending.ticket->begin();
    Pending taken = std::move(entry->pending);
    *entry = {};
    spare_.splice(spare_.end(), pending_, entry);
    return taken;
  }

 private:
  // Calls f(entry) for the first of each name, and of those without one; with the lock held.
  template <class F>
  void for_each_standing(F&& f) {
    bool has_unnamed = false;
    cancelled_.clear();
    for (auto entry = pending_.begin(); entry != pending_.end(); ++entry) {
      if (!entry->is_named()) {
        if (std::exchange(has_unnamed, true)) continue;
      } else {
        std::string_view const name = entry->pending.name;
        if (std::ranges::find(cancelled_, name) != cancelled_.end()) continue;
        if (entry->is_cancelled()) cancelled_.push_back(name);
      }
      f(entry);
    }
  }

  // Step 1, after a round that has left something.
  void listen(Channel& channel) {
    TimePoint const began = channel.deadline().now();
    for (;;) {
      bool has_any = false, has_new = false;
      TimePoint late_from = TimePoint::max();
      {
        std::lock_guard const lock(mutex_);
        for_each_standing([&](Entries::iterator entry) {
          has_any = true;
          has_new = has_new || entry->is_new;
          if (!entry->is_new) late_from = std::min(late_from, entry->late_from);
        });
      }
      TimePoint const now = channel.deadline().now();
      if (has_new || late_from <= now) break;
      Duration const left = has_any ? late_from - now : longest_duration;
      auto const waiting = channel.waiting_for(has_any ? everybody : nobody);
      if (channel.idle(channel.deadline().restarted(left)) == Woken::rung) break;
    }
    for (int distance = 1; distance < channel.size(); distance *= 2) {
      channel.ring((channel.rank() + distance) % channel.size());
    }
    channel.postpone(channel.deadline().now() - began);
  }

  void hold_round(Channel& channel) {
    find_standees();
    // Whoever watches the first one sees it wait.
    StageObserver* const observer =
        standees_.empty() ? nullptr : standees_.front().entry->pending.operation->observer();
    ObservedStage const whole(observer, Stage::whole);
    for (Standee& standee : standees_) prepare_one(standee);
    ObservedStage const agreeing(observer, Stage::agree);
    TimePoint const began = channel.deadline().now();
    state_standings(began);
    standings_.allreduce(channel);
    if (!standings_.holds(AgreedFlag::nothing_asked)) comparison_.add_requested();
    for (Standee& standee : standees_) {
      if (!standee.id) continue;
      Standing const standing = standings_.of(*standee.id);
      if (standing == Standing::ready || standing == Standing::changed) {
        schedule(standee, standing == Standing::changed);
      }
    }
    bool left = false, left_unnamed = false;  // of what is pending on some ranks
    auto const leave = [&](std::string_view name) {
      (name.front() == named ? left : left_unnamed) = true;
    };
    standings_.for_each_mixed([&](std::size_t id) { leave(cache_.name(static_cast<Id>(id))); });
    if (!standings_.holds(AgreedFlag::nothing_new) || !standings_.holds(AgreedFlag::nothing_late)) {
      exchange_names(channel, leave);
    }
    std::ranges::sort(runners_, {}, &Runner::id);
    bool const unlike = schedule_unlike();
    left = left || (left_unnamed && !unlike);
    end_batches(left);
    exchange_payloads(channel);
    if (!runners_.empty()) runners_.front().agreement.waited = channel.deadline().now() - began;
    std::lock_guard const lock(mutex_);
    for (Standee const& standee : standees_) {
      if (!standee.runs && standee.entry->pending.ticket) standee.entry->pending.ticket->put_back();
    }
    listens_ = left;
  }

  void find_standees() {
    standees_.clear();
    std::lock_guard const lock(mutex_);
    for_each_standing([&](Entries::iterator entry) { standees_.push_back({.entry = entry}); });
  }

  // Step 2.
  void prepare_one(Standee& standee) {
    Entry& entry = *standee.entry;
    Operation* const operation = entry.pending.operation.get();
    if (entry.pending.ticket && entry.pending.ticket->begin()) {
      entry.prepared = prepare(nullptr);
    } else if (!entry.prepared) {
      bool const is_first = &standee == standees_.data();
      ObservedStage const whole(is_first ? nullptr : operation->observer(), Stage::whole);
      entry.prepared = prepare(operation);
    }
    if (!entry.name.empty()) {
      // It has one already.
    } else if (entry.is_named()) {
      entry.name = named + entry.pending.name;
    } else if (entry.prepared->intent == Intent::go) {
      entry.name = name_of_key(entry.prepared->proposal.key);
    }
    if (!entry.name.empty()) standee.id = cache_.find(entry.name);
  }

  bool is_agreed(Prepared const& prepared, Id id) const {
    return prepared.intent == Intent::go && prepared.proposal.finite &&
           cache_.agreed(id) == digest_of(prepared);
  }

  // Of this rank, for step 3.
  void state_standings(TimePoint now) {
    standings_.reset(cache_.size());
    bool has_unnamed = false, has_new = false, late = false;
    for (auto const& [entry, id, runs] : standees_) {
      if (std::exchange(entry->is_new, false)) entry->late_from = now + timeout_;
      if (id) {
        standings_.set(*id, is_agreed(*entry->prepared, *id) ? Standing::ready : Standing::changed);
      }
      has_unnamed = has_unnamed || !entry->is_named();
      has_new = has_new || (!id && !entry->name.empty());
      late = late || entry->late_from <= now;
    }
    auto const [completes, digest] = batches();
    auto const set_if = [&](AgreedFlag flag, bool holds) {
      if (holds) standings_.set(flag);
    };
    set_if(AgreedFlag::has_unnamed, has_unnamed);
    set_if(AgreedFlag::completes, completes);
    set_if(AgreedFlag::nothing_new, !has_new);
    set_if(AgreedFlag::nothing_asked, !comparison_.take_request());
    set_if(AgreedFlag::nothing_late, !late);
    standings_.set_digest(digest);
  }

  struct Batches {
    bool complete;         // all that is left of those that have something pending is pending
    std::uint64_t digest;  // of which operation belongs to which
  };
  Batches batches() {
    parts_.clear();
    for (Standee const& standee : standees_) {
      Batch const* const batch = standee.entry->pending.operation->batch();
      if (batch == nullptr || batch == &batch_of_one) continue;
      auto part = std::ranges::find(parts_, batch, &Part::batch);
      if (part == parts_.end()) part = parts_.insert(part, {.batch = batch});
      ++part->pending;
      part->names += Digest().add(standee.entry->name).value();
    }
    Batches all{.complete = true, .digest = 0};
    for (Part const& part : parts_) {
      all.complete = all.complete && part.batch->left() == part.pending;
      all.digest += Digest().add(part.names).value();
    }
    return all;
  }

  void schedule(Standee& standee, bool compare) {
    standee.runs = true;
    runners_.push_back(
        {.entry = standee.entry, .id = standee.id.value_or(no_id), .compare = compare});
  }

  // Step 4. Calls leave(name) for each that has a number from now on but is not pending everywhere.
  template <class Leave>
  void exchange_names(Channel& channel, Leave&& leave) {
    TimePoint const now = channel.deadline().now();
    list_.clear();
    for (auto const& [entry, id, runs] : standees_) {
      if (runs) continue;
      std::string_view const name = entry->name.empty() ? no_key : std::string_view(entry->name);
      NamesOfRanks::append(list_, name, entry->late_from <= now);
    }
    auto const lists = names_.run(channel, list_);
    NamesOfRanks all;
    for (int rank = 0; rank < channel.size(); ++rank) {
      channel.decode_from(rank, [&] { all.read(rank, lists[static_cast<std::size_t>(rank)]); });
    }
    auto const ranks = static_cast<std::size_t>(channel.size());
    std::size_t const counted = cache_.size();
    for (std::string_view const name : all.names()) {
      if (name == no_key || cache_.find(name)) continue;
      Id const id = cache_.add(std::string(name), [&](Id other) {
        return other < counted && standings_.of(other) == Standing::absent;
      });
      if (id < counted) standings_.set(id, Standing::mixed);  // not to be given again
      if (all.holders(name).ranks.size() < ranks) leave(name);
    }
    for (Standee& standee : standees_) {
      if (standee.runs || standee.entry->name.empty()) continue;
      if (all.holders(standee.entry->name).ranks.size() < ranks) continue;
      standee.id = cache_.find(standee.entry->name);
      schedule(standee, true);
    }
    end_if_late(channel, all);
  }

  // Throws NotSubmitted, the same on all ranks, if what is late on one rank is pending on others
  // only.
  void end_if_late(Channel const& channel, NamesOfRanks const& all) const {
    std::vector<int> holders;  // of operations without names
    bool late = false;
    auto const require_all = [&](std::string const& what, std::vector<int> const& present) {
      std::vector<int> missing;
      for (int rank = 0; rank < channel.size(); ++rank) {
        if (std::ranges::find(present, rank) == present.end()) missing.push_back(rank);
      }
      if (missing.empty()) return;
      std::string const text = concat(what, " was submitted by ", join_ranks(present), " only");
      throw NotSubmitted(text, std::move(missing));
    };
    for (std::string_view const name : all.names()) {
      auto const& [ranks, is_late] = all.holders(name);
      if (name.front() == named) {
        if (is_late) require_all(concat("operation '", name.substr(1), "'"), ranks);
      } else {
        holders.insert(holders.end(), ranks.begin(), ranks.end());
        late = late || is_late;
      }
    }
    if (late) require_all("an operation without a name", holders);
  }

  // Step 5. Returns whether it has scheduled one.
  bool schedule_unlike() {
    auto const is_unnamed = [](auto const& one) { return !one.entry->is_named(); };
    if (!standings_.holds(AgreedFlag::has_unnamed) || std::ranges::any_of(runners_, is_unnamed)) {
      return false;
    }
    Standee& first = *std::ranges::find_if(standees_, is_unnamed);
    first.id.reset();
    schedule(first, true);
    return true;
  }

  // Tells those that run as last agreed whether their batches end with them. `left`: something
  // stays pending, so that it is not known of which batches that is.
  void end_batches(bool left) {
    bool const complete = !left && standings_.holds(AgreedFlag::completes) &&
                          standings_.holds(AgreedFlag::nothing_new) && standings_.digests_agree();
    parts_.clear();
    for (auto runner = runners_.rbegin(); runner != runners_.rend(); ++runner) {
      Batch const* const batch = runner->entry->pending.operation->batch();
      if (batch == &batch_of_one) {
        runner->agreement.ends_batch = true;
      } else if (complete && batch != nullptr &&
                 std::ranges::find(parts_, batch, &Part::batch) == parts_.end()) {
        parts_.push_back({.batch = batch});
        runner->agreement.ends_batch = true;
      }
    }
  }

  // Step 6. Where payloads do not go together the operation is compared, which says why.
  void exchange_payloads(Channel& channel) {
    payloads_.clear();
    for (Runner& runner : runners_) {
      if (!runner.has_payload()) continue;
      auto const payload = runner.prepared().proposal.payload;
      runner.payload_begin = payloads_.size();
      payloads_.insert(payloads_.end(), payload.begin(), payload.end());
    }
    if (payloads_.empty()) return;
    auto const frame = frame_.take(header_bytes + payloads_.size());
    encode_bytes(channel.stamp(), payloads_, frame);
    auto const frames = gather_.run(channel, Phase::explain, frame, frame.size());
    merged_.assign(payloads_.size(), std::byte{0});
    for (int rank = 0; rank < channel.size(); ++rank) {
      channel.decode_from(rank, [&] {
        auto const arrived = frames[static_cast<std::size_t>(rank)].values;
        require<MalformedFrame>(arrived.size() == merged_.size(), "payloads of ", arrived.size(),
                                " bytes instead of ", merged_.size());
        for (Runner& runner : runners_) {
          if (!runner.has_payload()) continue;
          std::size_t const size = runner.prepared().proposal.payload.size();
          auto const merged = std::span(merged_).subspan(runner.payload_begin, size);
          runner.agreement.payload = merged;
          runner.compare = !runner.prepared().operation->merge(
              merged, arrived.subspan(runner.payload_begin, size));
        }
      });
    }
  }

  // Step 7.
  void hand_over(Channel& channel, Scheduled& next) {
    Runner const& runner = runners_.front();
    Prepared const& prepared = runner.prepared();
    next.whole.begin(runner.entry->pending.operation->observer(), Stage::whole);
    next.agreement = runner.agreement;
    if (runner.compare) {
      compare(channel, runner, next);
    } else {
      comparison_.show(prepared.proposal);
    }
    if (runner.id != no_id) cache_.use(runner.id);
    next.pending = take();
  }

  void compare(Channel& channel, Runner const& runner, Scheduled& next) {
    TimePoint const began = channel.deadline().now();
    std::optional<std::uint64_t> agreed;
    try {
      auto const result = comparison_.run(channel, runner.prepared());
      next.agreement = result.agreement;
      next.agreement.waited = runner.agreement.waited + (channel.deadline().now() - began);
      if (result.alike) agreed = digest_of(runner.prepared());
    } catch (AgreedError const&) {
      next.error = std::current_exception();
    }
    if (runner.id != no_id) cache_.set_agreed(runner.id, agreed);
  }

  // A batch in a round.
  struct Part {
    Batch const* batch;
    std::size_t pending = 0;
    std::uint64_t names = 0;  // the sum of their digests
  };

  Comparison& comparison_;
  mutable std::mutex mutex_;  // guards what follows
  Entries pending_, spare_;
  bool listens_ = false;  // a round has left something pending, on some ranks only
  // Of the thread whose turn it is.
  ResponseCache cache_;
  Duration const timeout_;
  Standings standings_;
  std::vector<Standee> standees_;
  std::vector<Runner> runners_;  // in their order
  std::vector<std::string_view> cancelled_;
  std::vector<Part> parts_;
  std::vector<std::byte> list_, payloads_, merged_;
  BytesAllgather names_{longest_names};
  ByteBuffer frame_;
  FrameAllgather gather_;
};

}  // namespace

std::unique_ptr<Coordinator> make_cached(Comparison& comparison, std::size_t capacity,
                                         Duration timeout) {
  return std::make_unique<Cached>(comparison, capacity, timeout);
}

}  // namespace sparsecomm
