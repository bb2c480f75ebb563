// The frame: every message of a collective is one or several of these, back to back.
//
// A header of 40 bytes, little-endian, then the encoded indices, then the encoded values. A sparse
// frame carries sorted distinct positions of [first_index, first_index + extent) with their values;
// a dense frame carries all `extent` values; a bytes frame carries `count` opaque bytes. The
// checksum covers header and payload and is seeded with the run, so a frame that was truncated,
// damaged, left over from an earlier operation or sent by another run is told apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "wire/codecs.h"

namespace sparsecomm {

enum class FrameKind : std::uint8_t { sparse = 1, dense = 2, bytes = 3 };

struct FrameHeader {
  std::uint16_t magic;
  std::uint8_t version;
  FrameKind kind;
  DType dtype;              // of the values; f32 in a bytes frame
  IndexCodec index_codec;   // none unless kind is sparse and count > 0
  ValueCodec value_codec;   // none in a bytes frame
  std::uint8_t reserved;    // zero
  std::uint32_t operation;  // the operation this frame belongs to
  std::uint32_t count;      // non-zeros, elements or bytes carried
  std::uint32_t first_index;
  std::uint32_t extent;
  std::uint32_t index_bytes;
  std::uint32_t value_bytes;
  std::uint64_t checksum;
};
static_assert(sizeof(FrameHeader) == 40);

inline constexpr std::size_t header_bytes = sizeof(FrameHeader);

// What a frame belongs to. `run` identifies the communicator among all that any program has made; 0
// where ranks are threads.
struct FrameStamp {
  std::uint32_t operation = 0;
  std::uint32_t run = 0;

  FrameStamp(std::uint32_t operation_, std::uint32_t run_ = 0)  // NOLINT: an operation will do
      : operation(operation_), run(run_) {}
};

// How a sparse selection may be encoded. `smallest` computes each codec's exact size and takes the
// least.
struct FrameOptions {
  IndexCodecChoice index_codec = IndexCodecChoice::smallest;
  // Send all `extent` values where that is smaller and the value codec has no buckets. Entries
  // whose value is 0 or -0.0 then vanish on decoding, so this is for sums only.
  bool allow_dense = true;
  // The caller's choice, as it may be lossy: the values must be what round_values() made of them.
  ValueCodec value_codec = ValueCodec::raw;
};

// An upper bound, in bytes, for any frame encode_sparse() or encode_dense() can produce under any
// options.
template <class V>
std::size_t max_sparse_frame_bytes(std::size_t nnz, std::size_t extent);
template <class T>
std::size_t max_dense_frame_bytes(std::size_t extent);

// Each encoder writes one frame to the front of `out` and returns its length in bytes. V is float,
// double, std::int32_t or std::int64_t for sparse frames; T is any element type for dense ones.
// Throws InvalidArgument when `out` is too short, when indices and values differ in length, when
// indices are not strictly increasing or lie outside [first_index, first_index + extent), when a
// payload exceeds 2^32 - 1 bytes, when the value codec does not carry the type (all but raw carry
// f32 and f64 only), or when it does not carry a value exactly: see round_values().
template <class V>
std::size_t encode_sparse(FrameStamp stamp, std::uint32_t first_index, std::uint32_t extent,
                          std::span<const std::uint32_t> indices, std::span<const V> values,
                          FrameOptions const& options, std::span<std::byte> out);
template <class T>
std::size_t encode_dense(FrameStamp stamp, std::uint32_t first_index, std::span<const T> values,
                         std::span<std::byte> out, ValueCodec value_codec = ValueCodec::raw);
std::size_t encode_bytes(FrameStamp stamp, std::span<const std::byte> payload,
                         std::span<std::byte> out);

// What encode_sparse() is expected to pick for many random positions.
struct ExpectedFrame {
  IndexCodecEntry const* index_codec = nullptr;  // null: sent dense
  double pair_bytes = 0;                         // of an entry, header excluded
};

// `value_bytes`: of one value on the wire. O(lines of the table).
ExpectedFrame expected_frame(double nnz, double extent, double value_bytes,
                             FrameOptions const& options);

// A validated frame inside a receive buffer.
struct FrameView {
  FrameHeader header;
  std::span<const std::byte> indices;
  std::span<const std::byte> values;
  std::size_t size() const { return header_bytes + indices.size() + values.size(); }
};

// Validates the frame at the front of `in` (which may be longer than the frame: it is a receive
// buffer) and checks that it belongs to `stamp`. Throws MalformedFrame, naming the field, its value
// and its bound, or the run it belongs to.
FrameView parse_frame(std::span<const std::byte> in, FrameStamp stamp);

// Appends the positions and values of a sparse or dense frame; zeros of a dense frame are skipped.
// Throws MalformedFrame when the payload decodes to unsorted, repeated or out-of-range positions,
// when the frame's dtype is not V's, or when its range is not within [first_index, first_index +
// extent). On a throw the vectors keep their former length.
template <class V>
void decode_sparse(FrameView const& frame, std::uint32_t first_index, std::uint32_t extent,
                   std::vector<std::uint32_t>& indices, std::vector<V>& values);

// Copies the values of a dense frame of exactly out.size() elements that starts at first_index.
template <class T>
void decode_dense(FrameView const& frame, std::uint32_t first_index, std::span<T> out);

}  // namespace sparsecomm
