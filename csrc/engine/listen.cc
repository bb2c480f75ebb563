#include "engine/listen.h"

#include <algorithm>
#include <chrono>

namespace sparsecomm {

void listen(Channel& channel, PendingList& pending, Comparison const& comparison,
            std::vector<PendingList::Iterator>& candidates) {
  TimePoint const began = channel.deadline().now();
  for (;;) {
    pending.find_candidates(candidates);
    PendingList::Entry const* waits = nullptr;
    bool has_new = false, comes = false;
    TimePoint late_from = TimePoint::max();
    for (auto const& entry : candidates) {
      (entry->is_ready() ? has_new : comes) |= entry->is_new;
      if (entry->is_new || entry->is_cancelled()) continue;
      if (waits == nullptr) waits = &*entry;
      late_from = std::min(late_from, entry->late_from);
    }
    TimePoint const now = channel.deadline().now();
    if (has_new || late_from <= now) break;
    if (waits != nullptr) waits->show(comparison, candidates.size() - 1);
    Duration left = waits != nullptr ? late_from - now : longest_duration;
    if (comes) left = std::min<Duration>(left, std::chrono::milliseconds(1));
    auto const waiting = channel.waiting_for(waits != nullptr ? everybody : anybody);
    if (channel.idle(channel.deadline().restarted(left)) == Woken::rung) break;
  }
  for (int distance = 1; distance < channel.size(); distance *= 2) {
    channel.ring((channel.rank() + distance) % channel.size());
  }
  channel.postpone(channel.deadline().now() - began);
}

}  // namespace sparsecomm
