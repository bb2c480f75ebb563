// Allgather of one frame per rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "collectives/channel.h"
#include "collectives/figures.h"

namespace sparsecomm {

// Bruck's: ceil(log2 P) messages, and every frame crosses P - 1 links in all. If the worst frames
// of all ranks would take more than `lengths_first_above` bytes, the ranks tell each other their
// frames' lengths first, in as many messages, and make room for those.
class FrameAllgather {
 public:
  FrameAllgather() = default;
  explicit FrameAllgather(std::size_t lengths_first_above)
      : lengths_first_above_(lengths_first_above) {}

  // `max_frame_bytes` bounds each rank's frame. Element r of the result is rank r's frame, own
  // included; it and the result are valid until the next run().
  std::span<const FrameView> run(Channel& channel, Phase phase, std::span<const std::byte> own,
                                 std::size_t max_frame_bytes);

 private:
  std::size_t lengths_first_above_ = std::size_t{256} << 20;
  ByteBuffer buffer_;
  PackedAllgather<std::uint64_t> lengths_;
  // [step]: of the frame of rank_at(step). Where it may end at most, and where it does.
  std::vector<std::size_t> room_ends_, ends_;
  std::vector<FrameView> blocks_, frames_;
};

}  // namespace sparsecomm
