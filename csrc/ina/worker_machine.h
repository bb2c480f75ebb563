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

  friend bool operator==(ByteRange const&, ByteRange const&) = default;
};

class WorkerMachine {
 public:
  virtual ~WorkerMachine() = default;

  // `output` is as long as `input`, and is the same memory or none of it; both must stay until
  // done(). Writes only the blocks that are not zero on some worker, each as soon as it is final;
  // the others keep what they held, zeros if the memory is the same. After a failure some blocks
  // may have been written: to keep the input until the operation has succeeded, give another
  // output.
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

  // The operation has ended: the output holds every block that it writes.
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
  // Of this round.
  InaHeader header(std::uint64_t bitmap) const;

 private:
  // Called with each start, before the first message.
  virtual void prepare() = 0;
  // Returns the message of this round. Sets `sent`: a bit for each block of the round, those that
  // the message has.
  virtual InaMessage contribute(std::uint64_t& sent) = 0;
  // Throws MalformedFrame for what is not the update of this round.
  virtual UpdateView parse(std::span<const std::byte> message,
                           InaExpected const& expected) const = 0;
  // Throws MalformedFrame if the next round leaves out a block that this worker has announced.
  virtual void check_next(UpdateView const& update) const = 0;

  // Throws MalformedFrame if an update of this round lacks a block that this worker has sent.
  void require_sent_blocks(UpdateView const& update) const;
  // Writes the blocks of an update of this round to the output.
  void write(UpdateView const& update);

  InaPlan plan_;
  int rank_ = 0;
  std::uint32_t operation_ = 0;
  std::span<const std::byte> input_;
  std::span<std::byte> output_;
  std::vector<ByteRange> written_;  // its capacity is kept between operations
  TimePoint deadline_{};
  Duration limit_{};
  std::uint32_t round_ = 0;
  BlockList round_blocks_;
  std::uint64_t sent_ = 0;  // a bit for each of them
  bool running_ = false;
  bool done_ = false;
};

}  // namespace sparsecomm
