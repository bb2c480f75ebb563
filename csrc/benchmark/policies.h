// The policies of aggregation that `sparsecomm bench ina` compares, ours among them.
#pragma once

#include <span>
#include <string_view>

#include "ina/policy.h"

namespace sparsecomm {

struct PolicyEntry {
  std::string_view name;
  InaPolicy const& policy;
};

// ina         Ours.
// ina_dense   Streams every block, zeros included, as plain in-network aggregation does. The votes
//             for blocks stay, 4 bytes for each.
// omnireduce  Next pointers, see next_pointers.h.
std::span<PolicyEntry const> policies();

// Throws InvalidArgument with the names that there are.
InaPolicy const& policy_named(std::string_view name);

}  // namespace sparsecomm
