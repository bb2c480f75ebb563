#include "collectives/frame_allgather.h"

#include <algorithm>

#include "collectives/patterns.h"

namespace sparsecomm {

std::span<const FrameView> FrameAllgather::run(Channel& channel, Phase phase,
                                               std::span<const std::byte> own,
                                               std::size_t max_frame_bytes) {
  int const rank = channel.rank();
  int const size = channel.size();
  auto const others = static_cast<std::size_t>(size - 1);
  std::span<const std::uint64_t> lengths;
  if (others > 0 && max_frame_bytes > lengths_first_above_ / others) {
    lengths = lengths_.run(channel, phase, own.size(), [&](int, std::uint64_t length) {
      require<MalformedFrame>(length <= max_frame_bytes, "a frame of ", length,
                              " bytes is announced, must be at most ", max_frame_bytes);
    });
  }
  room_ends_.assign(1, own.size());
  for (int step = 1; step < size; ++step) {
    std::size_t const room = lengths.empty() ? max_frame_bytes : lengths[rank_at(step, rank, size)];
    room_ends_.push_back(room_ends_.back() + room);
  }

  auto const buffer = buffer_.take(room_ends_.back());
  std::copy(own.begin(), own.end(), buffer.begin());
  blocks_.resize(size);
  ends_.assign(1, own.size());
  blocks_[0] = parse_frame(buffer.first(own.size()), channel.stamp());
  for_each_bruck_round(rank, size, [&](BruckRound const& round) {
    std::size_t const room =
        room_ends_[round.first + round.count - 1] - room_ends_[round.first - 1];
    auto const incoming = buffer.subspan(ends_.back(), room);
    auto const arrived = std::span(blocks_).subspan(round.first, round.count);
    Request receive = channel.irecv(round.source, phase, incoming);
    Request send = channel.isend(round.destination, phase, buffer.first(ends_[round.count - 1]));
    channel.wait_frames(receive, round.source, incoming, arrived);
    channel.wait(send);
    for (FrameView const& block : arrived) ends_.push_back(ends_.back() + block.size());
  });
  frames_.resize(size);
  for (int step = 0; step < size; ++step) frames_[rank_at(step, rank, size)] = blocks_[step];
  return frames_;
}

}  // namespace sparsecomm
