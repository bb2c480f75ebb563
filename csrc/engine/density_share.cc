#include "engine/density_share.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace sparsecomm {
namespace {

double extent_of(SharingGroup const& group) { return static_cast<double>(group.extent); }

// The mean, of logarithms, of what the group has selected and of its share so far.
double weight_of(SharingGroup const& group) {
  return std::sqrt(static_cast<double>(group.share.agreed->entries) * group.share.factor *
                   extent_of(group));
}

// Exactly, since ranks compare what follows from it, whatever their libraries.
double to_six_bits(double factor) {
  int exponent = 0;
  double const mantissa = std::frexp(factor, &exponent);
  return std::ldexp(std::round(64 * mantissa) / 64, exponent);
}

// Of a dense exchange nothing is selected, and so nothing known.
bool takes_part(SharingGroup const& group) { return group.share.own || group.share.agreed; }

double next_magnitude(std::span<SharingGroup const> groups) {
  double sum = 0, weights = 0, largest = 0;
  for (SharingGroup const& group : groups) {
    if (!takes_part(group)) continue;
    auto const threshold = static_cast<double>(group.share.agreed->threshold);
    if (threshold <= 0) continue;  // all of its entries are wanted, or there are zeros alone
    double const weight = group.share.factor * extent_of(group);
    sum += weight * std::log(threshold);
    weights += weight;
    largest = std::max(largest, threshold);
  }
  double const former = groups.front().share.magnitude;
  if (weights == 0) return former;
  // The first one is the largest: with less, groups would send what has not been wanted of them.
  return former == 0 ? largest : std::sqrt(former * std::exp(sum / weights));
}

// What a group has no entries for goes to the others.
void share_entries(std::span<SharingGroup> groups, double density) {
  for (SharingGroup& group : groups) group.is_whole = group.extent == 0;
  for (bool found = true; std::exchange(found, false);) {
    double wanted = 0, weights = 0;
    for (SharingGroup const& group : groups) {
      if (!takes_part(group)) continue;
      wanted += (group.is_whole ? density - 1 : density) * extent_of(group);
      if (!group.is_whole) weights += weight_of(group);
    }
    auto const entries_of = [&](SharingGroup const& group) {
      if (group.is_whole) return extent_of(group);
      return std::max(1.0, wanted * weight_of(group) / weights);
    };
    for (SharingGroup& group : groups) {
      if (group.is_whole || !takes_part(group)) continue;
      group.is_whole = entries_of(group) >= extent_of(group);
      found = found || group.is_whole;
    }
    if (found) continue;
    for (SharingGroup& group : groups) {
      if (!takes_part(group) || group.extent == 0) continue;
      group.share.factor = to_six_bits(entries_of(group) / (density * extent_of(group)));
    }
  }
}

bool is_number(double value) { return std::isfinite(value) && value >= 0; }

}  // namespace

bool ShareCounts::merge(ShareCounts const& other, std::uint64_t extent) {
  require<MalformedFrame>(
      is_number(other.entries) && other.entries <= static_cast<float>(extent + 1), "a count of ",
      other.entries, " of ", extent, " entries");
  require<MalformedFrame>(is_number(other.threshold), "a threshold of ", other.threshold);
  entries += other.entries;
  threshold = std::max(threshold, other.threshold);
  return true;
}

bool share_density(std::span<SharingGroup> groups, double density) {
  auto const is_awaited = [](SharingGroup const& group) {
    return takes_part(group) && !group.share.agreed;
  };
  auto const parts = std::ranges::count_if(groups, takes_part);
  if (parts == 0 || std::ranges::any_of(groups, is_awaited)) return false;
  // A group by itself needs nothing in common.
  bool const begins = groups.front().share.magnitude == 0;
  if (begins && parts == 1) return false;
  double const magnitude = next_magnitude(groups);
  // Before, each has selected by its own threshold.
  if (!begins) share_entries(groups, density);
  for (SharingGroup& group : groups) {
    group.share.magnitude = magnitude;
    group.share.agreed.reset();
  }
  return true;
}

void validate(DensityShare const& share, std::uint64_t extent) {
  require(std::isfinite(share.factor) && share.factor > 0, "a share of ", share.factor,
          " times the density is none");
  require(is_number(share.magnitude), "a magnitude of ", share.magnitude, " that entries exceed");
  for (auto const& counts : {share.own, share.agreed}) {
    require(!counts || (is_number(counts->entries) && is_number(counts->threshold)),
            "counts that cannot be: ", counts ? counts->entries : 0, " entries, a threshold of ",
            counts ? counts->threshold : 0);
  }
  require(!share.own || share.own->entries <= static_cast<float>(extent + 1), "a count of ",
          share.own ? share.own->entries : 0, " of ", extent, " entries");
}

}  // namespace sparsecomm
