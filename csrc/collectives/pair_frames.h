// Frames of pairs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/channel.h"
#include "wire/frame.h"

namespace sparsecomm {

// Appends the pairs of a frame of [first, last), sparse or dense. Throws PeerInvalid where it is
// malformed or has more than `most`; the vectors then are as before.
template <class V>
void decode_pairs(Channel& channel, int peer, FrameView const& frame, std::uint32_t first,
                  std::uint32_t last, std::uint64_t most, std::vector<std::uint32_t>& indices,
                  std::vector<V>& values) {
  std::size_t const before = indices.size();
  channel.decode_from(peer, [&] {
    decode_sparse<V>(frame, first, last - first, indices, values);
    std::size_t const count = indices.size() - before;
    if (count <= most) return;
    indices.resize(before);
    values.resize(before);
    throw MalformedFrame(concat("frame: it has ", count, " entries, must be at most ", most));
  });
}

}  // namespace sparsecomm
