#include "ina/worker_machine.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace sparsecomm {

InaMessage WorkerMachine::start(InaPlan const& plan, int rank, std::uint32_t operation,
                                std::span<const std::byte> input, std::span<std::byte> output,
                                TimePoint now, Duration limit) {
  require_plan(plan);
  require(rank >= 0 && rank < plan.workers, "in-network aggregation: rank is ", rank,
          ", must be less than the ", plan.workers, " workers");
  require_data(plan, input, output);
  plan_ = plan;
  rank_ = rank;
  operation_ = operation;
  input_ = input;
  output_ = output;
  written_.clear();
  limit_ = std::clamp(limit, Duration::zero(), longest_duration);
  deadline_ = now + limit_;
  round_ = 0;
  round_blocks_ = plan.first_blocks();
  done_ = false;
  running_ = true;
  prepare();
  return contribute(sent_);
}

std::optional<InaMessage> WorkerMachine::receive(std::span<const std::byte> message,
                                                 TimePoint now) {
  require(running_, "in-network aggregation: no operation is under way; start one first");
  running_ = false;  // unless all goes well
  if (parse_ina_header(message).kind == InaKind::refusal) {
    parse_refusal(message, operation_, plan_.workers).raise();
  }
  expire(now);
  UpdateView const update =
      parse(message, {.operation = operation_, .round = round_, .blocks = &round_blocks_});
  require_sent_blocks(update);
  check_next(update);
  write(update);
  round_blocks_ = update.next;
  if (round_blocks_.empty()) {
    done_ = true;
    return std::nullopt;
  }
  ++round_;
  running_ = true;
  return contribute(sent_);
}

void WorkerMachine::expire(TimePoint now) const {
  require<AggregationTimeout>(
      now < deadline_ || done_, "in-network aggregation: worker ", rank_,
      " has no update of round ", round_, " of operation ", operation_, " within ",
      std::chrono::duration<double>(limit_).count(),
      " s: the aggregator is stopped or cut off, or waits for another worker; see its log, or "
      "allow more time");
}

// What an update leaves out would be lost.
void WorkerMachine::require_sent_blocks(UpdateView const& update) const {
  require<MalformedFrame>((sent_ & ~update.header.bitmap) == 0, "aggregation message: bitmap is ",
                          update.header.bitmap, ", must have the bits of ", sent_,
                          ", the blocks that worker ", rank_, " has sent in round ", round_);
}

void WorkerMachine::write(UpdateView const& update) {
  std::byte const* from = update.blocks.data();
  for (std::size_t i = 0; i < round_blocks_.size(); ++i) {
    if ((update.header.bitmap >> i & 1) == 0) continue;
    std::size_t const begin = std::size_t{round_blocks_[i]} * plan_.block_bytes;
    std::size_t const end = std::min(begin + plan_.block_bytes, output_.size());
    std::memcpy(output_.data() + begin, from, end - begin);
    from += plan_.block_bytes;
    if (!written_.empty() && written_.back().end == begin) {
      written_.back().end = end;
    } else {
      written_.push_back({.begin = begin, .end = end});
    }
  }
}

InaHeader WorkerMachine::header(std::uint64_t bitmap) const {
  return {.operation = operation_,
          .round = round_,
          .worker = static_cast<std::uint16_t>(rank_),
          .bitmap = bitmap};
}

}  // namespace sparsecomm
