// One input of the frame fuzzer, shared by libFuzzer and by the replay of its corpus. The first
// byte selects what the rest is parsed as; its top bit has the checksum repaired, which no fuzzer
// would guess.
//
// Anything but a MalformedFrame is a bug, and what decodes must survive encode and decode
// unchanged.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "wire/codecs.h"
#include "wire/frame.h"
#include "wire/header.h"
#include "wire/index_kernels.h"

namespace sparsecomm::fuzz {

enum class Target : std::uint8_t {
  sparse_f32,
  sparse_f64,
  dense_f32,
  dense_f64,
  dense_f16,
  dense_bf16,
  bytes,
  codec,
  sparse_i32,
  sparse_i64,
  values_f32,
  values_f64,
  count,
};

inline constexpr std::uint8_t repair_checksum = 0x80;

inline void check(bool holds, char const* what) {
  if (holds) return;
  std::fprintf(stderr, "frame_fuzz: %s\n", what);
  std::abort();
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

inline void repair(std::span<std::byte> frame) {
  if (frame.size() < header_bytes) return;
  FrameHeader header;
  std::memcpy(&header, frame.data(), header_bytes);
  std::uint64_t const payload = std::uint64_t{header.index_bytes} + header.value_bytes;
  if (payload > frame.size() - header_bytes) return;
  header.checksum =
      frame_checksum(header, frame.subspan(header_bytes, header.index_bytes),
                     frame.subspan(header_bytes + header.index_bytes, header.value_bytes));
  std::memcpy(frame.data(), &header, header_bytes);
}

inline void check_positions(std::span<const std::uint32_t> indices, std::uint32_t first_index,
                            std::uint32_t extent) {
  for (std::size_t i = 0; i < indices.size(); ++i) {
    check(indices[i] >= first_index && indices[i] - first_index < extent, "index out of range");
    check(i == 0 || indices[i - 1] < indices[i], "indices not increasing");
  }
}

template <class V>
void sparse(FrameView const& frame) {
  FrameHeader const& h = frame.header;
  std::vector<std::uint32_t> indices{42};
  std::vector<V> values{42};
  try {
    decode_sparse(frame, h.first_index, h.extent, indices, values);
  } catch (MalformedFrame const&) {
    check(indices.size() == 1 && values.size() == 1, "a throw left entries behind");
    throw;
  }
  check(indices.size() == values.size() && indices[0] == 42, "appending is wrong");
  indices.erase(indices.begin());
  values.erase(values.begin());
  check_positions(indices, h.first_index, h.extent);

  std::vector<IndexCodecChoice> choices{IndexCodecChoice::smallest};
  for (auto const& entry : index_codecs()) choices.push_back(index_codec_named(entry.name));
  for (auto choice : choices) {
    for (bool allow_dense : {false, true}) {
      std::vector<std::byte> out(max_sparse_frame_bytes<V>(indices.size(), h.extent));
      out.resize(encode_sparse<V>(h.operation, h.first_index, h.extent, indices, values,
                                  {choice, allow_dense}, out));
      FrameView const again = parse_frame(out, h.operation);
      std::vector<std::uint32_t> indices_again;
      std::vector<V> values_again;
      decode_sparse(again, h.first_index, h.extent, indices_again, values_again);
      auto expected_indices = indices;
      auto expected_values = values;
      if (again.header.kind == FrameKind::dense) {
        std::size_t kept = 0;
        for (std::size_t i = 0; i < indices.size(); ++i) {
          expected_indices[kept] = indices[i];
          expected_values[kept] = values[i];
          kept += values[i] != V{0};
        }
        expected_indices.resize(kept);
        expected_values.resize(kept);
      }
      check(indices_again == expected_indices, "indices changed");
      check(same_bits<V>(values_again, expected_values), "values changed");
    }
  }
}

template <class T>
void dense(FrameView const& frame, std::span<const std::byte> in) {
  FrameHeader const& h = frame.header;
  std::vector<T> values(h.kind == FrameKind::dense ? h.count : 0);
  decode_dense<T>(frame, h.first_index, values);
  std::vector<std::byte> out(frame.size());
  if constexpr (std::is_floating_point_v<T>) {
    if (find_value_codec(h.value_codec)->lossy) {
      // Not every payload is one that an encoder writes: a scale that no level reaches is none.
      round_values<T>(h.value_codec, values, {});
      std::vector<T> again(values.size());
      out.resize(encode_dense<T>(h.operation, h.first_index, values, out, h.value_codec));
      decode_dense<T>(parse_frame(out, h.operation), h.first_index, again);
      check(same_bits<T>(again, values), "dense values changed");
      return;
    }
  }
  out.resize(encode_dense<T>(h.operation, h.first_index, values, out));
  check(same_bits<std::byte>(out, in.first(frame.size())), "dense frame changed");
}

inline void bytes(FrameView const& frame, std::span<const std::byte> in) {
  if (frame.header.kind != FrameKind::bytes) return;
  std::vector<std::byte> out(frame.size());
  out.resize(encode_bytes(frame.header.operation, frame.values, out));
  check(same_bits<std::byte>(out, in.first(frame.size())), "bytes frame changed");
}

// in: codec, count (2 bytes), first index, extent, encoded indices.
inline void codec(std::span<const std::byte> in) {
  constexpr std::size_t prefix = 11;
  if (in.size() < prefix) return;
  std::uint16_t count;
  std::uint32_t first_index;
  std::uint32_t extent;
  std::memcpy(&count, in.data() + 1, 2);
  std::memcpy(&first_index, in.data() + 3, 4);
  std::memcpy(&extent, in.data() + 7, 4);
  if (std::uint64_t{first_index} + extent > std::uint64_t{1} << 32) return;
  auto const all = index_codecs();
  IndexCodecEntry const& entry = all[std::size_t(in[0]) % all.size()];
  std::vector<std::uint32_t> indices(count);
  auto const tables = index_kernel_tables();
  auto const accepts = [&](IndexKernels const& kernels, std::vector<std::uint32_t>& to) {
    try {
      entry.decode(kernels, in.subspan(prefix), first_index, extent, to);
      return true;
    } catch (MalformedFrame const&) {
      return false;
    }
  };
  bool const accepted = accepts(tables.front(), indices);
  for (IndexKernels const& kernels : tables.subspan(1)) {
    std::vector<std::uint32_t> found(count);
    check(accepts(kernels, found) == accepted, "targets differ in what they refuse");
    check(!accepted || found == indices, "targets differ in what they decode");
  }
  if (!accepted) return;
  check_positions(indices, first_index, extent);
  for (IndexKernels const& kernels : tables) {
    std::vector<std::byte> out(entry.max_bytes(count, extent));
    auto const encode = [&](std::span<std::byte> to) {
      return entry.encode(kernels, indices, first_index, extent, to);
    };
    std::size_t const length = encode(out);
    check(length != does_not_fit, "encoded size above its bound");
    check(count == 0 || length >= entry.min_bytes(count, extent), "encoded size below its bound");
    out.resize(length);
    out.shrink_to_fit();
    check(encode(out) == length, "an exact fit does not fit");
    check(length == 0 || encode(std::span(out).first(length - 1)) == does_not_fit,
          "too little room fits");
    encode(out);
    std::vector<std::uint32_t> again(count);
    entry.decode(kernels, out, first_index, extent, again);
    check(again == indices, "indices changed in codec");
  }
}

// in: value codec, values. Any values are refused or rounded to what arrives unchanged.
template <class V>
void values(std::span<const std::byte> in) {
  if (in.empty()) return;
  auto const all = value_codecs();
  ValueCodecEntry const& entry = all[std::size_t(in[0]) % all.size()];
  std::vector<V> values((in.size() - 1) / sizeof(V));
  if (values.empty()) return;
  std::memcpy(values.data(), in.data() + 1, values.size() * sizeof(V));
  auto const before = values;
  try {
    round_values<V>(entry.id, values, {1, 2, 3});
  } catch (InvalidArgument const&) {
    check(same_bits<V>(values, before), "a throw left values rounded");
    return;
  }
  auto again = values;
  round_values<V>(entry.id, again, {4, 5, 6});
  check(same_bits<V>(again, values), "rounding twice changes values");
  std::vector<std::byte> out(entry.encoded_bytes(values.size(), sizeof(V)));
  functions<V>(entry).encode(values, out);
  functions<V>(entry).decode(out, again);
  check(same_bits<V>(again, values), "rounded values changed");
}

inline void run(std::span<const std::byte> data) {
  if (data.empty()) return;
  auto const selector = std::uint8_t(data[0]);
  // Exactly as long as the input, so that a sanitizer sees a read beyond it.
  std::vector<std::byte> in(data.begin() + 1, data.end());
  auto const target = Target((selector & ~repair_checksum) % std::uint8_t(Target::count));
  try {
    if (target == Target::codec) return codec(in);
    if (target == Target::values_f32) return values<float>(in);
    if (target == Target::values_f64) return values<double>(in);
    if ((selector & repair_checksum) != 0) repair(in);
    std::uint32_t operation = 0;
    if (in.size() >= header_bytes) {
      std::memcpy(&operation, in.data() + offsetof(FrameHeader, operation), sizeof(operation));
    }
    FrameView const frame = parse_frame(in, operation);
    switch (target) {
      case Target::sparse_f32:
        return sparse<float>(frame);
      case Target::sparse_f64:
        return sparse<double>(frame);
      case Target::sparse_i32:
        return sparse<std::int32_t>(frame);
      case Target::sparse_i64:
        return sparse<std::int64_t>(frame);
      case Target::dense_f32:
        return dense<float>(frame, in);
      case Target::dense_f64:
        return dense<double>(frame, in);
      case Target::dense_f16:
        return dense<Half>(frame, in);
      case Target::dense_bf16:
        return dense<BFloat16>(frame, in);
      default:
        return bytes(frame, in);
    }
  } catch (MalformedFrame const&) {
  }
}

}  // namespace sparsecomm::fuzz
