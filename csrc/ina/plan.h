// The description of an operation, which all its workers must agree on, and the memory that an
// aggregator needs for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "ina/block_list.h"
#include "ina/element_type.h"

namespace sparsecomm {

// arrival  Blocks are combined as they come: the fastest, and every worker gets the same bits, but
//          another run may get others.
// rank     Blocks are combined in the order of ranks: the same bits in every run, those of a dense
//          reduction in that order. A block that comes early is held in its worker's receive spot.
enum class CombineOrder : std::uint8_t { arrival, rank };

struct CombineOrderEntry {
  CombineOrder id;
  std::string_view name;
};

inline constexpr CombineOrderEntry combine_order_table[] = {
    {CombineOrder::arrival, "arrival"},
    {CombineOrder::rank, "rank"},
};

constexpr std::span<const CombineOrderEntry> combine_orders() { return combine_order_table; }
constexpr std::string_view name(CombineOrder order) {
  return combine_order_table[static_cast<std::size_t>(order)].name;
}

// Travels with the first message of each worker; see message.h.
struct InaPlan {
  std::uint64_t elements = 0;
  std::uint64_t purpose = 0;  // a hash, the caller's, of anything else that must be the same
  std::uint32_t block_bytes = 1024;
  std::uint16_t workers = 1;
  std::uint8_t window = 16;  // blocks a round, d
  ElementType type = ElementType::f32;
  Reduction reduction = Reduction::sum;
  CombineOrder order = CombineOrder::arrival;

  ElementTypeEntry const& entry() const { return entry_of(type); }
  std::uint64_t bytes() const { return elements * entry().bytes; }
  // The last may be shorter; it travels with zeros behind it.
  std::uint64_t blocks() const {
    return bytes() / block_bytes + (bytes() % block_bytes != 0 ? 1 : 0);
  }
  // A round's blocks as they travel, b d, and as partial results.
  std::size_t round_bytes() const { return std::size_t{block_bytes} * window; }
  std::size_t sum_bytes() const { return round_bytes() / entry().bytes * entry().sum_bytes; }
  // The blocks of the first round, which begins without votes.
  BlockList first_blocks() const;

  bool operator==(InaPlan const&) const = default;
};

inline constexpr std::uint32_t least_block_bytes = 64;
inline constexpr std::uint32_t most_block_bytes = std::uint32_t{1} << 16;

// Throws InvalidArgument unless a block may have so many bytes: a power of two in that range.
void require_block_bytes(std::uint32_t block_bytes);

// Names a field that is out of range, its value and its bounds; empty if all are in range.
std::string problem(InaPlan const& plan);
// Throws InvalidArgument with it.
void require_plan(InaPlan const& plan);
// Throws InvalidArgument unless both are as long as the plan says, and the same memory or none of
// it.
void require_data(InaPlan const& plan, std::span<const std::byte> input,
                  std::span<const std::byte> output);

// The memory that an aggregator allocates for a plan: a receive spot for each worker and two spots
// from which it sends, each with room for a round's blocks and numbers. With n workers, blocks of b
// bytes and a window of d that is
//
//   (n + 2) (b d + 4 d + 64) bytes,
//
// and 2 b d more with f16 or bf16, as partial results are f32 and lie in the spots for sending. The
// order in which blocks are combined makes no difference. A record of less than 64 bytes for each
// worker comes on top.
std::size_t instance_bytes(InaPlan const& plan);

// The fields in which the plans of the workers differ, with the workers that have each value:
// "elements: 10 on workers 0, 1 but 12 on worker 2; ...". Empty if none does.
std::string plan_differences(std::span<const InaPlan> plans);

// "worker 3", "workers 0, 2"; more than 16 are counted.
std::string join_workers(std::span<const int> workers);

}  // namespace sparsecomm
