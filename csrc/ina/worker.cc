#include "ina/worker.h"

#include <algorithm>
#include <array>

namespace sparsecomm {

void InaWorker::prepare() {
  at_hand_.clear();
  scanned_ = 0;
  ring_begin_ = 0;
  ring_.resize(std::max(ring_.size(), 2 * plan().round_bytes()));
  head_.resize(std::max(head_.size(), most_head_bytes(plan().window)));
}

// Steps 1 and 2.
InaMessage InaWorker::contribute(std::uint64_t& sent) {
  fill();
  sent = 0;
  std::size_t count = 0;
  for (std::size_t i = 0; i < round_blocks().size() && count < at_hand_.size(); ++i) {
    if (round_blocks()[i] != at_hand_[count]) continue;
    sent |= std::uint64_t{1} << i;
    ++count;
  }
  std::size_t const slots = 2 * std::size_t{plan().window};
  std::size_t const unbroken = std::min(count, slots - ring_begin_);
  auto const blocks = in_ring(ring_begin_, unbroken);
  auto const more_blocks = in_ring(0, count - unbroken);
  at_hand_.drop_front(count);
  ring_begin_ = (ring_begin_ + count) % slots;
  fill();
  return encode_contribution(header(sent), plan(), at_hand_, blocks, more_blocks, head_);
}

// Step 1. At most d slots hold blocks at hand and d others those of the message in flight, so the
// slots that are filled are free.
void InaWorker::fill() {
  std::size_t const slots = 2 * std::size_t{plan().window};
  std::array<std::uint32_t, most_blocks> found;
  while (at_hand_.size() < plan().window && scanned_ < plan().blocks()) {
    std::size_t const slot = (ring_begin_ + at_hand_.size()) % slots;
    std::size_t const wanted = std::min(plan().window - at_hand_.size(), slots - slot);
    auto const room =
        std::span(ring_).subspan(slot * plan().block_bytes, wanted * plan().block_bytes);
    auto const numbers = std::span(found).first(wanted);
    BlockWalk const walk = find(input(), plan().block_bytes, scanned_, room, numbers);
    scanned_ = walk.next;
    for (std::uint32_t const number : numbers.first(walk.found)) at_hand_.push_back(number);
  }
}

// Step 3.
UpdateView InaWorker::parse(std::span<const std::byte> message, InaExpected const& expected) const {
  return parse_update(message, plan(), expected);
}

void InaWorker::check_next(UpdateView const& update) const {
  bool const full = update.next.size() == plan().window;
  for (std::uint32_t const number : at_hand_.numbers()) {
    if (full && number > update.next.back()) break;
    require<MalformedFrame>(
        std::ranges::binary_search(update.next.numbers(), number), "aggregation message: block ",
        number, ", which worker ", rank(), " has voted for, is not among the ", update.next.size(),
        " of the next round, must be there or behind a full window of ", int(plan().window));
  }
}

std::span<const std::byte> InaWorker::in_ring(std::size_t first, std::size_t count) const {
  return std::span(ring_).subspan(first * plan().block_bytes, count * plan().block_bytes);
}

}  // namespace sparsecomm
