#include "wire/frame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace sparsecomm {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::uint32_t whole = std::numeric_limits<std::uint32_t>::max();

template <class V>
Bytes sparse_frame(std::uint32_t first_index, std::uint32_t extent,
                   std::vector<std::uint32_t> const& indices, std::vector<V> const& values,
                   FrameOptions const& options = {}, std::uint32_t operation = 9) {
  Bytes out(max_sparse_frame_bytes<V>(indices.size(), extent));
  out.resize(encode_sparse<V>(operation, first_index, extent, indices, values, options, out));
  return out;
}

template <class T>
Bytes dense_frame(std::uint32_t first_index, std::vector<T> const& values,
                  ValueCodec value_codec = ValueCodec::raw) {
  Bytes out(max_dense_frame_bytes<T>(values.size()));
  out.resize(encode_dense<T>(9, first_index, values, out, value_codec));
  return out;
}

Bytes bytes_frame(std::string const& text) {
  Bytes out(header_bytes + text.size());
  out.resize(encode_bytes(9, std::as_bytes(std::span(text)), out));
  return out;
}

// An allocation of exactly this length, so that a sanitizer sees a read beyond it.
FrameView parse(Bytes const& frame, std::uint32_t operation = 9) {
  return parse_frame(frame, operation);
}

template <class V>
struct Decoded {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
};

template <class V>
Decoded<V> decode(Bytes const& frame, std::uint32_t first_index, std::uint32_t extent) {
  Decoded<V> decoded;
  decode_sparse(parse(frame), first_index, extent, decoded.indices, decoded.values);
  return decoded;
}

std::string refusal(std::function<void()> const& call) {
  try {
    call();
  } catch (MalformedFrame const& error) {
    return error.what();
  }
  return "accepted";
}

// `smallest`, after every codec by its name.
std::vector<IndexCodecChoice> index_codec_choices() {
  std::vector<IndexCodecChoice> choices;
  for (auto const& entry : index_codecs()) choices.push_back(index_codec_named(entry.name));
  choices.push_back(index_codec_named("smallest"));
  return choices;
}

template <class T, class V>
std::vector<T> without_zeros(std::vector<T> const& entries, std::vector<V> const& values) {
  std::vector<T> kept;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] != 0) kept.push_back(entries[i]);
  }
  return kept;
}

template <class V>
class SparseFrames : public testing::Test {};
using ValueTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(SparseFrames, ValueTypes);

TYPED_TEST(SparseFrames, RoundTripUnderEveryOption) {
  using V = TypeParam;
  std::uint64_t const seed = std::random_device{}();
  SCOPED_TRACE(concat("seed ", seed));
  std::mt19937_64 generator(seed);
  for (int round = 0; round < 200; ++round) {
    auto const extent = static_cast<std::uint32_t>(generator() % 3000);
    auto const first = static_cast<std::uint32_t>(generator() % (whole - extent));
    std::uint64_t const one_in = 1 + generator() % 50;
    std::vector<std::uint32_t> indices;
    std::vector<V> values;
    for (std::uint32_t i = 0; i < extent; ++i) {
      if (generator() % one_in != 0) continue;
      indices.push_back(first + i);
      values.push_back(V(1 + generator() % 1000));
    }
    auto const& value_codec = value_codecs()[std::size_t(round) % value_codecs().size()];
    round_values<V>(value_codec.id, values, {seed, std::uint64_t(round), 0});
    std::size_t smallest = std::numeric_limits<std::size_t>::max();
    for (auto choice : index_codec_choices()) {
      for (bool allow_dense : {false, true}) {
        auto const frame =
            sparse_frame(first, extent, indices, values, {choice, allow_dense, value_codec.id});
        auto const header = parse(frame).header;
        ASSERT_EQ(header.value_codec, value_codec.id);
        if (!allow_dense || indices.empty() || value_codec.bucketed) {
          ASSERT_EQ(header.kind, FrameKind::sparse);
        }
        if (indices.empty()) {
          ASSERT_EQ(frame.size(), header_bytes);
        }
        ASSERT_LE(frame.size(), max_sparse_frame_bytes<V>(indices.size(), extent));
        if (choice == IndexCodecChoice::smallest && allow_dense) {
          ASSERT_LE(frame.size(), smallest);
        }
        smallest = std::min(smallest, frame.size());
        auto decoded = decode<V>(frame, first, extent);
        if (header.kind == FrameKind::sparse) {
          ASSERT_EQ(decoded.indices, indices);
          ASSERT_EQ(decoded.values, values);
        } else {
          ASSERT_EQ(decoded.indices, without_zeros(indices, values));
          ASSERT_EQ(decoded.values, without_zeros(values, values));
        }
      }
    }
  }
}

TYPED_TEST(SparseFrames, TurnsDenseExactlyWhereThatIsSmaller) {
  using V = TypeParam;
  FrameOptions const raw{IndexCodecChoice::raw32, true};
  // 3 pairs of 4 + sizeof(V) bytes against `extent` values.
  std::uint32_t const pairs_bytes = 3 * (4 + sizeof(V));
  std::uint32_t const even = pairs_bytes / sizeof(V) + (pairs_bytes % sizeof(V) != 0);
  std::vector<V> const values{1, 2, 3};
  EXPECT_EQ(parse(sparse_frame<V>(0, even, {0, 1, 2}, values, raw)).header.kind, FrameKind::sparse);
  EXPECT_EQ(parse(sparse_frame<V>(0, even - 1, {0, 1, 2}, values, raw)).header.kind,
            FrameKind::dense);
}

TEST(Frame, TakesTheCodecOfTheLeastBytes) {
  std::mt19937_64 generator(3);
  std::vector<std::size_t> chosen(index_codecs().size());
  for (double density : {0.0001, 0.01, 0.3, 0.45, 0.55, 0.8, 0.99}) {
    std::vector<std::uint32_t> indices{7};  // at least one: the frame is not empty
    std::bernoulli_distribution take(density);
    for (std::uint32_t i = 8; i < 20000; ++i) {
      if (take(generator)) indices.push_back(i);
    }
    std::vector<double> const values(indices.size(), 1);
    FrameOptions options{.index_codec = IndexCodecChoice::smallest, .allow_dense = false};
    auto const smallest = parse(sparse_frame<double>(7, 19993, indices, values, options)).header;
    std::size_t least = whole;
    for (std::size_t i = 0; i < index_codecs().size(); ++i) {
      options.index_codec = index_codec_named(index_codecs()[i].name);
      auto const header = parse(sparse_frame<double>(7, 19993, indices, values, options)).header;
      least = std::min<std::size_t>(least, header.index_bytes);
      chosen[i] += smallest.index_codec == index_codecs()[i].id;
    }
    EXPECT_EQ(smallest.index_bytes, least) << density;
  }
  // raw32 never wins against delta but on a few indices far apart.
  auto const far = parse(sparse_frame<float>(0, whole, {1u << 31, whole - 1}, {1, 2})).header;
  EXPECT_EQ(far.index_codec, IndexCodec::raw32);
  chosen[0] += far.index_codec == index_codecs()[0].id;
  for (std::size_t i = 0; i < chosen.size(); ++i)
    EXPECT_GT(chosen[i], 0u) << index_codecs()[i].name;
}

TEST(Frame, ABitmapOfAWideRangeGivesWay) {
  FrameOptions const options{IndexCodecChoice::bitmap, false};
  EXPECT_EQ(parse(sparse_frame<float>(0, 64, {1, 50}, {1, 2}, options)).header.index_codec,
            IndexCodec::bitmap);
  auto const wide = sparse_frame<float>(0, 1000, {1, 50}, {1, 2}, options);
  EXPECT_EQ(parse(wide).header.index_codec, IndexCodec::raw32);
  EXPECT_EQ(decode<float>(wide, 0, 1000).indices, (std::vector<std::uint32_t>{1, 50}));
}

TYPED_TEST(SparseFrames, NonFiniteValuesKeepTheirBits) {
  using V = TypeParam;
  using Limits = std::numeric_limits<V>;
  std::vector<V> const values{Limits::quiet_NaN(),  -Limits::quiet_NaN(), Limits::signaling_NaN(),
                              Limits::infinity(),   -Limits::infinity(),  V(-0.0),
                              Limits::denorm_min(), Limits::max()};
  std::vector<std::uint32_t> const indices{0, 3, 4, 7, 11, 600, 2000, 9999};
  for (std::uint32_t extent : {10000u, whole}) {
    auto const decoded = decode<V>(sparse_frame(0, extent, indices, values), 0, extent);
    ASSERT_EQ(decoded.indices, indices);
    EXPECT_EQ(std::memcmp(decoded.values.data(), values.data(), sizeof(V) * values.size()), 0);
  }
}

TYPED_TEST(SparseFrames, ZerosVanishFromADenseFrameOnly) {
  using V = TypeParam;
  std::vector<std::uint32_t> const indices{4, 5, 6, 7};
  std::vector<V> const values{1, V(-0.0), 0, std::numeric_limits<V>::quiet_NaN()};
  auto const dense = decode<V>(sparse_frame(4, 4, indices, values), 4, 4);
  EXPECT_EQ(dense.indices, (std::vector<std::uint32_t>{4, 7}));
  auto const sparse = decode<V>(sparse_frame(4, 4, indices, values, {.allow_dense = false}), 4, 4);
  EXPECT_EQ(sparse.indices, indices);
  EXPECT_TRUE(std::signbit(sparse.values[1]));
}

TYPED_TEST(SparseFrames, DecodeAppendsAndRestoresOnThrow) {
  using V = TypeParam;
  Bytes frame = sparse_frame<V>(10, 100, {12, 40, 90}, {1, 2, 3});
  std::vector<std::uint32_t> indices{1};
  std::vector<V> values{7};
  decode_sparse(parse(frame), 0, 200, indices, values);
  EXPECT_EQ(indices, (std::vector<std::uint32_t>{1, 12, 40, 90}));
  EXPECT_EQ(values, (std::vector<V>{7, 1, 2, 3}));
  FrameView damaged = parse(frame);
  damaged.header.extent = 50;  // 90 now lies outside
  EXPECT_THROW(decode_sparse(damaged, 0, 200, indices, values), MalformedFrame);
  EXPECT_EQ(indices.size(), 4u);
  EXPECT_EQ(values.size(), 4u);
}

TEST(Frame, DecodeNamesTheMismatch) {
  auto const sparse = sparse_frame<float>(10, 100, {12}, {1.0f});
  auto const dense = dense_frame<float>(10, std::vector<float>(5, 1.0f));
  std::vector<std::uint32_t> indices;
  std::vector<float> f32;
  std::vector<double> f64;
  auto const bytes = bytes_frame("abc");
  EXPECT_EQ(refusal([&] { decode_sparse(parse(sparse), 0, 200, indices, f64); }),
            "frame: dtype is f32, must be f64");
  EXPECT_EQ(refusal([&] { decode_sparse(parse(sparse), 11, 200, indices, f32); }),
            "frame: first_index is 10, must be at least 11");
  EXPECT_EQ(refusal([&] { decode_sparse(parse(sparse), 10, 99, indices, f32); }),
            "frame: first_index + extent is 110, must be at most 109");
  EXPECT_EQ(refusal([&] { decode_sparse(parse(bytes), 0, 200, indices, f32); }),
            "frame: kind is 3, must be 1 (sparse) or 2 (dense)");
  std::vector<float> out(5);
  std::vector<float> out4(4);
  std::vector<Half> half(5);
  EXPECT_EQ(refusal([&] { decode_dense<float>(parse(sparse), 10, out); }),
            "frame: kind is 1, must be 2 (dense)");
  EXPECT_EQ(refusal([&] { decode_dense<float>(parse(dense), 9, out); }),
            "frame: first_index is 10, must be 9");
  EXPECT_EQ(refusal([&] { decode_dense<float>(parse(dense), 10, out4); }),
            "frame: count is 5, must be 4");
  EXPECT_EQ(refusal([&] { decode_dense<Half>(parse(dense), 10, half); }),
            "frame: dtype is f32, must be f16");
  EXPECT_TRUE(indices.empty());
}

TEST(Frame, DenseRoundTripOfEveryType) {
  for (DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
    visit_dtype(dtype, [&]<class T>() {
      for (std::size_t count : {0, 1, 5, 1000}) {
        std::vector<T> values;
        for (std::size_t i = 0; i < count; ++i) values.push_back(T(float(i) - 7));
        auto const frame = dense_frame(3, values);
        EXPECT_EQ(frame.size(), header_bytes + count * sizeof(T));
        EXPECT_EQ(parse(frame).header.dtype, dtype);
        std::vector<T> out(count);
        decode_dense<T>(parse(frame), 3, out);
        EXPECT_EQ(out, values);
      }
    });
  }
}

TEST(Frame, BytesRoundTripAndFramesLieBackToBack) {
  Bytes buffer = bytes_frame("hello");
  Bytes const second = sparse_frame<float>(0, 50, {1}, {2.0f});
  buffer.insert(buffer.end(), second.begin(), second.end());
  buffer.resize(buffer.size() + 100);
  FrameView const first = parse(buffer);
  EXPECT_EQ(first.size(), header_bytes + 5);
  EXPECT_EQ(std::memcmp(first.values.data(), "hello", 5), 0);
  EXPECT_EQ(parse_frame(std::span(buffer).subspan(first.size()), 9).size(), second.size());
}

TEST(Frame, EncodersNameTheArgumentThatIsWrong) {
  Bytes out(1000);
  std::vector<std::uint32_t> const indices{3, 5};
  std::vector<float> const values{1, 2};
  auto const encode = [&](std::uint32_t first, std::uint32_t extent,
                          std::vector<std::uint32_t> const& i, std::span<std::byte> to) {
    return encode_sparse<float>(1, first, extent, i, values, {}, to);
  };
  EXPECT_NO_THROW(encode(3, 3, indices, out));
  EXPECT_THROW(encode(4, 3, indices, out), InvalidArgument);
  EXPECT_THROW(encode(3, 2, indices, out), InvalidArgument);
  EXPECT_THROW(encode(whole, 2, indices, out), InvalidArgument);
  EXPECT_THROW(encode(0, 10, {3}, out), InvalidArgument);
  EXPECT_THROW(encode(0, 10, {5, 3}, out), InvalidArgument);
  EXPECT_THROW(encode(0, 10, {3, 3}, out), InvalidArgument);
  EXPECT_THROW(encode(0, 10, indices, std::span(out).first(45)), InvalidArgument);
  EXPECT_THROW(encode_dense<float>(1, 0, values, std::span(out).first(47)), InvalidArgument);
  EXPECT_THROW(encode_bytes(1, std::span(out).first(20), std::span(out).subspan(20, 59)),
               InvalidArgument);
}

std::vector<std::pair<std::string, Bytes>> small_frames() {
  return {{"empty", sparse_frame<float>(5, 100, {}, {})},
          {"raw32", sparse_frame<float>(0, 100, {1, 50}, {1, 2}, {IndexCodecChoice::raw32, true})},
          {"delta", sparse_frame<double>(5, 1000, {5, 6, 99, 700}, {1, 2, 3, 4})},
          {"bitmap", sparse_frame<float>(0, 16, {1, 3, 4, 9, 15}, {1, 2, 3, 4, 5},
                                         {IndexCodecChoice::bitmap, false})},
          {"last", sparse_frame<float>(1, whole, {1, whole}, {1, 2})},
          {"dense", sparse_frame<float>(7, 3, {7, 8, 9}, {1, 2, 3})},
          {"half", dense_frame<Half>(0, std::vector<Half>(3, Half(1.0f)))},
          {"ints", sparse_frame<std::int32_t>(0, 100, {1, 50}, {1, 2})},
          {"qsgd4", dense_frame<float>(0, {7, -1, 3, 0, 2}, ValueCodec::qsgd4)},
          {"f16", sparse_frame<double>(5, 100, {7, 8, 90}, {1, -0.5, 3},
                                       {.value_codec = ValueCodec::f16})},
          {"bytes", bytes_frame("some bytes")}};
}

TEST(Frame, EveryTruncationIsRefused) {
  for (auto const& [name, frame] : small_frames()) {
    SCOPED_TRACE(name);
    for (std::size_t length = 0; length < frame.size(); ++length) {
      Bytes const cut(frame.begin(), frame.begin() + std::ptrdiff_t(length));
      EXPECT_NE(refusal([&] { parse(cut); }), "accepted") << length;
    }
  }
}

TEST(Frame, EveryCorruptedByteIsRefused) {
  for (auto [name, frame] : small_frames()) {
    SCOPED_TRACE(name);
    frame.resize(frame.size() + 64);  // a receive buffer goes on behind the frame
    std::size_t const size = parse(frame).size();
    for (std::size_t at = 0; at < size; ++at) {
      for (int flip = 1; flip < 256; ++flip) {
        frame[at] ^= std::byte(flip);
        EXPECT_NE(refusal([&] { parse(frame); }), "accepted") << "byte " << at << " ^ " << flip;
        frame[at] ^= std::byte(flip);
      }
    }
  }
}

TEST(Frame, RefusalsNameTheField) {
  struct Case {
    std::string frame;
    std::size_t offset;
    std::vector<std::uint8_t> bytes;
    std::string text;
  };
  std::vector<Case> const cases{
      {"raw32", 0, {0}, "frame: magic is 23552, must be 23719"},
      {"raw32", 2, {2}, "frame: version is 2, must be 1"},
      {"raw32", 3, {0}, "frame: kind is 0, must be 1 (sparse), 2 (dense) or 3 (bytes)"},
      {"raw32", 3, {4}, "frame: kind is 4, must be"},
      {"half", 4, {6}, "frame: dtype is 6, must be 0 to 5"},
      {"raw32", 4, {2}, "frame: dtype is 2, must be 0 (f32), 1 (f64), 4 (i32) or 5 (i64)"},
      {"bytes", 4, {1}, "frame: dtype is 1, must be 0 in a bytes frame"},
      {"raw32", 5, {0}, "frame: index_codec is 0, must be a known codec"},
      {"raw32", 5, {4}, "frame: index_codec is 4, must be a known codec"},
      {"raw32", 5, {3}, "frame: index_bytes is 8, must be 13 to 13 for count 2 in codec bitmap"},
      {"bitmap", 20, {17}, "frame: index_bytes is 2, must be 3 to 3 for count 5 in codec bitmap"},
      {"dense", 5, {1}, "frame: index_codec is 1, must be 0 (none)"},
      {"empty", 5, {1}, "frame: index_codec is 1, must be 0 (none)"},
      {"raw32", 6, {0}, "frame: value_codec is 0, must be a known codec in a frame with values"},
      {"qsgd4", 6, {10}, "frame: value_codec is 10, must be a known codec in a frame with values"},
      {"qsgd4", 6, {6}, "frame: value_bytes is 7, must be 9 for count 5 in codec qsgd8"},
      {"half", 6, {2}, "frame: value_codec is 2, must be 1 (raw) for dtype f16"},
      {"ints", 6, {6}, "frame: value_codec is 6, must be 1 (raw) for dtype i32"},
      {"f16", 28, {7}, "frame: value_bytes is 7, must be 6 for count 3 in codec f16"},
      {"bytes", 6, {1}, "frame: value_codec is 1, must be 0 (none)"},
      {"raw32", 7, {1}, "frame: reserved is 1, must be 0"},
      {"raw32", 8, {8}, "frame: operation is 8, must be 9"},
      {"raw32", 12, {101}, "frame: count is 101, must be at most extent 100"},
      {"dense", 12, {4}, "frame: count is 4, must be extent 3 in a dense frame"},
      {"last", 16, {2}, "frame: extent is 4294967295, must be at most 2^32 - first_index = "},
      {"bytes", 16, {1}, "frame: first_index is 1, must be 0 in a bytes frame"},
      {"bytes", 20, {1}, "frame: extent is 1, must be 0 in a bytes frame"},
      {"raw32", 24, {7}, "frame: index_bytes is 7, must be 8 to 8 for count 2 in codec raw32"},
      {"delta", 24, {1}, "frame: index_bytes is 1, must be 2 to 20 for count 4 in codec delta"},
      {"dense", 24, {1}, "frame: index_bytes is 1, must be 0"},
      {"raw32", 28, {7}, "frame: value_bytes is 7, must be 8 for count 2"},
      {"bytes",
       12,
       {255, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255},
       "frame: index_bytes + value_bytes is 255, must be at most the 10 bytes that follow"},
      {"raw32", 32, {0, 0, 0, 0, 0, 0, 0, 0}, "frame: checksum is 0, must be "},
      {"raw32", 44, {9}, "frame: checksum is "},
  };
  for (Case const& c : cases) {
    for (auto [name, frame] : small_frames()) {
      if (name != c.frame) continue;
      std::memcpy(frame.data() + c.offset, c.bytes.data(), c.bytes.size());
      std::string const text = refusal([&] { parse(frame); });
      EXPECT_EQ(text.substr(0, c.text.size()), c.text) << text;
    }
  }
  EXPECT_EQ(refusal([] { parse(Bytes(39)); }),
            "frame: length is 39, must be at least the header's 40");
}

}  // namespace
}  // namespace sparsecomm
