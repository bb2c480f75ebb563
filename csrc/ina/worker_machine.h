// A worker's side of an operation under any policy (policy.h), as a state machine: messages and the
// time go in, messages to send come out. It has no sockets, threads or clock.
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

namespace sparsecomm {

// The aggregator has not answered in time; which of the others is at fault is not known here.
class AggregationTimeout : public Error {
 public:
  using Error::Error;
};

struct ByteRange {
  std::size_t begin, end;
};

class WorkerMachine {
 public:
  virtual ~WorkerMachine() = default;

  // `output` is as long as `input`, and is the same memory or none of it. Input that is not the
  // output is only read. Of the output only the blocks are written that are not zero on some
  // worker, as they become final; in place the others are zero already. After a failure some may
  // be: who must keep the input until the operation is known to stand takes another output. Both
  // must stay until done().
  //
  // Returns the first message. A message stays as it is until the machine takes the update that
  // answers it, or starts anew.
  InaMessage start(InaPlan const& plan, int rank, std::uint32_t operation,
                   std::span<const std::byte> input, std::span<std::byte> output, TimePoint now,
                   Duration limit);

  // Takes what the aggregator has sent, which is not needed afterwards. Returns the next message,
  // or none when all is done. Throws what a refusal says, MalformedFrame for anything that is not
  // the update of this round, in which case nothing was written, and as expire() does. After a
  // throw only start() may follow.
  std::optional<InaMessage> receive(std::span<const std::byte> message, TimePoint now);

  // Throws AggregationTimeout once the deadline has passed.
  void expire(TimePoint now) const;
  TimePoint deadline() const { return deadline_; }

  // All blocks that are not zero on some worker are written.
  bool done() const { return done_; }
  // The parts of the output that are written, in the order in which they were.
  std::span<const ByteRange> written() const { return written_; }

  std::uint32_t round() const { return round_; }
  // That this round reduces.
  BlockList const& round_blocks() const { return round_blocks_; }

 protected:
  InaPlan const& plan() const { return plan_; }
  int rank() const { return rank_; }
  std::span<const std::byte> input() const { return input_; }
  // Throws MalformedFrame if an update of this round lacks a block that this worker has sent.
  void require_all(std::uint64_t sent, UpdateView const& update) const;
  // Writes the blocks of an update of this round to the output.
  void write(UpdateView const& update);
  // Of this round.
  InaHeader header(std::uint64_t bitmap) const;
  InaExpected expected() const;

 private:
  // Called with each start, before the first message.
  virtual void prepare() = 0;
  // The message of this round.
  virtual InaMessage contribute() = 0;
  // Checks the update of this round, then writes its blocks. Returns those of the next round; none:
  // there is no other.
  virtual BlockList take(std::span<const std::byte> update) = 0;

  InaPlan plan_;
  int rank_ = 0;
  std::uint32_t operation_ = 0;
  std::span<const std::byte> input_;
  std::span<std::byte> output_;
  std::vector<ByteRange> written_;  // grows and never shrinks
  TimePoint deadline_{};
  Duration limit_{};
  std::uint32_t round_ = 0;
  BlockList round_blocks_;
  bool running_ = false;
  bool done_ = false;
};

}  // namespace sparsecomm
