// A worker of in-network aggregation, as a state machine: messages and the time go in, messages to
// send come out. It has no sockets, threads or clock.
//
// 1. Scan the input for blocks that are not zero, in order, until d of them are at hand that have
//    not been reduced yet, or the input ends. Blocks that are found are copied to a ring of 2 d, as
//    a message in flight holds d and as many wait for their turn.
// 2. Of the blocks that the round reduces, those at hand are the first ones at hand, so they lie in
//    two pieces of the ring at most. Send them, and votes for the d blocks at hand behind them. The
//    first round reduces the first d blocks of the array: no round is spent on votes alone.
// 3. From the update, write the reduced blocks to the output, and zeros where it skips some. It
//    names the blocks of the next round, the smallest that any worker voted for: go on with step 1,
//    or end if it names none.
//
// 1 + ceil(u / d) rounds, u the blocks behind the first d that are not zero on some worker. Votes
// that were not taken are voted again. Source: Gu et al. 2024 (OmNICCL), sections 2.1 and 2.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "ina/message.h"
#include "ina/plan.h"
#include "kernels/block_scan.h"

namespace sparsecomm {

// The aggregator has not answered in time; which of the others is at fault is not known here.
class AggregationTimeout : public Error {
 public:
  using Error::Error;
};

// A worker's side of an operation, under some policy (policy.h).
class WorkerMachine {
 public:
  virtual ~WorkerMachine() = default;

  // `output` is as long as `input`, and is the same memory or none of it. Input that is not the
  // output is only read. Output is written as its blocks become final, so after a failure a part
  // of it may be: who must keep the input until the operation is known to stand takes another
  // output. Both must stay until done().
  //
  // Returns the first message. A message stays as it is until the machine takes the update that
  // answers it, or starts anew.
  virtual InaMessage start(InaPlan const& plan, int rank, std::uint32_t operation,
                           std::span<const std::byte> input, std::span<std::byte> output,
                           TimePoint now, Duration limit) = 0;

  // Takes what the aggregator has sent, which is not needed afterwards. Returns the next message,
  // or none when all is done. Throws what a refusal says, MalformedFrame for anything that is not
  // the update of this round, in which case nothing was written, and as expire() does. After a
  // throw only start() may follow.
  virtual std::optional<InaMessage> receive(std::span<const std::byte> message, TimePoint now) = 0;
};

class InaWorker : public WorkerMachine {
 public:
  InaMessage start(InaPlan const& plan, int rank, std::uint32_t operation,
                   std::span<const std::byte> input, std::span<std::byte> output, TimePoint now,
                   Duration limit) override;
  std::optional<InaMessage> receive(std::span<const std::byte> message, TimePoint now) override;

  // Throws AggregationTimeout once the deadline has passed.
  void expire(TimePoint now) const;
  TimePoint deadline() const { return deadline_; }

  // The output is complete.
  bool done() const { return done_; }

  std::uint32_t round() const { return round_; }
  BlockList const& round_blocks() const { return round_blocks_; }
  BlockList const& votes() const { return at_hand_; }

 protected:
  // Step 1: as BlockKernelTable::copy_nonzero_blocks().
  virtual BlockWalk find(std::span<const std::byte> input, std::size_t block_bytes,
                         std::uint64_t first, std::span<std::byte> slots,
                         std::span<std::uint32_t> numbers) const {
    return block_kernels().copy_nonzero_blocks(input, block_bytes, first, slots, numbers);
  }

 private:
  InaMessage contribute();
  void fill();
  void check_next(UpdateView const& update) const;
  void write(UpdateView const& update);
  void write_zeros(std::uint64_t end);
  std::span<const std::byte> in_ring(std::size_t first, std::size_t count) const;

  InaPlan plan_;
  int rank_ = 0;
  std::uint32_t operation_ = 0;
  std::span<const std::byte> input_;
  std::span<std::byte> output_;
  TimePoint deadline_{};
  Duration limit_{};

  std::uint32_t round_ = 0;
  BlockList round_blocks_;  // that this round reduces
  std::uint64_t sent_ = 0;  // of those, a bit for each that this worker sent
  BlockList at_hand_;       // found and not reduced yet: in the ring, beginning at ring_begin_
  bool running_ = false;
  bool done_ = false;

  std::uint64_t scanned_ = 0;  // blocks of the input
  std::uint64_t written_ = 0;  // blocks of the output that are final
  std::size_t ring_begin_ = 0;
  std::vector<std::byte> ring_, head_;  // grow and never shrink
};

}  // namespace sparsecomm
