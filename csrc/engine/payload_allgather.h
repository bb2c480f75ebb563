// The payloads of several operations, merged at once: what a comparison does for one of them.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "collectives/frame_allgather.h"
#include "engine/operation.h"

namespace sparsecomm {

class PayloadAllgather {
 public:
  struct Part {
    Operation const* operation;
    std::span<const std::byte> payload;  // of this rank; the same size on all
    std::span<std::byte> merged = {};    // of all ranks, until the next run
    bool agrees = true;                  // none belongs to another operation: the same on all ranks
  };

  // Merges each part's payloads in the order of the ranks, see Operation::merge(). A Bruck
  // allgather: ceil(log2 P) messages, none where all payloads are empty.
  void run(Channel& channel, Phase phase, std::span<Part> parts);
  // The same of what has been gathered already. arrived[r]: rank r's payloads, one after another.
  void merge(Channel& channel, std::span<Part> parts,
             std::span<const std::span<const std::byte>> arrived);

 private:
  std::vector<std::byte> own_, merged_;
  std::vector<std::span<const std::byte>> arrived_;
  ByteBuffer frame_;
  FrameAllgather gather_;
};

}  // namespace sparsecomm
