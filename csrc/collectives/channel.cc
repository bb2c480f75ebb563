#include "collectives/channel.h"

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
      frame = parse_frame(arrived.subspan(used), stamp());
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

}  // namespace sparsecomm
