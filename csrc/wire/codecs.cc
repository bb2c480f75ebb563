#include "wire/codecs.h"

#include <array>
#include <cstring>

#include "wire/delta.h"
#include "wire/sorted.h"

namespace sparsecomm {
namespace {

std::size_t raw32_bytes(std::size_t count) { return count * sizeof(std::uint32_t); }

std::size_t raw32_encoded_bytes(std::span<const std::uint32_t> indices, std::uint32_t) {
  return raw32_bytes(indices.size());
}

void raw32_encode(std::span<const std::uint32_t> indices, std::uint32_t, std::span<std::byte> out) {
  if (!indices.empty()) std::memcpy(out.data(), indices.data(), indices.size_bytes());
}

void raw32_decode(std::span<const std::byte> in, std::uint32_t first_index, std::uint32_t extent,
                  std::span<std::uint32_t> indices) {
  require<MalformedFrame>(in.size() == indices.size_bytes(), "raw32 indices: index_bytes is ",
                          in.size(), ", must be ", indices.size_bytes(), " for count ",
                          indices.size());
  if (indices.empty()) return;
  std::memcpy(indices.data(), in.data(), in.size());
  require<MalformedFrame>(strictly_increasing(indices),
                          "raw32 indices: not strictly increasing among ", indices.size());
  std::uint64_t const end = std::uint64_t{first_index} + extent;
  require<MalformedFrame>(indices.front() >= first_index, "raw32 indices: first index is ",
                          indices.front(), ", must be at least first_index ", first_index);
  require<MalformedFrame>(indices.back() < end, "raw32 indices: last index is ", indices.back(),
                          ", must be below first_index + extent = ", end);
}

constexpr std::array<IndexCodecEntry, 2> table{{
    {IndexCodec::raw32, "raw32", "4 bytes per index", raw32_encoded_bytes, raw32_encode,
     raw32_decode, raw32_bytes, raw32_bytes},
    {IndexCodec::delta, "delta", "gaps, Golomb-Rice coded in blocks of 128", delta::encoded_bytes,
     delta::encode, delta::decode, delta::min_bytes, delta::max_bytes},
}};

}  // namespace

std::span<const IndexCodecEntry> index_codecs() { return table; }

}  // namespace sparsecomm
