#include "ina/aggregator.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace sparsecomm {
InaAggregator::InaAggregator(InaPlan const& largest) : most_workers_(largest.workers) {
  require_plan(largest);
  capacity_ = instance_bytes(largest);
  memory_.resize(capacity_);
  arrivals_.resize(most_workers_);
  plans_.resize(most_workers_);
}

void InaAggregator::start(InaPlan const& plan, std::uint32_t operation, TimePoint now,
                          Duration limit) {
  require_plan(plan);
  require(instance_bytes(plan) <= capacity_ && plan.workers <= most_workers_,
          "in-network aggregation: ", plan.workers, " workers with ", int(plan.window),
          " blocks of ", plan.block_bytes, " bytes of ", name(plan.type), " need ",
          instance_bytes(plan), " bytes, but the instance has ", capacity_, " for ", most_workers_,
          " workers; make a larger one");
  require(!running(), "in-network aggregation: operation ", operation_,
          " is under way in this instance; make another one for operation ", operation);
  plan_ = plan;
  operation_ = operation;
  limit_ = std::clamp(limit, Duration::zero(), longest_duration);
  deadline_ = now + limit_;
  state_ = State::running;
  failure_.clear();
  plans_differ_ = false;
  round_ = 0;
  received_blocks_ = 0;
  round_blocks_ = plan.first_blocks();
  begin_round();
}

void InaAggregator::begin_round() {
  std::ranges::fill(arrivals_, Arrival{});
  votes_.clear();
  missing_ = plan_.workers;
  combined_ = 0;
  present_ = zero_ = 0;
}

std::span<std::byte> InaAggregator::receive_spot(int worker) {
  require(worker >= 0 && worker < plan_.workers, "in-network aggregation: worker is ", worker,
          ", must be less than ", plan_.workers);
  std::size_t const sending = 2 * (plan_.sum_bytes() + most_head_bytes(plan_.window));
  std::size_t const size = most_message_bytes(plan_);
  return std::span(memory_).subspan(sending + static_cast<std::size_t>(worker) * size, size);
}

std::byte* InaAggregator::spot() { return memory_.data() + (second_ ? plan_.sum_bytes() : 0); }

std::byte* InaAggregator::partial(std::size_t block) {
  return spot() + block * (plan_.sum_bytes() / plan_.window);
}

std::optional<InaMessage> InaAggregator::receive(int worker, std::span<const std::byte> message,
                                                 TimePoint now) {
  require(worker >= 0 && worker < plan_.workers, "in-network aggregation: worker is ", worker,
          ", must be less than ", plan_.workers);
  if (failed()) return std::nullopt;
  require<MalformedFrame>(running(), "aggregation message: worker ", worker,
                          " sends, but operation ", operation_,
                          " is over and no other has been started");
  if (auto refusal = expire(now)) return refusal;
  // Step 1.
  ContributionView view;
  try {
    require<MalformedFrame>(!arrived(worker), "aggregation message: a second one in round ", round_,
                            ", must be one, answered by the update");
    view = parse(message, worker,
                 {.operation = operation_, .round = round_, .blocks = &round_blocks_});
  } catch (MalformedFrame const& error) {
    return refuse(RefusalReason::invalid, {worker},
                  concat("what worker ", worker, " sends is not valid: ", error.what()));
  }
  take(worker, view);
  if (--missing_ > 0) return std::nullopt;
  deadline_ = now + limit_;
  return finish_round();
}

std::optional<InaMessage> InaAggregator::receive_plan(int worker, InaPlan const& plan,
                                                      TimePoint now) {
  require(running() && round_ == 0 && !arrived(worker), "in-network aggregation: a plan of worker ",
          worker, " in round ", round_, ", must be its first message");
  if (auto refusal = expire(now)) return refusal;
  auto const index = static_cast<std::size_t>(worker);
  arrivals_[index].arrived = true;
  plans_[index] = plan;
  plans_differ_ = plans_differ_ || plan != plan_;
  if (--missing_ > 0) return std::nullopt;
  deadline_ = now + limit_;
  return finish_round();
}

void InaAggregator::take(int worker, ContributionView const& view) {
  auto const index = static_cast<std::size_t>(worker);
  Arrival& arrival = arrivals_[index];
  arrival = {.arrived = true, .bitmap = view.header.bitmap, .blocks = view.blocks.data()};
  if (round_ == 0) {
    plans_[index] = view.plan;
    plans_differ_ = plans_differ_ || view.plan != plan_;
  }
  if (plans_differ_) return;  // refused when all have come
  received_blocks_ += static_cast<std::uint64_t>(std::popcount(view.header.bitmap));
  // Step 3.
  votes_ = merge(votes_, view.votes);
  // Step 2.
  if (plan_.order == CombineOrder::arrival) return combine(arrival);
  if (worker != combined_) {
    auto const held = receive_spot(worker);
    std::less<> const before;
    bool const in_spot =
        !before(arrival.blocks, held.data()) && before(arrival.blocks, held.data() + held.size());
    if (!in_spot && !view.blocks.empty()) {
      std::memcpy(held.data(), view.blocks.data(), view.blocks.size());
      arrival.blocks = held.data();
    }
    return;
  }
  for (; combined_ < plan_.workers; ++combined_) {
    Arrival const& next = arrivals_[static_cast<std::size_t>(combined_)];
    if (!next.arrived) break;
    combine(next);
  }
}

// Step 2: the blocks of one worker.
void InaAggregator::combine(Arrival const& arrival) {
  ElementTypeEntry const& type = plan_.entry();
  BlockReduction const& reduction = type.of(plan_.reduction);
  std::size_t const bytes = plan_.block_bytes;
  std::byte const* block = arrival.blocks;
  for (std::size_t i = 0; i < round_blocks_.size(); ++i) {
    std::uint64_t const bit = std::uint64_t{1} << i;
    if ((arrival.bitmap & bit) == 0) {
      // A sum takes one zero for all of them, at the end.
      if (plan_.reduction == Reduction::sum || (present_ & bit) == 0) {
        zero_ |= bit;
      } else {
        reduction.combine_zero(partial(i), bytes);
      }
      continue;
    }
    if ((present_ & bit) != 0) {
      reduction.combine(partial(i), block, bytes);
    } else if (plan_.reduction == Reduction::sum || (zero_ & bit) == 0) {
      type.widen(partial(i), block, bytes);
    } else {
      std::memset(partial(i), 0, plan_.sum_bytes() / plan_.window);
      reduction.combine(partial(i), block, bytes);
    }
    present_ |= bit;
    block += bytes;
  }
}

// Step 4.
std::optional<InaMessage> InaAggregator::finish_round() {
  if (plans_differ_) {
    std::string const text = plan_differences(std::span(plans_).first(plan_.workers));
    return refuse(RefusalReason::mismatch, {},
                  concat("the workers disagree: ",
                         text.empty() ? "all have another plan than the aggregator" : text,
                         "; make the same calls in the same order on all workers"));
  }
  votes_ = conclude(votes_);
  ElementTypeEntry const& type = plan_.entry();
  std::size_t const bytes = plan_.block_bytes;
  std::size_t reduced = 0;
  for (std::size_t i = 0; i < round_blocks_.size(); ++i) {
    std::uint64_t const bit = std::uint64_t{1} << i;
    if ((present_ & bit) == 0) {
      // Nobody has voted for the blocks of the first round.
      if (round_ == 0) continue;
      return refuse(RefusalReason::invalid, {},
                    concat("a worker has voted for block ", round_blocks_[i],
                           " but none has sent it in round ", round_,
                           "; workers must send all blocks of a round that are not zero"));
    }
    if (plan_.reduction == Reduction::sum && (zero_ & bit) != 0) {
      type.of(Reduction::sum).combine_zero(partial(i), bytes);
    }
    type.round(spot() + reduced * bytes, partial(i), bytes);
    ++reduced;
  }
  std::size_t const most_head = most_head_bytes(plan_.window);
  auto const head =
      std::span(memory_).subspan(2 * plan_.sum_bytes() + (second_ ? most_head : 0), most_head);
  InaMessage const update =
      encode_update({.operation = operation_, .round = round_, .bitmap = present_}, votes_,
                    {spot(), reduced * bytes}, head);
  second_ = !second_;
  if (votes_.empty()) {
    state_ = State::done;
    return update;
  }
  ++round_;
  round_blocks_ = votes_;
  begin_round();
  return update;
}

std::optional<InaMessage> InaAggregator::lose(int worker, std::string const& why) {
  if (!running()) return std::nullopt;
  return refuse(
      RefusalReason::lost, {worker},
      concat("the connection to worker ", worker, " is gone", why.empty() ? "" : ": ", why));
}

std::optional<InaMessage> InaAggregator::expire(TimePoint now) {
  if (!running() || now < deadline_) return std::nullopt;
  std::vector<int> missing;
  for (int worker = 0; worker < plan_.workers; ++worker) {
    if (!arrivals_[static_cast<std::size_t>(worker)].arrived) missing.push_back(worker);
  }
  std::string const text =
      concat(join_workers(missing), missing.size() == 1 ? " has" : " have", " not sent round ",
             round_, " within ", std::chrono::duration<double>(limit_).count(),
             " s: stopped, cut off or still busy; see their logs, or allow more time");
  return refuse(RefusalReason::late, std::move(missing), text);
}

InaMessage InaAggregator::refuse(RefusalReason reason, std::vector<int> accused,
                                 std::string const& text) {
  state_ = State::failed;
  failure_reason_ = reason;
  failure_ = concat("in-network aggregation, operation ", operation_, ": ", text);
  refusal_ = encode_refusal(operation_,
                            {.reason = reason, .accused = std::move(accused), .text = failure_});
  InaMessage message;
  message.add(refusal_);
  return message;
}

}  // namespace sparsecomm
