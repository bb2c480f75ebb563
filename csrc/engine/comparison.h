// Compares on all ranks what they are about to do, before an operation moves data.
//
// 1. Prepare the operation, which makes its proposal; one that fails or was cancelled has none.
//    This may be done long before the rest.
// 2. Bruck allgather of fingerprints: two hashes, flags, what is intended, and the payload.
// 3. Merge the payloads, in the order of the ranks.
// 4. Only where fingerprints differ or payloads do not go together: allgather of the texts, from
//    which every rank makes the same error.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/channel.h"
#include "collectives/frame_allgather.h"
#include "engine/operation.h"
#include "engine/proposal.h"

namespace sparsecomm {

class StallWatch;  // engine/stall.h

enum class Intent : std::uint32_t { go = 0, failed = 1, cancelled = 2 };

// An operation as this rank is about to run it.
struct Prepared {
  Operation* operation = nullptr;  // null: this rank has cancelled it
  Intent intent = Intent::cancelled;
  Proposal proposal = {};
  std::string failure = {};  // why it cannot be proposed
  int priority = 0;          // ranks must agree on it

  bool ends_alone() const { return operation != nullptr && operation->batch() == &batch_of_one; }
  bool has_unknown_payload() const {
    return !proposal.payload_is_known && !proposal.payload.empty();
  }
};

// Step 1. `operation`: null if it was cancelled.
Prepared prepare(Operation* operation);

class Comparison {
 public:
  // `watch`: is told what is proposed; null: nobody is.
  Comparison(int ranks, StallWatch* watch) : watch_(watch), intents_(ranks) {}

  struct Result {
    Agreement agreement;
    // On all ranks the operation is a batch of its own, or on none, and all of them know the
    // others' payloads, or none does.
    bool alike = true;
  };

  // Steps 2 to 4. Throws the same Mismatch or Cancelled on every rank where proposals differ, one
  // could not be made, or a rank has cancelled.
  // `name`: as for show(). `same_name`: it is the same on all ranks; false: ranks compare it too.
  Result run(Channel& channel, Prepared const& prepared, std::string_view name = {},
             bool same_name = true);

  // Compares and runs what goes before all else, where any rank has it; `first`: null on those that
  // have not. Returns what is then wrong on all ranks alike, if anything is.
  std::exception_ptr run_first(Channel& channel, Operation* first);

  // Tells the watch, if there is one, what this rank is at.
  // `name`: of the operation, may be empty. `others`: so many, which are not shown, wait with it.
  void show(Proposal const& proposal, std::string_view name = {}, std::size_t others = 0) const;

  // Operations of different numbers of steps must not meet. Not while any is pending.
  void set_steps_broken_off(std::uint64_t steps) { steps_broken_off_ = steps; }
  std::uint64_t steps_broken_off() const { return steps_broken_off_; }

  // Lets every rank know, with the next comparison, that this one has a request. From any thread.
  void request() { requests_ = true; }
  // Takes this rank's own, for whoever tells the others instead.
  bool take_request() { return requests_ && requests_.exchange(false); }
  void add_requested() { requested_ = true; }
  // Whether any rank has had one since the last call.
  bool take_requested() { return requested_ && requested_.exchange(false); }

 private:
  // Valid until the next one.
  std::span<const FrameView> allgather(Channel& channel, Phase phase,
                                       std::span<const std::byte> payload, std::size_t capacity);
  [[noreturn]] void explain(Channel& channel, std::string_view own, std::string_view name);

  StallWatch* watch_;
  FrameAllgather gather_;
  std::vector<std::byte> frame_;
  std::array<std::byte, max_payload_bytes> payload_{};  // merged
  std::vector<std::uint32_t> intents_;                  // [rank], as they came in the fingerprints
  std::atomic<bool> requests_ = false, requested_ = false;
  std::atomic<std::uint64_t> steps_broken_off_ = 0;
};

}  // namespace sparsecomm
