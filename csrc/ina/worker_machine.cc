#include "ina/worker_machine.h"

#include <algorithm>
#include <chrono>

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
  limit_ = std::clamp(limit, Duration::zero(), longest_duration);
  deadline_ = now + limit_;
  round_ = 0;
  round_blocks_ = plan.first_blocks();
  done_ = false;
  running_ = true;
  prepare();
  return contribute();
}

std::optional<InaMessage> WorkerMachine::receive(std::span<const std::byte> message,
                                                 TimePoint now) {
  require(running_, "in-network aggregation: no operation is under way; start one first");
  running_ = false;  // unless all goes well
  if (parse_ina_header(message).kind == InaKind::refusal) {
    parse_refusal(message, operation_, plan_.workers).raise();
  }
  expire(now);
  round_blocks_ = take(message);
  if (round_blocks_.empty()) {
    done_ = true;
    return std::nullopt;
  }
  ++round_;
  running_ = true;
  return contribute();
}

void WorkerMachine::expire(TimePoint now) const {
  require<AggregationTimeout>(
      now < deadline_ || done_, "in-network aggregation: worker ", rank_,
      " has no update of round ", round_, " of operation ", operation_, " within ",
      std::chrono::duration<double>(limit_).count(),
      " s: the aggregator is stopped or cut off, or waits for another worker; see its log, or "
      "allow more time");
}

InaHeader WorkerMachine::header(std::uint64_t bitmap) const {
  return {.operation = operation_,
          .round = round_,
          .worker = static_cast<std::uint16_t>(rank_),
          .bitmap = bitmap};
}

InaExpected WorkerMachine::expected() const {
  return {.operation = operation_, .round = round_, .blocks = &round_blocks_};
}

}  // namespace sparsecomm
