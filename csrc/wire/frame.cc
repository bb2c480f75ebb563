#include "wire/frame.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "wire/checksum.h"
#include "wire/sorted.h"

namespace sparsecomm {
namespace {

static_assert(std::endian::native == std::endian::little,
              "headers and payloads are copied as they lie in memory: little-endian");
static_assert(std::uint8_t(IndexCodecChoice::raw32) == std::uint8_t(IndexCodec::raw32) &&
              std::uint8_t(IndexCodecChoice::delta) == std::uint8_t(IndexCodec::delta));

constexpr std::uint16_t frame_magic = 0x5ca7;
constexpr std::uint8_t frame_version = 1;
constexpr std::uint64_t index_space = std::uint64_t{1} << 32;
constexpr std::size_t max_payload = std::numeric_limits<std::uint32_t>::max();

bool allows(IndexCodecChoice choice, IndexCodec id) {
  return choice == IndexCodecChoice::smallest || std::uint8_t(choice) == std::uint8_t(id);
}

std::uint64_t checksum_of(FrameHeader header, std::span<const std::byte> indices,
                          std::span<const std::byte> values) {
  header.checksum = 0;
  Checksum checksum;
  checksum.add(std::as_bytes(std::span(&header, 1)));
  checksum.add(indices);
  checksum.add(values);
  return checksum.value();
}

void check_range(std::uint32_t first_index, std::uint64_t extent) {
  require(first_index + extent <= index_space && extent < index_space, "frame: first_index ",
          first_index, " + extent ", extent, " exceeds 2^32 or extent 2^32 - 1; split the range");
}

FrameHeader new_header(std::uint32_t operation, FrameKind kind, DType dtype,
                       ValueCodec value_codec) {
  return {.magic = frame_magic,
          .version = frame_version,
          .kind = kind,
          .dtype = dtype,
          .index_codec = IndexCodec::none,
          .value_codec = value_codec,
          .reserved = 0,
          .operation = operation,
          .count = 0,
          .first_index = 0,
          .extent = 0,
          .index_bytes = 0,
          .value_bytes = 0,
          .checksum = 0};
}

// Cuts the payload off `out` behind the header; the caller fills both parts, then calls seal().
struct Payload {
  std::span<std::byte> indices;
  std::span<std::byte> values;
};

Payload open_frame(FrameHeader& header, std::size_t index_bytes, std::size_t value_bytes,
                   std::span<std::byte> out) {
  require(std::max(index_bytes, value_bytes) <= max_payload, "frame: ", index_bytes,
          " bytes of indices and ", value_bytes, " of values, each must be at most ", max_payload,
          "; split the range");
  std::size_t const needed = header_bytes + index_bytes + value_bytes;
  require(needed <= out.size(), "frame: needs ", needed, " bytes, out has ", out.size());
  header.index_bytes = static_cast<std::uint32_t>(index_bytes);
  header.value_bytes = static_cast<std::uint32_t>(value_bytes);
  auto const payload = out.subspan(header_bytes);
  return {payload.first(index_bytes), payload.subspan(index_bytes, value_bytes)};
}

std::size_t seal(FrameHeader header, Payload const& payload, std::span<std::byte> out) {
  header.checksum = checksum_of(header, payload.indices, payload.values);
  std::memcpy(out.data(), &header, header_bytes);
  return header_bytes + payload.indices.size() + payload.values.size();
}

template <class T>
void put_values(ValueCodecEntry const& codec, std::span<const T> values, std::span<std::byte> out) {
  if constexpr (std::is_floating_point_v<T>) {
    functions<T>(codec).encode(values, out);
  } else if (!values.empty()) {
    std::memcpy(out.data(), values.data(), values.size_bytes());
  }
}

template <class T>
void get_values(ValueCodecEntry const& codec, std::span<const std::byte> in, std::span<T> values) {
  if constexpr (std::is_floating_point_v<T>) {
    functions<T>(codec).decode(in, values);
  } else if (!values.empty()) {
    std::memcpy(values.data(), in.data(), values.size_bytes());
  }
}

// Cuts the `extent` values of a dense payload into pieces that fit a cache and calls
// piece(first position, number of values, bytes) for each.
template <class Byte, class F>
void for_each_piece(ValueCodecEntry const& codec, std::size_t value_size, std::size_t extent,
                    std::span<Byte> payload, F&& piece) {
  std::size_t const piece_bytes = codec.encoded_bytes(value_bucket, value_size);
  for (std::size_t first = 0; first < extent; first += value_bucket) {
    piece(first, std::min(value_bucket, extent - first),
          payload.first(std::min(piece_bytes, payload.size())));
    payload = payload.subspan(std::min(piece_bytes, payload.size()));
  }
}

// Writes zeros and the given values as a dense payload.
template <class V>
void put_scattered(ValueCodecEntry const& codec, std::uint32_t first_index, std::size_t extent,
                   std::span<const std::uint32_t> indices, std::span<const V> values,
                   std::span<std::byte> out) {
  std::array<V, value_bucket> buffer;
  std::size_t i = 0;
  for_each_piece(codec, sizeof(V), extent, out,
                 [&](std::size_t first, std::size_t size, std::span<std::byte> to) {
                   auto const part = std::span(buffer).first(size);
                   std::ranges::fill(part, V{0});
                   for (; i < indices.size() && indices[i] - first_index - first < size; ++i) {
                     part[indices[i] - first_index - first] = values[i];
                   }
                   put_values<V>(codec, part, to);
                 });
}

template <class... Parts>
void field(bool holds, std::string_view name, std::uint64_t value, Parts const&... bound) {
  require<MalformedFrame>(holds, "frame: ", name, " is ", value, ", must be ", bound...);
}

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
    std::size_t const least = codec.min_bytes(h.count);
    std::size_t const most = codec.max_bytes(h.count);
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

void check_dtype(FrameView const& frame, DType expected) {
  require<MalformedFrame>(frame.header.dtype == expected, "frame: dtype is ",
                          name(frame.header.dtype), ", must be ", name(expected));
}

// Calls f(position, value) for each value of a dense frame.
template <class V, class F>
void for_each_value(FrameView const& frame, F&& f) {
  ValueCodecEntry const& codec = *find_value_codec(frame.header.value_codec);
  std::array<V, value_bucket> buffer;
  for_each_piece(codec, sizeof(V), frame.header.count, frame.values,
                 [&](std::size_t first, std::size_t size, std::span<const std::byte> from) {
                   get_values<V>(codec, from, std::span(buffer).first(size));
                   for (std::size_t i = 0; i < size; ++i) f(first + i, buffer[i]);
                 });
}

template <class V>
std::size_t count_nonzeros(FrameView const& frame) {
  std::size_t nnz = 0;
  for_each_value<V>(frame, [&](std::size_t, V value) { nnz += value != V{0}; });
  return nnz;
}

// Not v != 0 ? append : skip: which values are zero is not predictable.
template <class V>
void append_nonzeros(FrameView const& frame, std::uint32_t* indices, V* values) {
  std::size_t nnz = 0;
  for_each_value<V>(frame, [&](std::size_t position, V value) {
    indices[nnz] = frame.header.first_index + static_cast<std::uint32_t>(position);
    values[nnz] = value;
    nnz += value != V{0};
  });
}

// Grows both vectors and restores their length unless release() is called.
template <class V>
class Growth {
 public:
  Growth(std::vector<std::uint32_t>& indices, std::vector<V>& values, std::size_t more)
      : indices_(indices),
        values_(values),
        indices_size_(indices.size()),
        values_size_(values.size()) {
    try {
      indices_.resize(indices_size_ + more);
      values_.resize(values_size_ + more);
    } catch (...) {
      keep(0);
      throw;
    }
  }
  Growth(Growth const&) = delete;
  Growth& operator=(Growth const&) = delete;
  ~Growth() {
    if (!released_) keep(0);
  }
  std::uint32_t* indices() { return indices_.data() + indices_size_; }
  V* values() { return values_.data() + values_size_; }
  void release(std::size_t more) {
    keep(more);
    released_ = true;
  }

 private:
  void keep(std::size_t more) {
    indices_.resize(indices_size_ + more);
    if (values_.size() > values_size_ + more) values_.resize(values_size_ + more);
  }
  std::vector<std::uint32_t>& indices_;
  std::vector<V>& values_;
  std::size_t const indices_size_;
  std::size_t const values_size_;
  bool released_ = false;
};

template <class T>
std::size_t max_value_bytes(std::size_t count) {
  std::size_t bytes = 0;
  for (ValueCodecEntry const& entry : value_codecs()) {
    if (carries(entry, dtype_of<T>())) {
      bytes = std::max(bytes, entry.encoded_bytes(count, sizeof(T)));
    }
  }
  return bytes;
}

}  // namespace

template <class V>
std::size_t max_sparse_frame_bytes(std::size_t nnz, std::size_t extent) {
  std::size_t const count = std::min(nnz, extent);
  std::size_t index_bytes = 0;
  for (IndexCodecEntry const& entry : index_codecs()) {
    index_bytes = std::max(index_bytes, entry.max_bytes(count));
  }
  return header_bytes + index_bytes + max_value_bytes<V>(count);
}

template <class T>
std::size_t max_dense_frame_bytes(std::size_t extent) {
  return header_bytes + max_value_bytes<T>(extent);
}

template <class V>
std::size_t encode_sparse(std::uint32_t operation, std::uint32_t first_index, std::uint32_t extent,
                          std::span<const std::uint32_t> indices, std::span<const V> values,
                          FrameOptions const& options, std::span<std::byte> out) {
  check_range(first_index, extent);
  require(indices.size() == values.size(), "encode_sparse: ", indices.size(), " indices but ",
          values.size(), " values");
  ValueCodecEntry const& value_codec = value_codec_for(options.value_codec, dtype_of<V>());
  FrameHeader header = new_header(operation, FrameKind::sparse, dtype_of<V>(), options.value_codec);
  header.first_index = first_index;
  header.extent = extent;
  if (indices.empty()) {
    Payload const payload = open_frame(header, 0, 0, out);
    return seal(header, payload, out);
  }

  std::uint64_t const end = std::uint64_t{first_index} + extent;
  require(strictly_increasing(indices), "encode_sparse: the ", indices.size(),
          " indices are not strictly increasing");
  require(indices.front() >= first_index && indices.back() < end, "encode_sparse: indices from ",
          indices.front(), " to ", indices.back(), " lie outside [", first_index, ", ", end, ")");

  IndexCodecEntry const* codec = nullptr;
  std::size_t index_bytes = 0;
  for (IndexCodecEntry const& entry : index_codecs()) {
    if (!allows(options.index_codec, entry.id)) continue;
    std::size_t const bytes = entry.encoded_bytes(indices, first_index);
    if (codec == nullptr || bytes < index_bytes) {
      codec = &entry;
      index_bytes = bytes;
    }
  }
  require(codec != nullptr, "encode_sparse: index codec choice ", int(options.index_codec),
          " is not a codec");

  std::size_t const value_bytes = value_codec.encoded_bytes(values.size(), sizeof(V));
  std::size_t const dense_bytes = value_codec.encoded_bytes(extent, sizeof(V));
  if (options.allow_dense && !value_codec.bucketed && dense_bytes < index_bytes + value_bytes) {
    header.kind = FrameKind::dense;
    header.count = extent;
    Payload const payload = open_frame(header, 0, dense_bytes, out);
    put_scattered(value_codec, first_index, extent, indices, values, payload.values);
    return seal(header, payload, out);
  }

  header.index_codec = codec->id;
  header.count = static_cast<std::uint32_t>(indices.size());
  Payload const payload = open_frame(header, index_bytes, value_bytes, out);
  codec->encode(indices, first_index, payload.indices);
  put_values(value_codec, values, payload.values);
  return seal(header, payload, out);
}

template <class T>
std::size_t encode_dense(std::uint32_t operation, std::uint32_t first_index,
                         std::span<const T> values, std::span<std::byte> out,
                         ValueCodec value_codec) {
  check_range(first_index, values.size());
  ValueCodecEntry const& codec = value_codec_for(value_codec, dtype_of<T>());
  FrameHeader header = new_header(operation, FrameKind::dense, dtype_of<T>(), value_codec);
  header.first_index = first_index;
  header.extent = header.count = static_cast<std::uint32_t>(values.size());
  Payload const payload = open_frame(header, 0, codec.encoded_bytes(values.size(), sizeof(T)), out);
  put_values(codec, values, payload.values);
  return seal(header, payload, out);
}

std::size_t encode_bytes(std::uint32_t operation, std::span<const std::byte> payload_bytes,
                         std::span<std::byte> out) {
  FrameHeader header = new_header(operation, FrameKind::bytes, DType::f32, ValueCodec::none);
  Payload const payload = open_frame(header, 0, payload_bytes.size(), out);
  header.count = header.value_bytes;
  if (!payload_bytes.empty()) {
    std::memcpy(payload.values.data(), payload_bytes.data(), payload_bytes.size());
  }
  return seal(header, payload, out);
}

FrameView parse_frame(std::span<const std::byte> in, std::uint32_t operation) {
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
  field(h.operation == operation, "operation", h.operation, operation);
  check_extent(h);
  check_lengths(h, in.size() - header_bytes);
  frame.indices = in.subspan(header_bytes, h.index_bytes);
  frame.values = in.subspan(header_bytes + h.index_bytes, h.value_bytes);
  std::uint64_t const checksum = checksum_of(h, frame.indices, frame.values);
  field(h.checksum == checksum, "checksum", h.checksum, checksum, " as computed over its ",
        frame.size(), " bytes");
  return frame;
}

template <class V>
void decode_sparse(FrameView const& frame, std::uint32_t first_index, std::uint32_t extent,
                   std::vector<std::uint32_t>& indices, std::vector<V>& values) {
  FrameHeader const& h = frame.header;
  field(h.kind == FrameKind::sparse || h.kind == FrameKind::dense, "kind", std::uint8_t(h.kind),
        "1 (sparse) or 2 (dense)");
  check_dtype(frame, dtype_of<V>());
  std::uint64_t const end = std::uint64_t{first_index} + extent;
  field(h.first_index >= first_index, "first_index", h.first_index, "at least ", first_index);
  field(std::uint64_t{h.first_index} + h.extent <= end, "first_index + extent",
        std::uint64_t{h.first_index} + h.extent, "at most ", end);
  if (h.count == 0) return;

  if (h.kind == FrameKind::dense) {
    std::size_t const nnz = count_nonzeros<V>(frame);
    Growth<V> growth(indices, values, nnz + 1);  // the last zero is written, but not kept
    append_nonzeros(frame, growth.indices(), growth.values());
    growth.release(nnz);
    return;
  }
  Growth<V> growth(indices, values, h.count);
  find_index_codec(h.index_codec)
      ->decode(frame.indices, h.first_index, h.extent, {growth.indices(), h.count});
  get_values<V>(*find_value_codec(h.value_codec), frame.values, {growth.values(), h.count});
  growth.release(h.count);
}

template <class T>
void decode_dense(FrameView const& frame, std::uint32_t first_index, std::span<T> out) {
  FrameHeader const& h = frame.header;
  field(h.kind == FrameKind::dense, "kind", std::uint8_t(h.kind), "2 (dense)");
  check_dtype(frame, dtype_of<T>());
  field(h.first_index == first_index, "first_index", h.first_index, first_index);
  field(h.count == out.size(), "count", h.count, out.size());
  get_values(*find_value_codec(h.value_codec), frame.values, out);
}

#define SPARSECOMM_SPARSE(V)                                                                \
  template std::size_t max_sparse_frame_bytes<V>(std::size_t, std::size_t);                 \
  template std::size_t encode_sparse<V>(std::uint32_t, std::uint32_t, std::uint32_t,        \
                                        std::span<const std::uint32_t>, std::span<const V>, \
                                        FrameOptions const&, std::span<std::byte>);         \
  template void decode_sparse<V>(FrameView const&, std::uint32_t, std::uint32_t,            \
                                 std::vector<std::uint32_t>&, std::vector<V>&);
SPARSECOMM_SPARSE(float)
SPARSECOMM_SPARSE(double)
SPARSECOMM_SPARSE(std::int32_t)
SPARSECOMM_SPARSE(std::int64_t)
#undef SPARSECOMM_SPARSE
#define SPARSECOMM_DENSE(T)                                                              \
  template std::size_t encode_dense<T>(std::uint32_t, std::uint32_t, std::span<const T>, \
                                       std::span<std::byte>, ValueCodec);                \
  template std::size_t max_dense_frame_bytes<T>(std::size_t);                            \
  template void decode_dense<T>(FrameView const&, std::uint32_t, std::span<T>);
SPARSECOMM_DENSE(float)
SPARSECOMM_DENSE(double)
SPARSECOMM_DENSE(Half)
SPARSECOMM_DENSE(BFloat16)
SPARSECOMM_DENSE(std::int32_t)
SPARSECOMM_DENSE(std::int64_t)
#undef SPARSECOMM_DENSE

}  // namespace sparsecomm
