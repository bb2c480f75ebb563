#include "wire/header.h"

#include <cstring>

#include "wire/checksum.h"

namespace sparsecomm {
namespace {

void check_codecs(FrameHeader const& h) {
  auto const index_codec = std::uint8_t(h.index_codec);
  auto const value_codec = std::uint8_t(h.value_codec);
  if (h.kind == FrameKind::sparse && h.count > 0) {
    field(find_index_codec(h.index_codec) != nullptr, "index_codec", index_codec,
          "a known codec in a sparse frame");
  } else {
    field(h.index_codec == IndexCodec::none, "index_codec", index_codec,
          "0 (none) in a frame without indices");
  }
  if (h.kind == FrameKind::bytes) {
    field(h.value_codec == ValueCodec::none, "value_codec", value_codec,
          "0 (none) in a bytes frame");
  } else {
    ValueCodecEntry const* const codec = find_value_codec(h.value_codec);
    field(codec != nullptr, "value_codec", value_codec, "a known codec in a frame with values");
    field(carries(*codec, h.dtype), "value_codec", value_codec, "1 (raw) for dtype ",
          name(h.dtype));
  }
}

void check_extent(FrameHeader const& h) {
  if (h.kind == FrameKind::bytes) {
    field(h.first_index == 0, "first_index", h.first_index, "0 in a bytes frame");
    field(h.extent == 0, "extent", h.extent, "0 in a bytes frame");
    return;
  }
  field(h.extent <= index_space - h.first_index, "extent", h.extent,
        "at most 2^32 - first_index = ", index_space - h.first_index);
  if (h.kind == FrameKind::sparse) {
    field(h.count <= h.extent, "count", h.count, "at most extent ", h.extent);
  } else {
    field(h.count == h.extent, "count", h.count, "extent ", h.extent, " in a dense frame");
  }
}

void check_lengths(FrameHeader const& h, std::size_t available) {
  if (h.index_codec == IndexCodec::none) {
    field(h.index_bytes == 0, "index_bytes", h.index_bytes, "0 in a frame without indices");
  } else {
    IndexCodecEntry const& codec = *find_index_codec(h.index_codec);
    std::size_t const least = codec.min_bytes(h.count, h.extent);
    std::size_t const most = codec.max_bytes(h.count, h.extent);
    field(h.index_bytes >= least && h.index_bytes <= most, "index_bytes", h.index_bytes, least,
          " to ", most, " for count ", h.count, " in codec ", codec.name);
  }
  ValueCodecEntry const* const codec = find_value_codec(h.value_codec);
  std::uint64_t const value_bytes =
      codec == nullptr ? h.count : codec->encoded_bytes(h.count, size_of(h.dtype));
  field(h.value_bytes == value_bytes, "value_bytes", h.value_bytes, value_bytes, " for count ",
        h.count, " in codec ", codec == nullptr ? "none" : codec->name);
  std::uint64_t const payload = std::uint64_t{h.index_bytes} + h.value_bytes;
  field(payload <= available, "index_bytes + value_bytes", payload, "at most the ", available,
        " bytes that follow the header");
}

}  // namespace

std::uint64_t frame_checksum(FrameHeader header, std::span<const std::byte> indices,
                             std::span<const std::byte> values) {
  header.checksum = 0;
  Checksum checksum;
  checksum.add(std::as_bytes(std::span(&header, 1)));
  checksum.add(indices);
  checksum.add(values);
  return checksum.value();
}

FrameView parse_frame(std::span<const std::byte> in, FrameStamp stamp) {
  field(in.size() >= header_bytes, "length", in.size(), "at least the header's ", header_bytes);
  FrameView frame;
  FrameHeader& h = frame.header;
  std::memcpy(&h, in.data(), header_bytes);
  field(h.magic == frame_magic, "magic", h.magic, frame_magic);
  field(h.version == frame_version, "version", h.version, int(frame_version));
  field(h.kind >= FrameKind::sparse && h.kind <= FrameKind::bytes, "kind", std::uint8_t(h.kind),
        "1 (sparse), 2 (dense) or 3 (bytes)");
  field(h.dtype <= DType::i64, "dtype", std::uint8_t(h.dtype), "0 to 5");
  if (h.kind == FrameKind::sparse) {
    field(h.dtype != DType::f16 && h.dtype != DType::bf16, "dtype", std::uint8_t(h.dtype),
          "0 (f32), 1 (f64), 4 (i32) or 5 (i64) in a sparse frame");
  } else if (h.kind == FrameKind::bytes) {
    field(h.dtype == DType::f32, "dtype", std::uint8_t(h.dtype), "0 in a bytes frame");
  }
  check_codecs(h);
  field(h.reserved == 0, "reserved", h.reserved, "0");
  check_extent(h);
  check_lengths(h, in.size() - header_bytes);
  frame.indices = in.subspan(header_bytes, h.index_bytes);
  frame.values = in.subspan(header_bytes + h.index_bytes, h.value_bytes);
  std::uint64_t const checksum =
      frame_checksum(h, frame.indices, frame.values) ^ seed_of(stamp.run);
  std::uint64_t const seed = h.checksum ^ checksum ^ seed_of(stamp.run);
  auto const run = static_cast<std::uint32_t>(seed >> 32);
  require<MalformedFrame>(run == stamp.run || seed != seed_of(run),
                          "frame: it belongs to another run or communicator, ", run, " instead of ",
                          stamp.run, "; is a process of an earlier job still running?");
  field(h.operation == stamp.operation, "operation", h.operation, stamp.operation);
  field(h.checksum == checksum, "checksum", h.checksum, checksum, " as computed over its ",
        frame.size(), " bytes");
  return frame;
}

}  // namespace sparsecomm
