#include "engine/payload_allgather.h"

#include "base/error.h"

namespace sparsecomm {

void PayloadAllgather::run(Channel& channel, Phase phase, std::span<Part> parts) {
  own_.clear();
  for (Part const& part : parts) {
    own_.insert(own_.end(), part.payload.begin(), part.payload.end());
  }
  if (own_.empty()) return;
  auto const frame = frame_.take(header_bytes + own_.size());
  encode_bytes(channel.stamp(), own_, frame);
  arrived_.clear();
  for (FrameView const& other : gather_.run(channel, phase, frame, frame.size())) {
    arrived_.push_back(other.values);
  }
  merge(channel, parts, arrived_);
}

void PayloadAllgather::merge(Channel& channel, std::span<Part> parts,
                             std::span<const std::span<const std::byte>> arrived) {
  std::size_t bytes = 0;
  for (Part const& part : parts) bytes += part.payload.size();
  merged_.assign(bytes, std::byte{0});
  std::span<std::byte> room(merged_);
  for (Part& part : parts) {
    part.merged = room.first(part.payload.size());
    room = room.subspan(part.payload.size());
  }
  for (int rank = 0; rank < channel.size(); ++rank) {
    channel.decode_from(rank, [&] {
      auto left = arrived[static_cast<std::size_t>(rank)];
      require<MalformedFrame>(left.size() == bytes, "payloads of ", left.size(),
                              " bytes instead of ", bytes);
      for (Part& part : parts) {
        std::size_t const size = part.payload.size();
        if (size == 0) continue;
        part.agrees = part.operation->merge(part.merged, left.first(size)) && part.agrees;
        left = left.subspan(size);
      }
    });
  }
}

}  // namespace sparsecomm
