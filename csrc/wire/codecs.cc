#include "wire/codecs.h"

#include <array>
#include <cstring>
#include <ostream>
#include <type_traits>

#include "wire/bitmap.h"
#include "wire/delta.h"
#include "wire/index_kernels.h"

namespace sparsecomm {
namespace {

constexpr std::string_view smallest_name = "smallest";

constexpr std::size_t raw32_bytes(std::size_t count, std::size_t) {
  return count * sizeof(std::uint32_t);
}

std::size_t raw32_encode(IndexKernels const&, std::span<const std::uint32_t> indices, std::uint32_t,
                         std::uint32_t, std::span<std::byte> out) {
  if (indices.size_bytes() > out.size()) return does_not_fit;
  if (!indices.empty()) std::memcpy(out.data(), indices.data(), indices.size_bytes());
  return indices.size_bytes();
}

void raw32_decode(IndexKernels const& kernels, std::span<const std::byte> in,
                  std::uint32_t first_index, std::uint32_t extent,
                  std::span<std::uint32_t> indices) {
  require<MalformedFrame>(in.size() == indices.size_bytes(), "raw32 indices: index_bytes is ",
                          in.size(), ", must be ", indices.size_bytes(), " for count ",
                          indices.size());
  if (indices.empty()) return;
  std::memcpy(indices.data(), in.data(), in.size());
  require<MalformedFrame>(kernels.strictly_increasing(indices),
                          "raw32 indices: not strictly increasing among ", indices.size());
  std::uint64_t const end = std::uint64_t{first_index} + extent;
  require<MalformedFrame>(indices.front() >= first_index, "raw32 indices: first index is ",
                          indices.front(), ", must be at least first_index ", first_index);
  require<MalformedFrame>(indices.back() < end, "raw32 indices: last index is ", indices.back(),
                          ", must be below first_index + extent = ", end);
}

double raw32_expected_bits(double) { return 32; }

constexpr std::array<IndexCodecEntry, 3> table{{
    {IndexCodec::raw32, "raw32", "4 bytes per index", raw32_encode, raw32_decode, raw32_bytes,
     raw32_bytes, raw32_expected_bits},
    {IndexCodec::delta, "delta", "gaps, Golomb-Rice coded in blocks of 128", delta::encode,
     delta::decode, delta::min_bytes, delta::max_bytes, delta::expected_bits},
    {IndexCodec::bitmap, "bitmap", "1 bit per position", bitmap::encode, bitmap::decode,
     bitmap::bytes, bitmap::bytes, bitmap::expected_bits},
}};

// Streams the names of a table, for messages.
template <class Entry>
struct Names {
  std::span<const Entry> entries;
  friend std::ostream& operator<<(std::ostream& out, Names const& names) {
    for (Entry const& entry : names.entries) {
      out << (&entry == names.entries.data() ? "" : ", ") << entry.name;
    }
    return out;
  }
};

}  // namespace

std::span<const IndexCodecEntry> index_codecs() { return table; }

// The choice of a codec has the codec's number.
static_assert(std::uint8_t(IndexCodecChoice::smallest) == std::uint8_t(IndexCodec::none) &&
              std::uint8_t(IndexCodecChoice::raw32) == std::uint8_t(IndexCodec::raw32) &&
              std::uint8_t(IndexCodecChoice::delta) == std::uint8_t(IndexCodec::delta) &&
              std::uint8_t(IndexCodecChoice::bitmap) == std::uint8_t(IndexCodec::bitmap));

IndexCodecEntry const* find_index_codec(IndexCodec id) {
  for (IndexCodecEntry const& entry : table) {
    if (entry.id == id) return &entry;
  }
  return nullptr;
}

ValueCodecEntry const* find_value_codec(ValueCodec id) {
  for (ValueCodecEntry const& entry : value_codecs()) {
    if (entry.id == id) return &entry;
  }
  return nullptr;
}

IndexCodecChoice index_codec_named(std::string_view name) {
  if (name == smallest_name) return IndexCodecChoice::smallest;
  for (IndexCodecEntry const& entry : table) {
    if (entry.name == name) return static_cast<IndexCodecChoice>(entry.id);
  }
  throw InvalidArgument(concat("index codec '", name, "' is unknown; choose one of ", smallest_name,
                               ", ", Names<IndexCodecEntry>{index_codecs()}));
}

ValueCodec value_codec_named(std::string_view name) {
  for (ValueCodecEntry const& entry : value_codecs()) {
    if (entry.name == name) return entry.id;
  }
  throw InvalidArgument(concat("value codec '", name, "' is unknown; choose one of ",
                               Names<ValueCodecEntry>{value_codecs()}));
}

ValueCodecEntry const& value_codec_for(ValueCodec id, DType dtype) {
  ValueCodecEntry const* const entry = find_value_codec(id);
  require(entry != nullptr, "value codec ", int(id), " is unknown; there are ",
          Names<ValueCodecEntry>{value_codecs()});
  require(carries(*entry, dtype), "value codec ", entry->name, " does not carry ", name(dtype),
          ", only f32 and f64; use raw");
  return *entry;
}

template <class V>
void round_values(ValueCodec codec, std::span<V> values, RoundingKey const& key) {
  ValueCodecEntry const& entry = value_codec_for(codec, dtype_of<V>());
  if constexpr (std::is_floating_point_v<V>) functions<V>(entry).round(values, key);
}

template void round_values<float>(ValueCodec, std::span<float>, RoundingKey const&);
template void round_values<double>(ValueCodec, std::span<double>, RoundingKey const&);
template void round_values<std::int32_t>(ValueCodec, std::span<std::int32_t>, RoundingKey const&);
template void round_values<std::int64_t>(ValueCodec, std::span<std::int64_t>, RoundingKey const&);

}  // namespace sparsecomm
