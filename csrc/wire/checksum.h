// A 64-bit checksum against damage in transit, not against an adversary. Bytes that differ within
// one aligned word of 8 always change it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace sparsecomm {

class Checksum {
 public:
  // Adds the bytes of a part, zero-padded to a multiple of 8; lengths of parts are not told apart.
  void add(std::span<const std::byte> part);
  std::uint64_t value() const;

 private:
  // Independent lanes hide the latency of the multiplication.
  std::array<std::uint64_t, 8> lanes_{0x13198a2e03707344u, 0xa4093822299f31d0u, 0x082efa98ec4e6c89u,
                                      0x452821e638d01377u, 0xbe5466cf34e90c6cu, 0xc0ac29b7c97c50ddu,
                                      0x3f84d5b5b5470917u, 0x9216d5d98979fb1bu};
};

}  // namespace sparsecomm
