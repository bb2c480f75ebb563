#include "collectives/channel.h"

#include <algorithm>

namespace sparsecomm {

void Channel::wait_all(std::span<Request> requests) {
  for (Request& request : requests) wait(request);
}

void Channel::wait_frames(Request& request, int peer, std::span<const std::byte> buffer,
                          std::span<FrameView> frames) {
  auto const arrived = buffer.first(wait(request));
  std::size_t used = 0;
  decode_from(peer, [&] {
    for (FrameView& frame : frames) {
      frame = parse_frame(arrived.subspan(used), operation_);
      used += frame.size();
    }
  });
  transport_.count_received(peer, used);
}

FrameView Channel::wait_frame(Request& request, int peer, std::span<const std::byte> buffer) {
  FrameView frame{};
  wait_frames(request, peer, buffer, {&frame, 1});
  return frame;
}

void Channel::blame(int peer, std::exception const& error) const {
  throw PeerInvalid(concat("rank ", peer, " sent an invalid message: ", error.what()), {peer});
}

std::span<const FrameView> FrameAllgather::run(Channel& channel, Phase phase,
                                               std::span<const std::byte> own,
                                               std::size_t max_frame_bytes) {
  int const rank = channel.rank();
  int const size = channel.size();
  // Blocks lie in the order rank, rank + 1, ... (mod size), so that every message is one contiguous
  // prefix.
  auto const buffer = buffer_.take(own.size() + (size - 1) * max_frame_bytes);
  std::copy(own.begin(), own.end(), buffer.begin());
  blocks_.resize(size);
  frames_.resize(size);
  ends_.assign(1, own.size());
  blocks_[0] = parse_frame(buffer.first(own.size()), channel.operation());
  for (int distance = 1; distance < size; distance *= 2) {
    int const count = std::min(distance, size - distance);
    int const source = (rank + distance) % size;
    auto const incoming = buffer.subspan(ends_.back(), count * max_frame_bytes);
    auto const arrived = std::span(blocks_).subspan(distance, count);
    Request receive = channel.irecv(source, phase, incoming);
    Request send =
        channel.isend((rank - distance + size) % size, phase, buffer.first(ends_[count - 1]));
    channel.wait_frames(receive, source, incoming, arrived);
    channel.wait(send);
    for (FrameView const& block : arrived) ends_.push_back(ends_.back() + block.size());
  }
  for (int step = 0; step < size; ++step) frames_[(rank + step) % size] = blocks_[step];
  return frames_;
}

}  // namespace sparsecomm
