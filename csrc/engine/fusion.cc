#include "engine/fusion.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace sparsecomm {

void Fusion::clear() {
  members_.clear();
  groups_.clear();
}

// What does not fit into the latest group of its kind begins another one.
void Fusion::add(Fusible* fusible) {
  std::size_t const place = members_.size();
  members_.push_back({.fusible = fusible});
  if (fusible == nullptr || fusible->terms().bytes > most_bytes_) return;
  Fusible::Terms const& terms = fusible->terms();
  auto const latest = std::ranges::find_if(groups_.rbegin(), groups_.rend(), [&](Group const& one) {
    return one.terms.goes_with(terms);
  });
  bool const fits = latest != groups_.rend() && terms.bytes <= most_bytes_ - latest->terms.bytes &&
                    terms.extent < std::numeric_limits<std::uint32_t>::max() - latest->terms.extent;
  if (!fits) {
    members_[place].leader = place;
    groups_.push_back({.terms = terms, .first = place, .last = place});
    return;
  }
  latest->terms.extent += terms.extent;
  latest->terms.bytes += terms.bytes;
  members_[place].leader = latest->first;
  members_[std::exchange(latest->last, place)].next = place;
}

std::span<Fusible* const> Fusion::led_by(std::size_t place) {
  if (place >= members_.size()) return {};
  if (members_[place].leader != place || members_[place].next == none) return {};
  together_.clear();
  for (; place != none; place = members_[place].next) {
    together_.push_back(members_[place].fusible);
  }
  return together_;
}

std::optional<std::size_t> Fusion::leader_of(std::size_t place) const {
  std::size_t const leader = place < members_.size() ? members_[place].leader : none;
  return leader == none || leader == place ? std::nullopt : std::optional(leader);
}

}  // namespace sparsecomm
