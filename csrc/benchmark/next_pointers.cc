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

void NextPointerWorker::prepare() {
  spot_.resize(std::max(spot_.size(), plan().round_bytes()));
  head_.resize(std::max(head_.size(), most_head_bytes(plan().window)));
  for (std::uint32_t const block : round_blocks().numbers()) next_[block] = find_from(block);
}

// The first block of the column, from this one on, that is not zero.
std::uint32_t NextPointerWorker::find_from(std::uint64_t block) const {
  std::uint64_t const blocks = plan().blocks();
  for (; block < blocks; block += plan().window) {
    auto const rest = input().subspan(block * plan().block_bytes);
    auto const bytes = rest.first(std::min<std::size_t>(plan().block_bytes, rest.size()));
    std::uint64_t bit = 0;
    if (block_kernels().nonzero_blocks(bytes, plan().block_bytes, std::span(&bit, 1)) > 0) {
      return static_cast<std::uint32_t>(block);
    }
  }
  return none;
}

// Step 1.
InaMessage NextPointerWorker::contribute(std::uint64_t& sent) {
  std::size_t const bytes = plan().block_bytes;
  sent = 0;
  std::size_t count = 0;
  BlockList announced;
  for (std::size_t i = 0; i < round_blocks().size(); ++i) {
    std::uint32_t const block = round_blocks()[i];
    std::uint32_t& next = next_[block % plan().window];
    if (next == block) {
      auto const from = input().subspan(block * bytes);
      auto const to = std::span(spot_).subspan(count * bytes, bytes);
      std::size_t const there = std::min(bytes, from.size());
      std::memcpy(to.data(), from.data(), there);
      std::ranges::fill(to.subspan(there), std::byte{0});
      sent |= std::uint64_t{1} << i;
      ++count;
      next = find_from(std::uint64_t{block} + plan().window);
    }
    announced.push_back(next);
  }
  return encode_contribution(header(sent), plan(), announced, std::span(spot_).first(count * bytes),
                             {}, head_);
}

// Step 3.
UpdateView NextPointerWorker::parse(std::span<const std::byte> message,
                                    InaExpected const& expected) const {
  return parse_update(message, plan(), expected, parse_going_on);
}

void NextPointerWorker::check_next(UpdateView const& update) const {
  std::size_t j = 0;
  for (std::uint32_t const block : round_blocks().numbers()) {
    std::uint32_t const column = block % plan().window;
    bool const goes_on = j < update.next.size() && update.next[j] % plan().window == column;
    std::uint32_t const next = goes_on ? update.next[j++] : none;
    require<MalformedFrame>(next <= next_[column], "aggregation message: block ", next,
                            " follows block ", block, ", must be at most ", next_[column],
                            ", which worker ", rank(), " has announced");
  }
}

// Step 2.
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
