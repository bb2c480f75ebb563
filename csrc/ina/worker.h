// A worker of in-network aggregation.
//
// 1. Scan the input for blocks that are not zero, in order, until d of them are at hand that have
//    not been reduced yet, or the input ends. Blocks that are found are copied to a ring of 2 d, as
//    a message in flight holds d and as many wait for their turn.
// 2. Of the blocks that the round reduces, those at hand are the first ones at hand, so they lie in
//    two pieces of the ring at most. Send them, and votes for the d blocks at hand behind them. The
//    first round reduces the first d blocks of the array: no round is spent on votes alone.
// 3. From the update, write the reduced blocks to the output; those that it skips are zero on all
//    workers. It names the blocks of the next round, the smallest that any worker voted for: go on
//    with step 1, or end if it names none.
//
// 1 + ceil(u / d) rounds, u the blocks behind the first d that are not zero on some worker. Votes
// that were not taken are voted again. Source: Gu et al. 2024 (OmNICCL), sections 2.1 and 2.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ina/worker_machine.h"
#include "kernels/block_scan.h"

namespace sparsecomm {

class InaWorker : public WorkerMachine {
 public:
  BlockList const& votes() const { return at_hand_; }

 protected:
  // Step 1: as BlockKernelTable::copy_nonzero_blocks().
  virtual BlockWalk find(std::span<const std::byte> input, std::size_t block_bytes,
                         std::uint64_t first, std::span<std::byte> slots,
                         std::span<std::uint32_t> numbers) const {
    return block_kernels().copy_nonzero_blocks(input, block_bytes, first, slots, numbers);
  }

 private:
  void prepare() override;
  InaMessage contribute(std::uint64_t& sent) override;
  UpdateView parse(std::span<const std::byte> message, InaExpected const& expected) const override;
  void check_next(UpdateView const& update) const override;
  void fill();
  std::span<const std::byte> in_ring(std::size_t first, std::size_t count) const;

  BlockList at_hand_;          // found and not reduced yet: in the ring, beginning at ring_begin_
  std::uint64_t scanned_ = 0;  // blocks of the input
  std::size_t ring_begin_ = 0;
  std::vector<std::byte> ring_, head_;  // grow and never shrink
};

}  // namespace sparsecomm
