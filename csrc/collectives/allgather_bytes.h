// Allgather of byte strings whose lengths differ from rank to rank and are not known to the others.
//
// First the lengths, then the bytes, each by a Bruck allgather: 2 ceil(log2 P) messages. Where all
// strings are empty the second round is left out.
#pragma once

#include <limits>

#include "collectives/frame_allgather.h"

namespace sparsecomm {

class BytesAllgather {
 public:
  // `limit` bounds what one rank may contribute; a frame holds no more than the default.
  explicit BytesAllgather(std::uint64_t limit = std::numeric_limits<std::uint32_t>::max())
      : limit_(limit) {}

  // Element r of the result is rank r's string, own included; it and the result are valid until the
  // next run(). Throws Mismatch, the same on every rank, where a rank contributes more than the
  // limit.
  std::span<const std::span<const std::byte>> run(Channel& channel, std::span<const std::byte> own);

 private:
  std::uint64_t limit_;
  ByteBuffer frame_;
  PackedAllgather<std::uint64_t> lengths_;
  FrameAllgather gather_;
  std::vector<std::span<const std::byte>> strings_;
};

// `longest`: of the strings, in bytes.
Cost allgather_bytes_cost(int ranks, std::uint64_t longest);

}  // namespace sparsecomm
