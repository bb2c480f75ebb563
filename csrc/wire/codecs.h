// Index and value codecs: spans of numbers <-> bytes. No sockets, no allocation; every byte read is
// validated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/error.h"

namespace sparsecomm {

enum class IndexCodec : std::uint8_t { none = 0, raw32 = 1, delta = 2 };
enum class ValueCodec : std::uint8_t { none = 0, raw = 1 };

enum class IndexCodecChoice : std::uint8_t { smallest, raw32, delta };

// One line per index codec; tests, frames and docs iterate the table index_codecs.
struct IndexCodecEntry {
  IndexCodec id;
  std::string_view name;
  std::string_view description;
  // Exact encoded size in bytes of strictly increasing indices, all >= first_index. Neither this
  // nor encode() checks their order: encode_sparse() does.
  std::size_t (*encoded_bytes)(std::span<const std::uint32_t> indices, std::uint32_t first_index);
  // Writes exactly encoded_bytes() bytes.
  void (*encode)(std::span<const std::uint32_t> indices, std::uint32_t first_index,
                 std::span<std::byte> out);
  // Fills `indices` (its size is the count) from all of `in`; throws MalformedFrame unless the
  // bytes decode to strictly increasing positions of [first_index, first_index + extent) and are
  // used up exactly.
  void (*decode)(std::span<const std::byte> in, std::uint32_t first_index, std::uint32_t extent,
                 std::span<std::uint32_t> indices);
  // The least and the most bytes that any `count` indices can take.
  std::size_t (*min_bytes)(std::size_t count);
  std::size_t (*max_bytes)(std::size_t count);
};

std::span<const IndexCodecEntry> index_codecs();

}  // namespace sparsecomm
