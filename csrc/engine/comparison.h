// Compares on all ranks what they are about to do, before an operation moves data.
//
// 1. Prepare the operation, which makes its proposal; one that fails or was cancelled has none.
// 2. Bruck allgather of fingerprints: two hashes, flags, what is intended, and the payload.
// 3. Merge the payloads, in the order of the ranks.
// 4. Only where fingerprints differ or payloads do not go together: allgather of the texts, from
//    which every rank makes the same error.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/channel.h"
#include "collectives/frame_allgather.h"
#include "engine/operation.h"
#include "engine/proposal.h"

namespace sparsecomm {

class StallWatch;  // engine/stall.h

class Comparison {
 public:
  // `watch`: is told what is proposed; null: nobody is.
  Comparison(int ranks, StallWatch* watch) : watch_(watch), intents_(ranks) {}

  // `operation`: null where this rank has cancelled it. Throws the same Mismatch or Cancelled on
  // every rank where proposals differ, one could not be made, or a rank has cancelled.
  Agreement run(Channel& channel, Operation* operation);

  // Lets every rank know, with the next comparison, that this one has a request. From any thread.
  void request() { requests_ = true; }
  // Whether any rank has had one since the last call.
  bool take_requested() { return requested_.exchange(false); }

 private:
  // Valid until the next one.
  std::span<const FrameView> allgather(Channel& channel, Phase phase,
                                       std::span<const std::byte> payload, std::size_t capacity);
  [[noreturn]] void explain(Channel& channel, std::string_view own);

  StallWatch* watch_;
  FrameAllgather gather_;
  std::vector<std::byte> frame_;
  std::array<std::byte, max_payload_bytes> payload_{};  // merged
  std::vector<std::uint32_t> intents_;                  // [rank], as they came in the fingerprints
  std::atomic<bool> requests_ = false, requested_ = false;
};

// One comparison of ranks that agree: a Bruck allgather of fingerprints, each with a payload.
Cost agreement_cost(int ranks, std::size_t payload_bytes);

}  // namespace sparsecomm
