// The messages of in-network aggregation. Each begins with a header of 32 bytes, little-endian:
//
//   contribution  worker to aggregator, one a round: the plan in round 0 only, the blocks that the
//                 worker votes for, its blocks of this round, in order
//   update        aggregator to every worker: the blocks of the next round, none at the end; the
//                 reduced blocks, in order
//   refusal       aggregator to every worker: why the operation cannot go on
//
// The bitmap says which of the round's blocks follow. The checksum covers all of a message. Every
// field is checked before any byte is used, so neither side trusts the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "ina/block_list.h"
#include "ina/plan.h"
#include "transport/message_sink.h"

namespace sparsecomm {

enum class InaKind : std::uint8_t { contribution = 1, update = 2, refusal = 3 };

inline constexpr std::uint16_t ina_magic = 0x1a5c;
inline constexpr std::uint8_t ina_version = 1;

struct InaHeader {
  std::uint16_t magic = ina_magic;
  std::uint8_t version = ina_version;
  InaKind kind = InaKind::contribution;
  std::uint32_t operation = 0;  // the operation this message belongs to
  std::uint32_t round = 0;
  std::uint16_t worker = 0;   // the sender of a contribution; otherwise zero
  std::uint8_t numbers = 0;   // of blocks that follow the header, or the plan
  std::uint8_t reserved = 0;  // zero
  std::uint64_t bitmap = 0;   // bit i: block i of the round follows
  std::uint64_t checksum = 0;
};
static_assert(sizeof(InaHeader) == 32);

// As it travels in round 0.
struct InaPlanRecord {
  std::uint64_t elements;
  std::uint64_t purpose;
  std::uint32_t block_bytes;
  std::uint16_t workers;
  std::uint8_t window;
  std::uint8_t type;
  std::uint8_t reduction;
  std::uint8_t order;
  std::uint8_t reserved[6];  // zero
};
static_assert(sizeof(InaPlanRecord) == 32);

// The longest head, all that stands before the blocks, and the longest contribution or update of a
// plan: 16,512 bytes with a window of 16 blocks of 1 KiB, and 32 less after round 0.
constexpr std::size_t most_head_bytes(std::size_t window) {
  return sizeof(InaHeader) + sizeof(InaPlanRecord) + window * sizeof(std::uint32_t);
}
inline std::size_t most_message_bytes(InaPlan const& plan) {
  return most_head_bytes(plan.window) + plan.round_bytes();
}

// A message to send, in at most three pieces; the machine that made it says how long they stay.
class InaMessage {
 public:
  void add(std::span<const std::byte> piece) {
    if (!piece.empty()) pieces_[count_++] = piece;
  }
  std::span<const std::span<const std::byte>> pieces() const { return {pieces_.data(), count_}; }
  std::size_t size() const;

 private:
  std::array<std::span<const std::byte>, 3> pieces_{};
  std::size_t count_ = 0;
};

// Writes the head to the front of `head` and returns the message that it makes with the blocks,
// which lie in two pieces at most. The plan goes into round 0 of a contribution. Kind, numbers and
// checksum of the header are filled in.
InaMessage encode_contribution(InaHeader header, InaPlan const& plan, BlockList const& votes,
                               std::span<const std::byte> blocks,
                               std::span<const std::byte> more_blocks, std::span<std::byte> head);
InaMessage encode_update(InaHeader header, BlockList const& next, std::span<const std::byte> blocks,
                         std::span<std::byte> head);

enum class RefusalReason : std::uint32_t {
  mismatch = 1,
  invalid = 2,
  lost = 3,
  late = 4,
  not_admitted = 5,
};
struct RefusalReasonEntry {
  RefusalReason reason;
  std::string_view name;
};
inline constexpr RefusalReasonEntry refusal_reason_table[] = {
    {RefusalReason::mismatch, "mismatch"},
    {RefusalReason::invalid, "invalid"},
    {RefusalReason::lost, "lost"},
    {RefusalReason::late, "late"},
    {RefusalReason::not_admitted, "not_admitted"},
};
constexpr std::span<const RefusalReasonEntry> refusal_reasons() { return refusal_reason_table; }
constexpr std::string_view name(RefusalReason reason) {
  return refusal_reason_table[static_cast<std::size_t>(reason) - 1].name;
}

struct Refusal {
  RefusalReason reason;
  std::vector<int> accused;  // workers, increasing; empty only if none is lost or late
  std::string text;          // cut to most_refusal_text

  // As the exception that it is on a worker: Mismatch, PeerInvalid, PeerLost, Timeout or
  // NotAdmitted, and MalformedFrame where what is invalid cannot be held against anybody.
  [[noreturn]] void raise() const;
};
inline constexpr std::size_t most_refusal_text = 4096;

std::vector<std::byte> encode_refusal(std::uint32_t operation, Refusal const& refusal);

// The receiver's knowledge of the next message.
struct InaExpected {
  std::uint32_t operation = 0;
  std::uint32_t round = 0;
  BlockList const* blocks = nullptr;  // of the round
};

// A message that is valid. `blocks` and `header` are the caller's bytes and a copy.
struct ContributionView {
  InaHeader header;
  InaPlan plan;  // in round 0 what the worker sent, else what the aggregator has
  BlockList votes;
  std::span<const std::byte> blocks;
};
struct UpdateView {
  InaHeader header;
  BlockList next;
  std::span<const std::byte> blocks;
};

// Reads and checks the numbers of blocks in a message of the round that reduces `round`.
using NumbersParser = BlockList (*)(std::span<const std::byte> bytes, InaPlan const& plan,
                                    BlockList const& round);
// Numbers that increase, each of a block behind those of the round.
BlockList parse_increasing(std::span<const std::byte> bytes, InaPlan const& plan,
                           BlockList const& round);
// Throws MalformedFrame for a number outside [least, most).
void check_block_number(std::uint32_t number, std::uint64_t least, std::uint64_t most);

// Each takes a message of exactly its length and throws MalformedFrame, naming the field, its value
// and its bound. A contribution of round 0 is held against the plan inside it, so that workers that
// disagree are told so in the words of plan_differences().
ContributionView parse_contribution(std::span<const std::byte> in, InaPlan const& plan, int worker,
                                    InaExpected const& expected,
                                    NumbersParser parse_numbers = parse_increasing);
UpdateView parse_update(std::span<const std::byte> in, InaPlan const& plan,
                        InaExpected const& expected,
                        NumbersParser parse_numbers = parse_increasing);
Refusal parse_refusal(std::span<const std::byte> in, std::uint32_t operation, int workers);

// The kind and the operation of a message, and its sender's plan if it is of round 0, for who must
// find the machine that it is for. They too throw MalformedFrame; parse_opening() also for other
// messages than contributions of round 0. peek_plan() does with the first opening_bytes of one, of
// which it cannot tell whether they are what was sent: the checksum is over all of it.
static_assert(opening_bytes == sizeof(InaHeader) + sizeof(InaPlanRecord));
InaHeader parse_ina_header(std::span<const std::byte> in);
InaPlan peek_plan(std::span<const std::byte> in);
InaPlan parse_opening(std::span<const std::byte> in);

}  // namespace sparsecomm
