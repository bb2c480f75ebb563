// What frame.cc and header.cc share: the constants of the header and its checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/error.h"
#include "wire/frame.h"

namespace sparsecomm {

inline constexpr std::uint16_t frame_magic = 0x5ca7;
inline constexpr std::uint8_t frame_version = 1;
inline constexpr std::uint64_t index_space = std::uint64_t{1} << 32;

// Throws MalformedFrame, naming the field, unless `holds`.
template <class... Parts>
void field(bool holds, std::string_view name, std::uint64_t value, Parts const&... bound) {
  require<MalformedFrame>(holds, "frame: ", name, " is ", value, ", must be ", bound...);
}

// What the checksums of a run's frames are combined with, by exclusive or. A frame that belongs to
// another run shows it: 32 of the 64 bits follow from the others.
constexpr std::uint64_t seed_of(std::uint32_t run) {
  std::uint32_t mixed = run;
  for (std::uint32_t const factor : {0x85ebca6bu, 0xc2b2ae35u}) {
    mixed ^= mixed >> 15;
    mixed *= factor;
  }
  return std::uint64_t{run} << 32 | (mixed ^ mixed >> 16);
}

// Over the header, but for its checksum, and the payload; not combined with a seed.
std::uint64_t frame_checksum(FrameHeader header, std::span<const std::byte> indices,
                             std::span<const std::byte> values);

}  // namespace sparsecomm
