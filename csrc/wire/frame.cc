#include "wire/frame.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "wire/header.h"
#include "wire/index_kernels.h"
#include "wire/sorted.h"

namespace sparsecomm {
namespace {

static_assert(std::endian::native == std::endian::little,
              "headers and payloads are copied as they lie in memory: little-endian");
constexpr std::size_t max_payload = std::numeric_limits<std::uint32_t>::max();

void check_range(std::uint32_t first_index, std::uint64_t extent) {
  require(first_index + extent <= index_space && extent < index_space, "frame: first_index ",
          first_index, " + extent ", extent, " exceeds 2^32 or extent 2^32 - 1; split the range");
}

FrameHeader new_header(FrameStamp stamp, FrameKind kind, DType dtype, ValueCodec value_codec) {
  return {.magic = frame_magic,
          .version = frame_version,
          .kind = kind,
          .dtype = dtype,
          .index_codec = IndexCodec::none,
          .value_codec = value_codec,
          .reserved = 0,
          .operation = stamp.operation,
          .count = 0,
          .first_index = 0,
          .extent = 0,
          .index_bytes = 0,
          .value_bytes = 0,
          .checksum = seed_of(stamp.run)};
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
  header.checksum ^= frame_checksum(header, payload.indices, payload.values);
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

bool allows(IndexCodecChoice choice, IndexCodec id) {
  return choice == IndexCodecChoice::smallest || std::uint8_t(choice) == std::uint8_t(id);
}

struct EncodedIndices {
  IndexCodecEntry const* codec;
  std::size_t bytes;
};

// Encodes the indices to the front of `out` in at most `limit` bytes, and in the fewest that the
// choice allows; returns nullptr where that is more. Codecs whose size is known beforehand are the
// ones to beat: the others are tried, not planned.
EncodedIndices encode_indices(IndexCodecChoice choice, std::span<const std::uint32_t> indices,
                              std::uint32_t first_index, std::uint32_t extent, std::size_t limit,
                              std::span<std::byte> out) {
  std::size_t const count = indices.size();
  auto const fixed = [&](IndexCodecEntry const& entry) {
    return entry.min_bytes(count, extent) == entry.max_bytes(count, extent);
  };
  EncodedIndices best{nullptr, limit + 1};
  IndexCodecEntry const* written = nullptr;
  auto const attempt = [&](IndexCodecEntry const& entry) {
    std::size_t const bytes = entry.encode(index_kernels(), indices, first_index, extent,
                                           out.first(std::min(best.bytes - 1, out.size())));
    written = &entry;
    if (bytes != does_not_fit) best = {&entry, bytes};
  };
  for (IndexCodecEntry const& entry : index_codecs()) {
    if (!allows(choice, entry.id) || !fixed(entry)) continue;
    std::size_t const bytes = entry.min_bytes(count, extent);
    if (bytes < best.bytes) best = {&entry, bytes};
  }
  for (IndexCodecEntry const& entry : index_codecs()) {
    if (allows(choice, entry.id) && !fixed(entry)) attempt(entry);
  }
  if (best.codec != nullptr && best.codec != written && best.bytes <= out.size()) {
    best.codec->encode(index_kernels(), indices, first_index, extent, out.first(best.bytes));
  }
  return best;
}

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
  return header_bytes + max_index_bytes(count) + max_value_bytes<V>(count);
}

template <class T>
std::size_t max_dense_frame_bytes(std::size_t extent) {
  return header_bytes + max_value_bytes<T>(extent);
}

ExpectedFrame expected_frame(double nnz, double extent, double value_bytes,
                             FrameOptions const& options) {
  IndexCodecEntry const& raw = *find_index_codec(IndexCodec::raw32);
  double const density = nnz > 0 && extent > 0 ? std::min(nnz / extent, 1.0) : 0;
  ExpectedFrame best{&raw, raw.expected_bits(density) / 8 + value_bytes};
  if (density == 0) return best;
  // Raw is also what a codec by name gives way to.
  for (IndexCodecEntry const& entry : index_codecs()) {
    double const pair = entry.expected_bits(density) / 8 + value_bytes;
    if (allows(options.index_codec, entry.id) && pair < best.pair_bytes) best = {&entry, pair};
  }
  ValueCodecEntry const* const value_codec = find_value_codec(options.value_codec);
  bool const allow_dense =
      options.allow_dense && (value_codec == nullptr || !value_codec->bucketed);
  if (allow_dense && value_bytes / density < best.pair_bytes) {
    best = {nullptr, value_bytes / density};
  }
  return best;
}

template <class V>
std::size_t encode_sparse(FrameStamp stamp, std::uint32_t first_index, std::uint32_t extent,
                          std::span<const std::uint32_t> indices, std::span<const V> values,
                          FrameOptions const& options, std::span<std::byte> out) {
  check_range(first_index, extent);
  require(indices.size() == values.size(), "encode_sparse: ", indices.size(), " indices but ",
          values.size(), " values");
  ValueCodecEntry const& value_codec = value_codec_for(options.value_codec, dtype_of<V>());
  FrameHeader header = new_header(stamp, FrameKind::sparse, dtype_of<V>(), options.value_codec);
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

  require(options.index_codec == IndexCodecChoice::smallest ||
              find_index_codec(IndexCodec(options.index_codec)) != nullptr,
          "encode_sparse: index codec choice ", int(options.index_codec), " is not a codec");
  std::size_t const value_bytes = value_codec.encoded_bytes(values.size(), sizeof(V));
  std::size_t const dense_bytes = value_codec.encoded_bytes(extent, sizeof(V));
  bool const allow_dense = options.allow_dense && !value_codec.bucketed;
  std::size_t const most = max_index_bytes(indices.size());
  std::size_t const limit = allow_dense ? std::min(dense_bytes - value_bytes, most) : most;
  auto const room = out.subspan(std::min(header_bytes, out.size()));
  EncodedIndices coded =
      encode_indices(options.index_codec, indices, first_index, extent, limit, room);
  if (coded.codec == nullptr && limit == most) {
    // A codec by name that takes more than `most`, or than there is room for.
    coded = encode_indices(IndexCodecChoice::raw32, indices, first_index, extent, most, room);
  }
  if (coded.codec == nullptr) {
    header.kind = FrameKind::dense;
    header.count = extent;
    Payload const payload = open_frame(header, 0, dense_bytes, out);
    put_scattered(value_codec, first_index, extent, indices, values, payload.values);
    return seal(header, payload, out);
  }
  header.index_codec = coded.codec->id;
  header.count = static_cast<std::uint32_t>(indices.size());
  Payload const payload = open_frame(header, coded.bytes, value_bytes, out);
  put_values(value_codec, values, payload.values);
  return seal(header, payload, out);
}

template <class T>
std::size_t encode_dense(FrameStamp stamp, std::uint32_t first_index, std::span<const T> values,
                         std::span<std::byte> out, ValueCodec value_codec) {
  check_range(first_index, values.size());
  ValueCodecEntry const& codec = value_codec_for(value_codec, dtype_of<T>());
  FrameHeader header = new_header(stamp, FrameKind::dense, dtype_of<T>(), value_codec);
  header.first_index = first_index;
  header.extent = header.count = static_cast<std::uint32_t>(values.size());
  Payload const payload = open_frame(header, 0, codec.encoded_bytes(values.size(), sizeof(T)), out);
  put_values(codec, values, payload.values);
  return seal(header, payload, out);
}

std::size_t encode_bytes(FrameStamp stamp, std::span<const std::byte> payload_bytes,
                         std::span<std::byte> out) {
  FrameHeader header = new_header(stamp, FrameKind::bytes, DType::f32, ValueCodec::none);
  Payload const payload = open_frame(header, 0, payload_bytes.size(), out);
  header.count = header.value_bytes;
  if (!payload_bytes.empty()) {
    std::memcpy(payload.values.data(), payload_bytes.data(), payload_bytes.size());
  }
  return seal(header, payload, out);
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
      ->decode(index_kernels(), frame.indices, h.first_index, h.extent,
               {growth.indices(), h.count});
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
  template std::size_t encode_sparse<V>(FrameStamp, std::uint32_t, std::uint32_t,           \
                                        std::span<const std::uint32_t>, std::span<const V>, \
                                        FrameOptions const&, std::span<std::byte>);         \
  template void decode_sparse<V>(FrameView const&, std::uint32_t, std::uint32_t,            \
                                 std::vector<std::uint32_t>&, std::vector<V>&);
SPARSECOMM_SPARSE(float)
SPARSECOMM_SPARSE(double)
SPARSECOMM_SPARSE(std::int32_t)
SPARSECOMM_SPARSE(std::int64_t)
#undef SPARSECOMM_SPARSE
#define SPARSECOMM_DENSE(T)                                                           \
  template std::size_t encode_dense<T>(FrameStamp, std::uint32_t, std::span<const T>, \
                                       std::span<std::byte>, ValueCodec);             \
  template std::size_t max_dense_frame_bytes<T>(std::size_t);                         \
  template void decode_dense<T>(FrameView const&, std::uint32_t, std::span<T>);
SPARSECOMM_DENSE(float)
SPARSECOMM_DENSE(double)
SPARSECOMM_DENSE(Half)
SPARSECOMM_DENSE(BFloat16)
SPARSECOMM_DENSE(std::int32_t)
SPARSECOMM_DENSE(std::int64_t)
#undef SPARSECOMM_DENSE

}  // namespace sparsecomm
