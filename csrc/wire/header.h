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

// Over the header, but for its checksum, and the payload.
std::uint64_t frame_checksum(FrameHeader header, std::span<const std::byte> indices,
                             std::span<const std::byte> values);

}  // namespace sparsecomm
