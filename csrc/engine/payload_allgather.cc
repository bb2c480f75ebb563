#include "engine/payload_allgather.h"

#include "base/error.h"

namespace sparsecomm {

void PayloadAllgather::run(Channel& channel, Phase phase, std::span<Part> parts) {
  own_.clear();
  for (Part const& part : parts) {
    own_.insert(own_.end(), part.payload.begin(), part.payload.end());
  }
  if (own_.empty()) return;
  merged_.assign(own_.size(), std::byte{0});
  std::size_t begin = 0;
  for (Part& part : parts) {
    part.merged = std::span(merged_).subspan(begin, part.payload.size());
    begin += part.payload.size();
  }
  auto const frame = frame_.take(header_bytes + own_.size());
  encode_bytes(channel.stamp(), own_, frame);
  auto const frames = gather_.run(channel, phase, frame, frame.size());
  for (int rank = 0; rank < channel.size(); ++rank) {
    channel.decode_from(rank, [&] {
      auto arrived = frames[static_cast<std::size_t>(rank)].values;
      require<MalformedFrame>(arrived.size() == own_.size(), "payloads of ", arrived.size(),
                              " bytes instead of ", own_.size());
      for (Part& part : parts) {
        std::size_t const size = part.payload.size();
        if (size == 0) continue;
        part.agrees = part.operation->merge(part.merged, arrived.first(size)) && part.agrees;
        arrived = arrived.subspan(size);
      }
    });
  }
}

}  // namespace sparsecomm
