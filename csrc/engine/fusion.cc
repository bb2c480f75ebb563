#include "engine/fusion.h"

#include <algorithm>
#include <limits>

namespace sparsecomm {

void Fusion::clear() {
  members_.clear();
  groups_.clear();
}

void Fusion::add(Fusible* fusible) {
  std::size_t const place = members_.size();
  members_.push_back({fusible, alone});
  if (fusible == nullptr || fusible->terms().bytes > most_bytes_) return;
  Fusible::Terms const& terms = fusible->terms();
  auto group = std::ranges::find_if(groups_, [&](Group const& each) {
    return each.terms.goes_with(terms) && terms.bytes <= most_bytes_ - each.terms.bytes &&
           terms.extent < std::numeric_limits<std::uint32_t>::max() - each.terms.extent;
  });
  if (group == groups_.end()) {
    group = groups_.insert(group, {.terms = terms, .leader = place, .members = 1});
  } else {
    group->terms.extent += terms.extent;
    group->terms.bytes += terms.bytes;
    ++group->members;
  }
  members_[place].group = static_cast<std::size_t>(group - groups_.begin());
}

std::span<Fusible* const> Fusion::led_by(std::size_t place) {
  if (place >= members_.size()) return {};
  std::size_t const group = members_[place].group;
  if (group == alone || groups_[group].leader != place || groups_[group].members == 1) return {};
  together_.clear();
  for (Member const& member : members_) {
    if (member.group == group) together_.push_back(member.fusible);
  }
  return together_;
}

}  // namespace sparsecomm
