// An aggregator of in-network aggregation, as a state machine: messages and the time go in,
// messages to send come out. It has no sockets, threads or clock.
//
// 1. A worker's contribution of the round is validated as a whole.
// 2. Its blocks are combined with the partial results in the spot from which this round's update
//    will be sent: at once, or, for the same bits in every run, when all ranks before it have been.
// 3. The d smallest of its votes and of those before it are the next round's blocks. Votes are not
//    kept by worker.
// 4. When all have come, the update goes to every worker: the reduced blocks and the next round's
//    numbers, none at the end. Then the two spots swap: a worker that contributes to round t has
//    the update of round t - 1, so nothing of an update is in flight when the round after the next
//    writes over it.
//
// A block that a worker does not send is zero there. A sum in which one is zero and the others are
// -0.0 is 0.0, as in a dense reduction; products, minima and maxima are combined with the zero
// where it stands. O(d) numbers, n messages a round, and each block is read once and combined once.
// Source: Gu et al. 2024 (OmNICCL), sections 2.1 and 2.2.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "ina/message.h"
#include "ina/plan.h"

namespace sparsecomm {

class InaAggregator {
 public:
  // Allocates instance_bytes(largest), and nothing later while all goes well.
  explicit InaAggregator(InaPlan const& largest);
  virtual ~InaAggregator() = default;

  // `limit`: of each round. Throws InvalidArgument for a plan that needs more than the largest. If
  // the plan differs from the former in more than elements, purpose, reduction and order, the
  // messages of the former operation must have been sent; otherwise start() may follow once it is
  // done().
  void start(InaPlan const& plan, std::uint32_t operation, TimePoint now, Duration limit);

  // A worker's message may be received to the front of its spot, and is then not copied. It may be
  // written to until the message is handed to receive(), and again once an update, to which the
  // worker answers, has been returned.
  std::span<std::byte> receive_spot(int worker);

  // Takes a message of `worker`, which is not needed afterwards unless it lies in the spot.
  // Returns a message for every worker, or none while workers are missing. The operation may then
  // be done(), or have failed() if the message is a refusal: of one that is not valid or comes
  // late, or of plans that differ, which is told all workers in the same words. Messages to an
  // operation that has failed are ignored. The message stays as it is until the answers of all
  // workers have been taken; a refusal, until the next start().
  //
  // Throws MalformedFrame if no operation is under way: `worker` is not to send yet, or no more.
  std::optional<InaMessage> receive(int worker, std::span<const std::byte> message, TimePoint now);

  // A worker has another plan, and its message is not wanted; otherwise as receive().
  std::optional<InaMessage> receive_plan(int worker, InaPlan const& plan, TimePoint now);

  // The worker's message of this round has come, and it is not to send another.
  bool arrived(int worker) const { return arrivals_[static_cast<std::size_t>(worker)].arrived; }

  // The connection to the worker is gone. Returns what is to be sent to the others, if anything.
  std::optional<InaMessage> lose(int worker, std::string const& why = {});

  // After the deadline, a refusal that accuses the workers that are missing.
  std::optional<InaMessage> expire(TimePoint now);
  TimePoint deadline() const { return deadline_; }

  bool running() const { return state_ == State::running; }
  bool done() const { return state_ == State::done; }
  bool failed() const { return state_ == State::failed; }
  // Why it has failed.
  std::string const& failure() const { return failure_; }
  RefusalReason failure_reason() const { return failure_reason_; }

  InaPlan const& plan() const { return plan_; }
  std::uint32_t operation() const { return operation_; }
  std::uint32_t round() const { return round_; }
  // Of this operation, from all workers, so far.
  std::uint64_t received_blocks() const { return received_blocks_; }
  BlockList const& round_blocks() const { return round_blocks_; }
  BlockList const& votes() const { return votes_; }

 protected:
  // A policy overrides these. parse() checks a contribution. merge() combines the votes so far with
  // one more worker's; they begin empty. conclude() turns all votes into the next round's blocks.
  virtual ContributionView parse(std::span<const std::byte> message, int worker,
                                 InaExpected const& expected) const {
    return parse_contribution(message, plan_, worker, expected);
  }
  virtual BlockList merge(BlockList const& votes, BlockList const& more) const {
    return merge_smallest(votes, more, plan_.window);
  }
  virtual BlockList conclude(BlockList const& votes) const { return votes; }

 private:
  enum class State : std::uint8_t { idle, running, done, failed };
  struct Arrival {
    bool arrived = false;
    std::uint64_t bitmap = 0;
    std::byte const* blocks = nullptr;  // in the receive spot, or to be used at once
  };
  void begin_round();
  void take(int worker, ContributionView const& view);
  void combine(Arrival const& arrival);
  std::optional<InaMessage> finish_round();
  InaMessage refuse(RefusalReason reason, std::vector<int> accused, std::string const& text);
  std::byte* partial(std::size_t block);
  std::byte* spot();

  std::size_t capacity_;
  std::size_t most_workers_;
  std::vector<std::byte> memory_;
  InaPlan plan_;
  std::uint32_t operation_ = 0;
  TimePoint deadline_{};
  Duration limit_{};

  State state_ = State::idle;
  std::string failure_;
  RefusalReason failure_reason_{};
  std::vector<std::byte> refusal_;

  std::uint32_t round_ = 0;
  std::uint64_t received_blocks_ = 0;
  BlockList round_blocks_;
  BlockList votes_;
  std::vector<Arrival> arrivals_;
  std::vector<InaPlan> plans_;  // of round 0
  bool plans_differ_ = false;
  int missing_ = 0;            // workers
  int combined_ = 0;           // in the order of ranks, the workers before this one
  std::uint64_t present_ = 0;  // blocks that have a partial result
  std::uint64_t zero_ = 0;     // blocks that are zero on a worker, which is still to be combined
  bool second_ = false;        // the spot in which this round is reduced
};

}  // namespace sparsecomm
