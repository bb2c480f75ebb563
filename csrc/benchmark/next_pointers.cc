#include "benchmark/next_pointers.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/block_scan.h"

namespace sparsecomm {
namespace {

constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();

std::uint32_t load_number(std::span<const std::byte> bytes, std::size_t i) {
  std::uint32_t number = 0;
  std::memcpy(&number, bytes.data() + i * sizeof(number), sizeof(number));
  return number;
}

void check_next(std::uint32_t number, std::uint32_t block, InaPlan const& plan) {
  check_block_number(number, std::uint64_t{block} + 1, plan.blocks());
  require<MalformedFrame>(number % plan.window == block % plan.window,
                          "aggregation message: block ", number, " follows block ", block,
                          ", must be of the same column of ", int(plan.window));
}

// From a worker: a number for each block of the round.
BlockList parse_next(std::span<const std::byte> bytes, InaPlan const& plan,
                     BlockList const& round) {
  std::size_t const count = bytes.size() / sizeof(std::uint32_t);
  require<MalformedFrame>(count == round.size(), "aggregation message: ", count,
                          " next blocks, must be one for each of the ", round.size(), " columns");
  BlockList list;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t const number = load_number(bytes, i);
    if (number != none) check_next(number, round[i], plan);
    list.push_back(number);
  }
  return list;
}

// From the aggregator: numbers of the columns that go on, in the order of the round's.
BlockList parse_going_on(std::span<const std::byte> bytes, InaPlan const& plan,
                         BlockList const& round) {
  BlockList list;
  std::size_t column = 0;
  for (std::size_t i = 0; i < bytes.size() / sizeof(std::uint32_t); ++i, ++column) {
    std::uint32_t const number = load_number(bytes, i);
    while (column < round.size() && round[column] % plan.window != number % plan.window) ++column;
    require<MalformedFrame>(column < round.size(), "aggregation message: block ", number,
                            ", must be of a column that has not ended, in their order");
    check_next(number, round[column], plan);
    list.push_back(number);
  }
  return list;
}

}  // namespace

// Step 1.
InaMessage NextPointerWorker::start(InaPlan const& plan, int rank, std::uint32_t operation,
                                    std::span<const std::byte> input, std::span<std::byte> output,
                                    TimePoint now, Duration limit) {
  require_plan(plan);
  require_data(plan, input, output);
  plan_ = plan;
  rank_ = rank;
  operation_ = operation;
  round_ = 0;
  input_ = input;
  output_ = output;
  limit_ = std::clamp(limit, Duration::zero(), longest_duration);
  deadline_ = now + limit_;
  round_blocks_ = plan.first_blocks();
  running_ = true;
  nonzero_.resize((plan.blocks() + 63) / 64);
  spot_.resize(std::max(spot_.size(), plan.round_bytes()));
  head_.resize(std::max(head_.size(), most_head_bytes(plan.window)));
  block_kernels().nonzero_blocks(input_, plan.block_bytes, nonzero_);
  if (input.data() != output.data()) std::ranges::fill(output, std::byte{0});
  return contribute();
}

std::uint32_t NextPointerWorker::next_in_column(std::uint32_t block) const {
  std::uint64_t next = std::uint64_t{block} + plan_.window;
  while (next < plan_.blocks() && !has(next)) next += plan_.window;
  return next < plan_.blocks() ? static_cast<std::uint32_t>(next) : none;
}

// Step 2.
InaMessage NextPointerWorker::contribute() {
  std::size_t const bytes = plan_.block_bytes;
  std::uint64_t sent = 0;
  std::size_t count = 0;
  BlockList next;
  for (std::size_t i = 0; i < round_blocks_.size(); ++i) {
    std::uint32_t const block = round_blocks_[i];
    next.push_back(next_in_column(block));
    if (!has(block)) continue;
    auto const from = input_.subspan(block * bytes);
    auto const to = std::span(spot_).subspan(count * bytes, bytes);
    std::size_t const there = std::min(bytes, from.size());
    std::memcpy(to.data(), from.data(), there);
    std::ranges::fill(to.subspan(there), std::byte{0});
    sent |= std::uint64_t{1} << i;
    ++count;
  }
  return encode_contribution({.operation = operation_,
                              .round = round_,
                              .worker = static_cast<std::uint16_t>(rank_),
                              .bitmap = sent},
                             plan_, next, std::span(spot_).first(count * bytes), {}, head_);
}

std::optional<InaMessage> NextPointerWorker::receive(std::span<const std::byte> message,
                                                     TimePoint now) {
  require(running_, "in-network aggregation: no operation is under way; start one first");
  running_ = false;  // unless all goes well
  if (parse_ina_header(message).kind == InaKind::refusal) {
    parse_refusal(message, operation_, plan_.workers).raise();
  }
  require<AggregationTimeout>(now < deadline_, "in-network aggregation: worker ", rank_,
                              " has no update of round ", round_, " within ",
                              std::chrono::duration<double>(limit_).count(), " s");
  UpdateView const update = parse_update(
      message, plan_, {.operation = operation_, .round = round_, .blocks = &round_blocks_},
      parse_going_on);
  std::byte const* from = update.blocks.data();
  for (std::size_t i = 0; i < round_blocks_.size(); ++i) {
    if ((update.header.bitmap >> i & 1) == 0) continue;
    auto const to = output_.subspan(std::size_t{round_blocks_[i]} * plan_.block_bytes);
    std::memcpy(to.data(), from, std::min<std::size_t>(plan_.block_bytes, to.size()));
    from += plan_.block_bytes;
  }
  round_blocks_ = update.next;
  if (round_blocks_.empty()) return std::nullopt;
  ++round_;
  running_ = true;
  return contribute();
}

// Step 3.
ContributionView NextPointerAggregator::parse(std::span<const std::byte> message, int worker,
                                              InaExpected const& expected) const {
  return parse_contribution(message, plan(), worker, expected, parse_next);
}

BlockList NextPointerAggregator::merge(BlockList const& votes, BlockList const& more) const {
  if (votes.empty()) return more;
  BlockList merged;
  for (std::size_t i = 0; i < votes.size(); ++i) merged.push_back(std::min(votes[i], more[i]));
  return merged;
}

BlockList NextPointerAggregator::conclude(BlockList const& votes) const {
  BlockList next;
  for (std::uint32_t const number : votes.numbers()) {
    if (number != none) next.push_back(number);
  }
  return next;
}

}  // namespace sparsecomm
