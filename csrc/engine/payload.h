// The payloads of proposals: plain structs, copied into bytes and back. merge() takes another
// rank's into its own, as Operation::merge() does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "engine/density_share.h"
#include "engine/proposal.h"

namespace sparsecomm {

// The unit of what a rank contributes. Ranks that name one must agree on it; 0: this one takes that
// of the others.
struct LossScale {
  double value = 0;

  bool merge(LossScale const& other);
  // Formats a field of changing_fields(), for a rank that takes `others` if it names none; empty
  // where nobody names one.
  std::string field(LossScale const& others) const;
};

// Entries that ranks contribute to a vector of fewer than 2^32.
struct EntryCounts {
  std::uint32_t most = 0;         // of any rank
  std::uint32_t most_blocks = 0;  // that hold anything, of any rank; 0: they were not counted
  std::uint64_t total = 0;

  explicit EntryCounts(std::uint64_t entries = 0, std::uint64_t blocks = 0)
      : most(static_cast<std::uint32_t>(entries)),
        most_blocks(static_cast<std::uint32_t>(blocks)),
        total(entries) {}
  bool merge(EntryCounts const& other, std::uint64_t extent);
};

// A step of a gradient's exchange, and what a plan learns from the previous one: how long it took,
// and how many entries were selected, at most on any rank; 0: not known.
struct StepPayload {
  LossScale loss_scale = {};
  float previous_seconds = 0;
  std::uint32_t previous_entries = 0;

  bool merge(StepPayload const& other, std::uint64_t extent);
};

// The same, of a group that shares a density with others.
struct SharingPayload {
  StepPayload step = {};
  ShareCounts counts = {};

  bool merge(SharingPayload const& other, std::uint64_t extent);
};

template <class P>
std::span<const std::byte> payload_of(P const& payload) {
  static_assert(std::is_trivially_copyable_v<P> && sizeof(P) <= max_payload_bytes);
  return std::as_bytes(std::span(&payload, 1));
}

template <class P>
P read_payload(std::span<const std::byte> bytes) {
  static_assert(std::is_trivially_copyable_v<P> && sizeof(P) <= max_payload_bytes);
  require<MalformedFrame>(bytes.size() == sizeof(P), "a payload of ", bytes.size(),
                          " bytes instead of ", sizeof(P));
  P payload;
  std::memcpy(&payload, bytes.data(), sizeof payload);
  return payload;
}

// Operation::merge() for payloads of this type; `limits` are handed to its merge().
template <class P, class... Limits>
bool merge_payload(std::span<std::byte> into, std::span<const std::byte> other,
                   Limits const&... limits) {
  P merged = read_payload<P>(into);
  bool const agrees = merged.merge(read_payload<P>(other), limits...);
  std::memcpy(into.data(), &merged, sizeof merged);
  return agrees;
}

}  // namespace sparsecomm
