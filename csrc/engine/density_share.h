// One density for the entries of several groups: all select what exceeds the same magnitude.
//
// 1. A rank finds the threshold that each group would have by itself, for its share of the entries,
//    and selects by the magnitude that all groups have in common, once there is one.
// 2. In the group's next step the ranks add up how many entries they have selected, and learn the
//    largest of their thresholds.
// 3. Before the step after that, if this is known of all groups that were not exchanged dense, the
//    entries that the density allows are shared in proportion to what was selected, and the mean of
//    the thresholds becomes the magnitude. If more was selected than is allowed, every share is
//    less than what the group selects, so that the thresholds, and then the magnitude, rise. Both
//    move half of the way, in logarithms, since they follow two steps late.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace sparsecomm {

// What ranks have found in a step of one group.
struct ShareCounts {
  float entries = 0;    // selected by all ranks, and one more by each: 0 if none says
  float threshold = 0;  // the largest of any rank, in units of a loss scale of 1

  // A payload.
  bool merge(ShareCounts const& other, std::uint64_t extent);
};

// A group's part.
struct DensityShare {
  double factor = 1;                       // of the density
  double magnitude = 0;                    // in units of a loss scale of 1; 0: none yet
  std::optional<ShareCounts> own = {};     // of the last step, which other ranks do not know yet
  std::optional<ShareCounts> agreed = {};  // not shared by yet
};

struct SharingGroup {
  DensityShare share;
  std::uint64_t extent = 0;
  bool is_whole = false;  // for share_density() alone
};

// Step 3, of groups whose shares are the same on all ranks. Returns false if nothing changes.
bool share_density(std::span<SharingGroup> groups, double density);

// Throws InvalidArgument where a number is not finite or out of its range. `extent`: of the group.
void validate(DensityShare const& share, std::uint64_t extent);

}  // namespace sparsecomm
