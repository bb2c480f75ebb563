#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "wire/checksum.h"
#include "wire/codecs.h"
#include "wire/delta.h"
#include "wire/frame.h"
#include "wire/index_kernels.h"

namespace sparsecomm {
namespace {

constexpr std::uint32_t whole = std::numeric_limits<std::uint32_t>::max();

struct IndexSet {
  std::string name;
  std::uint32_t first_index;
  std::uint32_t extent;
  std::vector<std::uint32_t> indices;
};

std::vector<std::uint32_t> range(std::uint32_t first, std::size_t count, std::uint32_t step = 1) {
  std::vector<std::uint32_t> indices(count);
  for (std::size_t i = 0; i < count; ++i) indices[i] = first + static_cast<std::uint32_t>(i) * step;
  return indices;
}

// Positions of [0, extent) that are each taken with probability `density`.
std::vector<std::uint32_t> random_indices(std::uint64_t extent, double density,
                                          std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::geometric_distribution<std::uint64_t> gap(density);
  std::vector<std::uint32_t> indices;
  for (std::uint64_t i = gap(generator); i < extent; i += 1 + gap(generator)) {
    indices.push_back(static_cast<std::uint32_t>(i));
  }
  return indices;
}

std::vector<std::uint32_t> rows(std::size_t count, std::uint32_t row, std::uint32_t widest_gap,
                                std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<std::uint32_t> indices;
  std::uint32_t next = 0;
  for (std::size_t r = 0; r < count; ++r) {
    next += static_cast<std::uint32_t>(generator() % widest_gap);
    for (std::uint32_t i = 0; i < row; ++i) indices.push_back(next++);
  }
  return indices;
}

std::vector<IndexSet> index_sets() {
  std::vector<IndexSet> sets{
      {"empty", 0, 1000, {}},
      {"empty_extent", 7, 0, {}},
      {"first", 5, 100, {5}},
      {"last", 5, 100, {104}},
      {"ends", 5, 100, {5, 104}},
      {"all", 3, 1000, range(3, 1000)},
      {"one_block", 0, 1000, range(0, 128, 7)},
      {"one_block_and_one", 0, 1000, range(0, 129, 7)},
      {"whole_ends", 0, whole, {0, whole - 1}},
      {"last_possible", 1, whole, {whole}},
      {"far_ends", 1, whole, {1, whole}},
      {"huge_gaps", 0, whole, range(0, 4, 1u << 30)},
      {"block_then_far", 0, whole, range(0, 128)},
      {"even", 100, whole - 100, range(100, 1000, 4000000)},
      {"block_up_to_last", whole - 127, 128, range(whole - 127, 128)},
      {"rows", 0, whole, rows(50, 20, 100000, 1)},
      {"rare_wide_gaps", 0, whole, rows(10, 200, 400000000, 2)},
  };
  sets[12].indices.push_back(whole - 1);
  for (double density : {0.0005, 0.01, 0.1, 0.5, 0.99}) {
    auto const extent = static_cast<std::uint32_t>(1000 / density);
    sets.push_back({concat("random_", density), 0, extent, random_indices(extent, density, 3)});
  }
  return sets;
}

// A bitmap of a wide set only takes time.
bool too_wide(IndexCodecEntry const& codec, IndexSet const& set) {
  return codec.max_bytes(set.indices.size(), set.extent) > 4 * set.indices.size() + 30'000;
}

// A codec with the loops of one target.
struct Codec {
  IndexCodecEntry const* entry;
  IndexKernels const* kernels;

  IndexCodecEntry const* operator->() const { return entry; }
  std::size_t encode(IndexSet const& set, std::span<std::byte> out) const {
    return entry->encode(*kernels, set.indices, set.first_index, set.extent, out);
  }
  void decode(std::span<const std::byte> in, std::uint32_t first_index, std::uint32_t extent,
              std::span<std::uint32_t> indices) const {
    entry->decode(*kernels, in, first_index, extent, indices);
  }
};

std::vector<std::byte> encoded(Codec const& codec, IndexSet const& set) {
  std::vector<std::byte> bytes(codec->max_bytes(set.indices.size(), set.extent));
  bytes.resize(codec.encode(set, bytes));
  bytes.shrink_to_fit();
  return bytes;
}

std::size_t delta_bytes(std::vector<std::uint32_t> const& indices) {
  std::vector<std::byte> out(max_index_bytes(indices.size()));
  return delta::encode(index_kernels(), indices, 0, whole, out);
}

// What untrusted bytes decode to is either refused or a valid index list.
void expect_refused_or_valid(Codec const& codec, std::span<const std::byte> bytes,
                             IndexSet const& set, std::size_t count) {
  // Exactly as long as the bytes, so that a sanitizer sees a read beyond them.
  std::vector<std::byte> const in(bytes.begin(), bytes.end());
  std::vector<std::uint32_t> decoded(count);
  try {
    codec.decode(in, set.first_index, set.extent, decoded);
  } catch (MalformedFrame const&) {
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    ASSERT_GE(decoded[i], set.first_index);
    ASSERT_LT(decoded[i] - set.first_index, set.extent);
    if (i > 0) {
      ASSERT_GT(decoded[i], decoded[i - 1]);
    }
  }
}

std::string refusal(auto&& call) {
  try {
    call();
  } catch (MalformedFrame const& error) {
    return error.what();
  }
  return "";
}

class Codecs : public testing::TestWithParam<Codec> {
 protected:
  static bool is_too_wide(IndexSet const& set) { return too_wide(*GetParam().entry, set); }
};

INSTANTIATE_TEST_SUITE_P(
    Wire, Codecs,
    [] {
      std::vector<Codec> all;
      for (auto const& codec : index_codecs()) {
        for (auto const& kernels : index_kernel_tables()) all.push_back({&codec, &kernels});
      }
      return testing::ValuesIn(all);
    }(),
    [](auto const& info) { return concat(info.param->name, "_", info.param.kernels->target); });

TEST_P(Codecs, RoundTrip) {
  for (IndexSet const& set : index_sets()) {
    SCOPED_TRACE(set.name);
    if (is_too_wide(set)) continue;
    auto const scalar = encoded({GetParam().entry, &index_kernel_tables().front()}, set);
    ASSERT_EQ(encoded(GetParam(), set), scalar);
    std::size_t const bytes = scalar.size();
    if (!set.indices.empty()) {
      ASSERT_GE(bytes, GetParam()->min_bytes(set.indices.size(), set.extent));
    }
    // Into what is just enough and into one byte less, with a guard behind.
    for (std::size_t room : {bytes, bytes - (bytes > 0)}) {
      std::vector<std::byte> out(room + 16, std::byte{0xab});
      std::size_t const written = GetParam().encode(set, std::span(out).first(room));
      ASSERT_EQ(written, room < bytes ? does_not_fit : bytes);
      for (std::size_t i = room; i < out.size(); ++i) ASSERT_EQ(out[i], std::byte{0xab});
    }
    std::vector<std::uint32_t> decoded(set.indices.size());
    GetParam().decode(encoded(GetParam(), set), set.first_index, set.extent, decoded);
    ASSERT_EQ(decoded, set.indices);
  }
}

TEST_P(Codecs, RefusesIndexBeyondExtent) {
  for (IndexSet const& set : index_sets()) {
    if (set.indices.empty() || is_too_wide(set)) continue;
    SCOPED_TRACE(set.name);
    auto const bytes = encoded(GetParam(), set);
    std::vector<std::uint32_t> decoded(set.indices.size());
    std::uint32_t const too_short = set.indices.back() - set.first_index;
    std::string const text =
        refusal([&] { GetParam().decode(bytes, set.first_index, too_short, decoded); });
    EXPECT_NE(text.find("ind"), std::string::npos) << text;
  }
}

TEST_P(Codecs, RefusesTruncationAndTrailingBytes) {
  for (IndexSet const& set : index_sets()) {
    SCOPED_TRACE(set.name);
    if (is_too_wide(set)) continue;
    auto bytes = encoded(GetParam(), set);
    std::vector<std::uint32_t> decoded(set.indices.size());
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      std::vector<std::byte> const cut(bytes.begin(), bytes.begin() + std::ptrdiff_t(length));
      ASSERT_THROW(GetParam().decode(cut, set.first_index, set.extent, decoded), MalformedFrame);
    }
    bytes.push_back(std::byte{0});
    ASSERT_THROW(GetParam().decode(bytes, set.first_index, set.extent, decoded), MalformedFrame);
  }
}

TEST_P(Codecs, CorruptedBytesAreRefusedOrValid) {
  for (IndexSet const& set : index_sets()) {
    SCOPED_TRACE(set.name);
    if (is_too_wide(set)) continue;
    auto bytes = encoded(GetParam(), set);
    std::size_t const stride = bytes.size() / 40 + 1;
    for (std::size_t at = 0; at < bytes.size(); at += stride) {
      for (int flip = 1 + int(at % 4); flip < 256; flip += 4) {
        bytes[at] ^= std::byte(flip);
        expect_refused_or_valid(GetParam(), bytes, set, set.indices.size());
        bytes[at] ^= std::byte(flip);
      }
    }
    for (std::size_t wrong : {std::size_t{0}, set.indices.size() + 1, set.indices.size() + 128}) {
      expect_refused_or_valid(GetParam(), bytes, set, wrong);
    }
  }
}

TEST_P(Codecs, RandomSetsAndRandomBytes) {
  std::uint64_t const seed = std::random_device{}();
  SCOPED_TRACE(concat("seed ", seed));
  std::mt19937_64 generator(seed);
  for (int round = 0; round < 300; ++round) {
    IndexSet set{"", static_cast<std::uint32_t>(generator()), 0, {}};
    set.extent = static_cast<std::uint32_t>(generator()) & (whole >> generator() % 32);
    set.extent = std::min(set.extent, whole - set.first_index);
    if (is_too_wide(set)) continue;
    for (std::uint64_t i = generator() % 1000; i > 0 && set.extent > 0; --i) {
      set.indices.push_back(set.first_index + static_cast<std::uint32_t>(generator() % set.extent));
    }
    std::sort(set.indices.begin(), set.indices.end());
    set.indices.erase(std::unique(set.indices.begin(), set.indices.end()), set.indices.end());
    auto bytes = encoded(GetParam(), set);
    std::vector<std::uint32_t> decoded(set.indices.size());
    GetParam().decode(bytes, set.first_index, set.extent, decoded);
    ASSERT_EQ(decoded, set.indices);
    for (auto& byte : bytes) byte = std::byte(generator());
    expect_refused_or_valid(GetParam(), bytes, set, set.indices.size());
  }
}

// Loop by loop, with memory of just the size that each may touch.
TEST(IndexKernels, EveryTargetDoesWhatTheScalarLoopsDo) {
  auto const& scalar = index_kernel_tables().front();
  EXPECT_EQ(scalar.target, "scalar");
  EXPECT_EQ(index_kernel_tables().back().target, index_kernels().target);
  EXPECT_GE(index_kernel_tables().size(), 2u);
  std::uint64_t const seed = std::random_device{}();
  std::mt19937_64 generator(seed);
  for (auto const& table : index_kernel_tables()) {
    SCOPED_TRACE(concat(table.target, ", seed ", seed));
    for (std::size_t size = 0; size < 200; ++size) {
      auto indices = range(whole - 400, size, 2);
      ASSERT_TRUE(table.strictly_increasing(indices));
      for (std::size_t i = 1; i < size; ++i) {
        auto broken = indices;
        broken[i] = broken[i - 1];
        ASSERT_FALSE(table.strictly_increasing(broken));
      }
    }
    for (int round = 0; round < 500; ++round) {
      std::vector<std::byte> bytes(generator() % 100);
      for (auto& byte : bytes) byte = std::byte(generator() & generator() >> generator() % 8);
      std::size_t const enough = generator() % 300;
      auto const base = static_cast<std::uint32_t>(generator());
      std::vector<std::uint32_t> expected(enough + ones_slack), found(enough + ones_slack);
      Ones const of_scalar = scalar.ones(bytes, base, enough, expected.data());
      Ones const of_table = table.ones(bytes, base, enough, found.data());
      ASSERT_EQ(of_table.count, of_scalar.count);
      ASSERT_EQ(of_table.bytes, of_scalar.bytes);
      expected.resize(of_scalar.count);
      found.resize(of_scalar.count);
      ASSERT_EQ(found, expected);
    }
    for (std::uint32_t bits = 0; bits < 32; ++bits) {
      std::vector<std::uint32_t> indices(delta::block_size), gap(indices), found(indices);
      for (auto& index : indices) index = static_cast<std::uint32_t>(generator() >> bits);
      std::uint32_t const next = indices[0] / 2;
      ASSERT_EQ(table.gaps(indices.data(), next, found.data()),
                scalar.gaps(indices.data(), next, gap.data()));
      ASSERT_EQ(found, gap);
      for (std::uint32_t parameter = 0; parameter < 32; ++parameter) {
        ASSERT_EQ(table.high_bits(gap.data(), parameter), scalar.high_bits(gap.data(), parameter));
      }
    }
    for (std::uint32_t parameter = 0; parameter <= max_join_parameter; ++parameter) {
      std::vector<std::byte> lows(delta::block_size * parameter / 8 + 16);
      for (auto& byte : lows) byte = std::byte(generator());
      std::vector<std::uint32_t> ones = range(0, delta::block_size, 3), joined(ones), found(ones);
      ones.back() = 5000;
      auto const next = static_cast<std::uint32_t>(generator());
      ASSERT_EQ(table.join(lows.data(), parameter, next, ones.data(), found.data()),
                scalar.join(lows.data(), parameter, next, ones.data(), joined.data()));
      ASSERT_EQ(found, joined);
    }
  }
}

TEST(Delta, StaysNearTheEntropyOfRandomSets) {
  for (double density : {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1}) {
    auto const indices = random_indices(static_cast<std::uint64_t>(1e5 / density), density, 11);
    double const bits = 8.0 * double(delta_bytes(indices)) / double(indices.size());
    double const entropy = std::log2(std::exp(1.0) / density);
    EXPECT_LE(bits, 1.05 * entropy) << "density " << density;
  }
}

TEST(Delta, GoesBelowTheEntropyOfRandomSetsForClusters) {
  auto const indices = rows(2000, 64, 40000, 5);
  double const density = double(indices.size()) / double(indices.back() + 1);
  double const bits = 8.0 * double(delta_bytes(indices)) / double(indices.size());
  EXPECT_LE(bits, 0.25 * std::log2(std::exp(1.0) / density));
}

// Blocks are coded with each parameter by definition; the encoder's choice is the least of them.
TEST(Delta, ChoosesTheCheapestParameter) {
  std::uint64_t const seed = std::random_device{}();
  SCOPED_TRACE(concat("seed ", seed));
  std::mt19937_64 generator(seed);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::uint64_t> gaps(delta::block_size);
    std::uint64_t const common = std::uint64_t{1} << generator() % 24;
    std::uint64_t const rare = std::uint64_t{1} << generator() % 28;
    std::uint64_t const rarity = 1 + generator() % 128;
    for (auto& gap : gaps) gap = generator() % (generator() % rarity == 0 ? rare : common);
    std::vector<std::uint32_t> indices;
    std::uint64_t index = 0;
    for (auto gap : gaps) indices.push_back(static_cast<std::uint32_t>((index += gap + 1) - 1));
    if (index > whole) continue;
    std::uint64_t least = ~0ull;
    for (int b = 0; b < 32; ++b) {
      std::uint64_t high_bits = gaps.size();
      std::uint64_t exceptions = 0;
      for (auto gap : gaps) {
        if (gap >> b > delta::max_unary) {
          ++exceptions;
        } else {
          high_bits += gap >> b;
        }
      }
      std::uint64_t const extra = exceptions == 0 ? 0 : 1 + 5 * exceptions;
      least = std::min(least, 1 + extra + gaps.size() * b / 8 + (high_bits + 7) / 8);
    }
    ASSERT_EQ(delta_bytes(indices), least);
  }
}

TEST(Delta, RefusalsNameWhatIsWrong) {
  struct Case {
    std::vector<std::uint8_t> bytes;
    std::size_t count;
    std::string text;
  };
  // Block parameter, low parts, high parts; extent 100.
  std::vector<Case> const cases{
      {{0x00, 0x01}, 1, ""},
      {{0x20, 0x01}, 1, "block parameter is 32, must be at most 31"},
      {{0x00, 0x03}, 1, "padding of high parts"},
      {{0x02, 0x05, 0x01}, 1, "padding of low parts"},
      {{0x00, 0x00}, 1, "high parts end after 0 of 1 gaps"},
      {{0x00, 0x00, 0x00, 0x00, 0x00, 0x01}, 1, ""},
      {{0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02}, 1, "high parts is 42 bits, must be at most 41"},
      {{0x00, 0, 0, 0, 0, 0, 0, 0, 0, 0x01}, 1, "high parts end after 0"},
      {{0x1f, 0xff, 0xff, 0xff}, 1, "low parts is 4 bytes, must be at most the 3 left"},
      {{0x80, 0x00, 0x01}, 1, "number of exceptions is 0, must be 1 to 1"},
      {{0x80, 0x02, 0x01}, 1, "number of exceptions is 2, must be 1 to 1"},
      {{0x80, 0x01, 0x01, 50, 0, 0, 0, 0x01}, 1, "position of exception 0 is 1, must be 0 to 0"},
      {{0x80, 0x01, 0x00, 40, 0, 0, 0, 0x01}, 1, "gap of exception 0 is 40, must be above 40"},
      {{0x80, 0x01, 0x00, 99, 0, 0, 0, 0x01}, 1, ""},
      {{0x80, 0x01, 0x00, 100, 0, 0, 0, 0x01}, 1, "below extent 100"},
      {{0x80, 0x02, 0x00, 0x00, 50, 0, 0, 0, 50, 0, 0, 0, 0x03}, 2, "position of exception 1 is 0"},
      {{0x80, 0x02, 0x00, 0x01, 50, 0, 0, 0, 50, 0, 0, 0, 0x03}, 2, "index is 101, must be below"},
      {{0x00, 0x01, 0x00}, 1, "trailing bytes: 1"},
      {{}, 1, "block parameter is 1 bytes, must be at most the 0 left"},
  };
  for (Case const& c : cases) {
    std::vector<std::uint32_t> indices(c.count);
    for (auto const& kernels : index_kernel_tables()) {
      std::string const text = refusal(
          [&] { delta::decode(kernels, std::as_bytes(std::span(c.bytes)), 0, 100, indices); });
      EXPECT_NE(text.find(c.text), std::string::npos) << "got: " << text << "\nnot: " << c.text;
      EXPECT_EQ(text.empty(), c.text.empty()) << text;
    }
  }
}

TEST(Bitmap, RefusalsNameWhatIsWrong) {
  struct Case {
    std::vector<std::uint8_t> bytes;
    std::size_t count;
    std::string text;
  };
  std::vector<Case> const cases{
      {{0x01, 0x04}, 2, ""},
      {{0x01}, 1, "index_bytes is 1, must be 2 for extent 12"},
      {{0x01, 0x00, 0x00}, 1, "index_bytes is 3, must be 2 for extent 12"},
      {{0x01, 0x00}, 2, "ones are 1, must be count 2"},
      {{0x07, 0x00}, 2, "ones are 3 or more, must be count 2"},
      {{0x01, 0x10}, 2, "padding is not 0"},
      {{0x01, 0x00}, 0, "ones are 1 or more, must be count 0"},
  };
  for (Case const& c : cases) {
    std::vector<std::uint32_t> indices(c.count);
    for (auto const& kernels : index_kernel_tables()) {
      std::string const text = refusal([&] {
        find_index_codec(IndexCodec::bitmap)
            ->decode(kernels, std::as_bytes(std::span(c.bytes)), 100, 12, indices);
      });
      EXPECT_NE(text.find(c.text), std::string::npos) << "got: " << text << "\nnot: " << c.text;
      EXPECT_EQ(text.empty(), c.text.empty()) << text;
    }
  }
}

TEST(Checksum, AnyCorruptedByteChangesIt) {
  std::vector<std::byte> bytes(150);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(i * 37);
  auto const sum = [&] {
    Checksum checksum;
    checksum.add(bytes);
    return checksum.value();
  };
  auto const expected = sum();
  for (auto& byte : bytes) {
    for (int flip = 1; flip < 256; ++flip) {
      byte ^= std::byte(flip);
      ASSERT_NE(sum(), expected);
      byte ^= std::byte(flip);
    }
  }
}

}  // namespace
}  // namespace sparsecomm
