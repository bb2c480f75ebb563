// Operations as a coordinator's round has them.
#pragma once

#include <optional>

#include "engine/comparison.h"
#include "engine/pending_list.h"
#include "engine/response_cache.h"

namespace sparsecomm {

// One that is pending and takes part in the round.
struct Candidate {
  PendingList::Iterator entry;
  std::optional<ResponseCache::Id> id = {};
  bool selected = false;
};

// One that runs.
struct Selected {
  PendingList::Iterator entry;
  std::optional<ResponseCache::Id> id;  // none: it differs from the others'
  bool compare = false;
  Agreement agreement = {};

  Prepared const& prepared() const { return *entry->prepared; }
  bool needs_payloads() const { return !compare && prepared().has_unknown_payload(); }
};

inline ResponseCache::Proposed proposed(Prepared const& prepared) {
  Proposal const& proposal = prepared.proposal;
  return {.key = proposal.key,
          .version = proposal.version,
          .changing = proposal.version ? 0 : proposal.changing,
          .payload_bytes = proposal.payload.size(),
          .payload_is_known = proposal.payload_is_known,
          .ends_alone = prepared.ends_alone(),
          .priority = prepared.priority};
}

}  // namespace sparsecomm
