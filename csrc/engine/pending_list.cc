#include "engine/pending_list.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace sparsecomm {

bool PendingList::add(Pending pending) {
  require(pending.name.size() <= longest_name, "an operation's name takes ", pending.name.size(),
          " bytes, must take at most ", longest_name);
  require(!pending.name.starts_with(key_mark), "the operation's name '", pending.name,
          "' begins with '", key_mark, "'; choose another one");
  if (pending.operation->as_join() != nullptr) pending.name = Join::name;
  std::lock_guard const lock(mutex_);
  require(entries_.size() < most_pending, entries_.size(),
          " operations are pending, no more may be; wait for some of them");
  require(join_ == nullptr || join_->is_cancelled(),
          "this rank has joined; wait until all others have, before anything else is submitted");
  auto const same = pending.name.empty() ? by_name_.end() : by_name_.find(pending.name);
  if (same != by_name_.end()) {
    require(same->second->is_cancelled(), "an operation named '", pending.name,
            "' is pending already; wait for it, or choose another name");
    by_name_.erase(same);  // its key is the other one's
  }
  Entry const& entry = *append(std::move(pending));
  if (entry.is_join()) join_ = &entry;
  return listens_;
}

PendingList::Iterator PendingList::add_stand_in(Pending pending) {
  std::lock_guard const lock(mutex_);
  return append(std::move(pending));
}

// With the lock held.
PendingList::Iterator PendingList::append(Pending pending) {
  if (spare_.empty()) spare_.emplace_back();
  auto const entry = spare_.begin();
  entry->pending = std::move(pending);
  if (entry->is_named() && !entry->pending.stands_in) {
    by_name_.emplace(entry->pending.name, &*entry);
  }
  entries_.splice(entries_.end(), spare_, entry);
  ++pending_;
  return entry;
}

PendingList::Iterator PendingList::first() {
  std::lock_guard const lock(mutex_);
  return entries_.begin();
}

void PendingList::find_candidates(std::vector<Iterator>& candidates) {
  std::lock_guard const lock(mutex_);
  candidates.clear();
  cancelled_.clear();
  bool has_unnamed = false, has_others = false;
  auto join = entries_.end();
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (&*entry == join_) {
      join = entry;
      continue;
    }
    has_others = has_others || !entry->is_cancelled();
    if (!entry->is_named()) {
      if (std::exchange(has_unnamed, true)) continue;
    } else {
      // Another one of the same name can only be behind one that was cancelled.
      if (cancelled_.contains(entry->pending.name)) continue;
      if (entry->is_cancelled()) cancelled_.insert(entry->pending.name);
    }
    candidates.push_back(entry);
  }
  if (join != entries_.end() && !has_others && !cancelled_.contains(Join::name)) {
    candidates.push_back(join);
  }
}

PendingList::Iterator PendingList::add_ticket(std::shared_ptr<Ticket> ticket) {
  std::lock_guard const lock(mutex_);
  auto const entry = std::ranges::find_if(
      entries_, [](Entry const& candidate) { return !candidate.pending.ticket; });
  entry->pending.ticket = std::move(ticket);
  return entry;
}

Pending PendingList::take(Iterator entry) {
  std::lock_guard const lock(mutex_);
  entry->begin();
  if (entry->is_named()) {
    auto const same = by_name_.find(entry->pending.name);
    if (same != by_name_.end() && same->second == &*entry) by_name_.erase(same);
  }
  if (join_ == &*entry) join_ = nullptr;
  --pending_;
  spare_.splice(spare_.end(), entries_, entry);
  return entry->release();
}

}  // namespace sparsecomm
