#include "collectives/channel.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

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

std::span<const FrameView> FrameAllgather::run(Channel& channel, Phase phase,
                                               std::span<const std::byte> own,
                                               std::size_t max_frame_bytes) {
  int const rank = channel.rank();
  int const size = channel.size();
  auto const others = static_cast<std::size_t>(size - 1);
  rooms_.assign(size, max_frame_bytes);
  if (others > 0 && max_frame_bytes > lengths_first_above_ / others) {
    std::uint64_t const length = own.size();
    std::array<std::byte, header_bytes + sizeof length> announcement{};
    encode_bytes(channel.stamp(), std::as_bytes(std::span(&length, 1)), announcement);
    rooms_.assign(size, announcement.size());
    gather(channel, phase, announcement, lengths_buffer_);
    for (int step = 1; step < size; ++step) {
      channel.decode_from((rank + step) % size, [&] {
        std::uint64_t announced = 0;
        require<MalformedFrame>(blocks_[step].values.size() == sizeof announced, "a length of ",
                                blocks_[step].values.size(), " bytes");
        std::memcpy(&announced, blocks_[step].values.data(), sizeof announced);
        require<MalformedFrame>(announced <= max_frame_bytes, "a frame of ", announced,
                                " bytes is announced, must be at most ", max_frame_bytes);
        rooms_[step] = announced;
      });
    }
  }
  gather(channel, phase, own, buffer_);
  frames_.resize(size);
  for (int step = 0; step < size; ++step) frames_[(rank + step) % size] = blocks_[step];
  return frames_;
}

void FrameAllgather::gather(Channel& channel, Phase phase, std::span<const std::byte> own,
                            ByteBuffer& scratch) {
  int const rank = channel.rank();
  int const size = channel.size();
  auto const room_of = [&](int first, int count) {
    auto const from = rooms_.begin() + first;
    return std::accumulate(from, from + count, std::size_t{0});
  };
  // Every message is one contiguous prefix.
  auto const buffer = scratch.take(own.size() + room_of(1, size - 1));
  std::copy(own.begin(), own.end(), buffer.begin());
  blocks_.resize(size);
  ends_.assign(1, own.size());
  blocks_[0] = parse_frame(buffer.first(own.size()), channel.stamp());
  for (int distance = 1; distance < size; distance *= 2) {
    int const count = std::min(distance, size - distance);
    int const source = (rank + distance) % size;
    auto const incoming = buffer.subspan(ends_.back(), room_of(distance, count));
    auto const arrived = std::span(blocks_).subspan(distance, count);
    Request receive = channel.irecv(source, phase, incoming);
    Request send =
        channel.isend((rank - distance + size) % size, phase, buffer.first(ends_[count - 1]));
    channel.wait_frames(receive, source, incoming, arrived);
    channel.wait(send);
    for (FrameView const& block : arrived) ends_.push_back(ends_.back() + block.size());
  }
}

}  // namespace sparsecomm
