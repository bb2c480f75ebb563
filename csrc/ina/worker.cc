#include "ina/worker.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace sparsecomm {
InaMessage InaWorker::start(InaPlan const& plan, int rank, std::uint32_t operation,
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
  at_hand_.clear();
  done_ = false;
  running_ = true;
  scanned_ = written_ = 0;
  ring_begin_ = 0;
  ring_.resize(std::max(ring_.size(), 2 * plan.round_bytes()));
  head_.resize(std::max(head_.size(), most_head_bytes(plan.window)));
  return contribute();
}

// Steps 1 and 2.
InaMessage InaWorker::contribute() {
  fill();
  sent_ = 0;
  std::size_t count = 0;
  for (std::size_t i = 0; i < round_blocks_.size() && count < at_hand_.size(); ++i) {
    if (round_blocks_[i] != at_hand_[count]) continue;
    sent_ |= std::uint64_t{1} << i;
    ++count;
  }
  std::size_t const slots = 2 * std::size_t{plan_.window};
  std::size_t const unbroken = std::min(count, slots - ring_begin_);
  auto const blocks = in_ring(ring_begin_, unbroken);
  auto const more_blocks = in_ring(0, count - unbroken);
  at_hand_.drop_front(count);
  ring_begin_ = (ring_begin_ + count) % slots;
  fill();
  InaHeader const header{.operation = operation_,
                         .round = round_,
                         .worker = static_cast<std::uint16_t>(rank_),
                         .bitmap = sent_};
  return encode_contribution(header, plan_, at_hand_, blocks, more_blocks, head_);
}

// Step 1. At most d slots hold blocks at hand and d others those of the message in flight, so the
// slots that are filled are free.
void InaWorker::fill() {
  std::size_t const slots = 2 * std::size_t{plan_.window};
  std::array<std::uint32_t, most_blocks> found;
  while (at_hand_.size() < plan_.window && scanned_ < plan_.blocks()) {
    std::size_t const slot = (ring_begin_ + at_hand_.size()) % slots;
    std::size_t const wanted = std::min(plan_.window - at_hand_.size(), slots - slot);
    auto const room =
        std::span(ring_).subspan(slot * plan_.block_bytes, wanted * plan_.block_bytes);
    auto const numbers = std::span(found).first(wanted);
    BlockWalk const walk = find(input_, plan_.block_bytes, scanned_, room, numbers);
    scanned_ = walk.next;
    for (std::uint32_t const number : numbers.first(walk.found)) at_hand_.push_back(number);
  }
}

std::optional<InaMessage> InaWorker::receive(std::span<const std::byte> message, TimePoint now) {
  require(running_, "in-network aggregation: no operation is under way; start one first");
  running_ = false;  // unless all goes well
  if (parse_ina_header(message).kind == InaKind::refusal) {
    parse_refusal(message, operation_, plan_.workers).raise();
  }
  expire(now);
  UpdateView const update = parse_update(
      message, plan_, {.operation = operation_, .round = round_, .blocks = &round_blocks_});
  check_next(update);
  // Step 3.
  write(update);
  round_blocks_ = update.next;
  if (round_blocks_.empty()) {
    write_zeros(plan_.blocks());
    done_ = true;
    return std::nullopt;
  }
  ++round_;
  running_ = true;
  return contribute();
}

// An update that leaves out what this worker has would lose it.
void InaWorker::check_next(UpdateView const& update) const {
  std::uint64_t const lacking = sent_ & ~update.header.bitmap;
  require<MalformedFrame>(lacking == 0, "aggregation message: bitmap is ", update.header.bitmap,
                          ", must have the bits of ", sent_, ", the blocks that worker ", rank_,
                          " has sent in round ", round_);
  bool const full = update.next.size() == plan_.window;
  for (std::uint32_t const number : at_hand_.numbers()) {
    if (full && number > update.next.back()) break;
    require<MalformedFrame>(
        std::ranges::binary_search(update.next.numbers(), number), "aggregation message: block ",
        number, ", which worker ", rank_, " has voted for, is not among the ", update.next.size(),
        " of the next round, must be there or behind a full window of ", int(plan_.window));
  }
}

void InaWorker::write(UpdateView const& update) {
  std::size_t const block_bytes = plan_.block_bytes;
  std::byte const* from = update.blocks.data();
  for (std::size_t i = 0; i < round_blocks_.size(); ++i) {
    if ((update.header.bitmap >> i & 1) == 0) continue;
    std::uint64_t const number = round_blocks_[i];
    write_zeros(number);
    auto const rest = output_.subspan(number * block_bytes);
    std::memcpy(rest.data(), from, std::min(block_bytes, rest.size()));
    from += block_bytes;
    written_ = number + 1;
  }
}

// The blocks before `end` that no worker had. In place they are zero already.
void InaWorker::write_zeros(std::uint64_t end) {
  if (input_.data() != output_.data() && written_ < end) {
    std::uint64_t const begin = written_ * plan_.block_bytes;
    std::uint64_t const past = std::min<std::uint64_t>(end * plan_.block_bytes, output_.size());
    std::ranges::fill(output_.subspan(begin, past - begin), std::byte{0});
  }
  written_ = std::max(written_, end);
}

void InaWorker::expire(TimePoint now) const {
  require<AggregationTimeout>(
      now < deadline_ || done_, "in-network aggregation: worker ", rank_,
      " has no update of round ", round_, " of operation ", operation_, " within ",
      std::chrono::duration<double>(limit_).count(),
      " s: the aggregator is stopped or cut off, or waits for another worker; see its log, or "
      "allow more time");
}

std::span<const std::byte> InaWorker::in_ring(std::size_t first, std::size_t count) const {
  return std::span(ring_).subspan(first * plan_.block_bytes, count * plan_.block_bytes);
}

}  // namespace sparsecomm
