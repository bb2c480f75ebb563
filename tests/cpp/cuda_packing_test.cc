// The CUDA kernels on what is packed, and on blocks of bytes, against those of the processor; see
// cuda_logic_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "cuda/device_memory.h"
#include "fills.h"
#include "kernels/block_scan.h"
#include "kernels/top_k.h"
#include "sparse/sum.h"
#include "wire/codecs.h"
#include "wire/qsgd.h"

namespace sparsecomm::cuda {
namespace {

using test::Array;
using test::library;
using test::One;
using test::shuffle;
using test::workspace;

template <class V>
void check_qsgd(Fill<V> const& fill, std::size_t size, QsgdFormat format, std::mt19937_64& random) {
  SCOPED_TRACE(testing::Message() << fill.name << ", size " << size << ", bits " << format.bits
                                  << ", bucket " << format.bucket);
  RoundingKey const key{random(), random(), static_cast<std::uint32_t>(random())};
  std::vector<V> values(size);
  for (V& value : values) value = fill.draw(random);
  QsgdKernels<V> const& scalar = qsgd_kernel_tables<V>().front();
  std::vector<std::byte> expected(format.bytes(size, sizeof(V)));
  Array<V> const input(values), rounded(size), dense(std::vector<V>(size, V{3}));
  Array<std::byte> const codes(std::vector<std::byte>(expected.size() + 1, std::byte{0x77}));
  One<std::uint32_t> const not_finite;
  auto const& kernels = library().values<V>();
  kernels.qsgd_quantize(input.data(), size, format.bits, format.bucket, key, codes.data() + 1,
                        rounded.data(), not_finite.data(), nullptr);
  bool const finite = std::ranges::all_of(values, [](V v) { return std::isfinite(v); });
  ASSERT_EQ(not_finite.get() == 0, finite);
  if (!finite) return;
  qsgd_round<V>(scalar, format, values, key);
  qsgd_encode<V>(scalar, format, values, expected);
  expect_equal(rounded.get(), values);
  auto const actual = codes.get();
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), actual.begin() + 1));
  kernels.qsgd_dequantize_add(codes.data() + 1, size, format.bits, format.bucket, dense.data(),
                              nullptr);
  auto const sums = dense.get();
  for (std::size_t i = 0; i < size; ++i) ASSERT_TRUE(same(sums[i], V{3} + values[i])) << i;
}

TEST(CudaPacking, QsgdHasTheBitsOfTheWire) {
  std::mt19937_64 random(16);
  for (int const bits : {2, 4, 8}) {
    for (std::size_t const bucket : {512, 1024}) {
      for (std::size_t const size : {1, 5, 1023, 1024, 3001}) {
        QsgdFormat const format{bits, bucket};
        for (auto const& fill : fills<float>()) check_qsgd<float>(fill, size, format, random);
        for (auto const& fill : fills<double>()) check_qsgd<double>(fill, size, format, random);
      }
    }
  }
}

TEST(CudaPacking, BlockScanFindsEveryBit) {
  std::mt19937_64 random(17);
  for (std::size_t const block : {1, 7, 64, 65, 256}) {
    for (std::size_t const size : {0, 1, 63, 64, 65, 5000, 20011}) {
      for (std::size_t const offset : {0, 1}) {
        SCOPED_TRACE(testing::Message() << block << " bytes, size " << size << " at " << offset);
        std::vector<std::byte> storage(size + offset);
        std::span<std::byte> const bytes = std::span(storage).subspan(offset);
        for (std::byte& byte : bytes) {
          if (random() % 200 == 0) byte = std::byte(1u << random() % 8);
        }
        std::size_t const blocks = (size + block - 1) / block;
        std::vector<std::uint32_t> expected, expected_bitmap(blocks / 32 + 1);
        std::vector<std::byte> expected_out(blocks * block);
        for (std::size_t b = 0; b < blocks; ++b) {
          auto const part = bytes.subspan(b * block, std::min(block, size - b * block));
          if (std::ranges::all_of(part, [](std::byte x) { return x == std::byte{0}; })) continue;
          std::ranges::copy(part, expected_out.begin() + expected.size() * block);
          expected.push_back(static_cast<std::uint32_t>(b));
          expected_bitmap[b / 32] |= 1u << b % 32;
        }
        auto const space = workspace(library().block_workspace(blocks));
        Array<std::byte> const device(storage), out(blocks * block);
        Array<std::uint32_t> const bitmap(blocks / 32 + 1), numbers(blocks);
        One<std::uint64_t> const count(77);
        shuffle(random(), 3);
        library().block_scan(device.data() + offset, size, block, bitmap.data(), numbers.data(),
                             out.data(), count.data(), space.data(), nullptr);
        ASSERT_EQ(count.get(), expected.size());
        auto found = numbers.get();
        found.resize(expected.size());
        EXPECT_EQ(found, expected);
        EXPECT_EQ(bitmap.get(), expected_bitmap);
        EXPECT_EQ(out.get(), expected_out);
      }
    }
  }
}

// In one pass, to the host's memory.
TEST(CudaPacking, BlocksMayGoStraightToPinnedMemory) {
  constexpr std::size_t block = 64, blocks = 100;
  std::vector<std::byte> bytes(block * blocks - 5);
  for (std::size_t b = 0; b < blocks; b += 3) bytes[b * block + b % 50] = std::byte{1};
  Array<std::byte> const device(bytes);
  Array<std::uint32_t> const bitmap(blocks / 32 + 1);
  auto const space = workspace(library().block_workspace(blocks));
  auto const& runtime = library().runtime;
  auto const pinned = [&](std::size_t size) {
    return std::unique_ptr<void, void (*)(void*) noexcept>(runtime.allocate_pinned(size),
                                                           runtime.free_pinned);
  };
  auto const out = pinned(block * blocks), numbers = pinned(4 * blocks), count = pinned(8);
  auto* const found = static_cast<std::uint32_t*>(numbers.get());
  library().block_scan(device.data(), bytes.size(), block, bitmap.data(), found,
                       static_cast<std::byte*>(out.get()), static_cast<std::uint64_t*>(count.get()),
                       space.data(), nullptr);
  runtime.synchronize(nullptr);
  std::size_t const expected = (blocks + 2) / 3;
  ASSERT_EQ(*static_cast<std::uint64_t*>(count.get()), expected);
  std::vector<std::byte> copies(expected * block);
  block_gather(bytes, block, std::span(found, expected), copies);
  for (std::size_t i = 0; i < expected; ++i) ASSERT_EQ(found[i], 3 * i);
  // The last block is shorter; behind its end nothing is written.
  EXPECT_TRUE(std::equal(copies.begin(), copies.end() - 5, static_cast<std::byte*>(out.get())));
}

TEST(CudaPacking, CopiesOfBlocksEqualTheProcessors) {
  std::mt19937_64 random(19);
  for (std::size_t const block : {1, 7, 64, 65, 256}) {
    for (std::size_t const size : {1, 63, 5000, 20011}) {
      SCOPED_TRACE(testing::Message() << block << " bytes, size " << size);
      std::vector<std::byte> bytes(size);
      for (std::byte& byte : bytes) byte = std::byte(random());
      std::size_t const blocks = (size + block - 1) / block;
      std::vector<std::uint32_t> numbers;
      for (std::size_t b = 0; b < blocks; ++b) {
        if (random() % 3 != 0) numbers.push_back(static_cast<std::uint32_t>(b));
      }
      numbers.push_back(static_cast<std::uint32_t>(blocks));  // no block
      std::size_t const known = numbers.size() - 1;
      Array<std::byte> const device(bytes), copies(numbers.size() * block);
      Array<std::uint32_t> const where(numbers);
      One<std::uint32_t> const outside;
      library().block_gather(device.data(), size, block, where.data(), known, copies.data(),
                             outside.data(), nullptr);
      EXPECT_EQ(outside.get(), 0u);
      std::vector<std::byte> expected(known * block);
      block_gather(bytes, block, std::span(numbers).first(known), expected);
      auto actual = copies.get();
      actual.resize(expected.size());
      EXPECT_EQ(actual, expected);
      library().block_gather(device.data(), size, block, where.data(), numbers.size(),
                             copies.data(), outside.data(), nullptr);
      EXPECT_EQ(outside.get(), 1u);

      for (std::byte& byte : expected) byte ^= std::byte{0x55};
      Array<std::byte> const changed(expected);
      std::vector<std::byte> target = bytes;
      One<std::uint32_t> const none;
      library().block_scatter(device.data(), size, block, where.data(), known, changed.data(),
                              none.data(), nullptr);
      block_scatter(target, block, std::span(numbers).first(known), expected);
      EXPECT_EQ(device.get(), target);
      library().block_scatter(device.data(), size, block, where.data(), known, nullptr, none.data(),
                              nullptr);
      block_scatter(target, block, std::span(numbers).first(known),
                    std::vector<std::byte>(expected.size()));
      EXPECT_EQ(device.get(), target);
      EXPECT_EQ(none.get(), 0u);
    }
  }
}

template <class T>
class CudaScatter : public testing::Test {};
using Elements = testing::Types<float, double, Half, BFloat16>;
TYPED_TEST_SUITE(CudaScatter, Elements);

TYPED_TEST(CudaScatter, SquaresOfBlocksHaveTheBitsOfTheScalarOnes) {
  using T = TypeParam;
  using V = accumulate_t<T>;
  std::mt19937_64 random(20);
  for (auto const& fill : fills<V>()) {
    for (std::size_t const block : {1, 15, 16, 17, 256, 5000}) {
      std::vector<T> x(4099);
      for (T& entry : x) entry = T(fill.draw(random));
      std::size_t const blocks = (x.size() + block - 1) / block;
      Array<T> const device(x);
      Array<double> const squares(blocks);
      library().kernels<T>().block_squares(device.data(), x.size(), block, squares.data(), nullptr);
      auto const actual = squares.get();
      for (std::size_t b = 0; b < blocks; ++b) {
        auto const entries =
            std::span<const T>(x).subspan(b * block, std::min(block, x.size() - b * block));
        double const expected = kernel_tables<T>()[0].moments(entries, {}).squares;
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(actual[b]));
        } else {
          ASSERT_EQ(actual[b], expected) << fill.name << ", block " << block << ", number " << b;
        }
      }
    }
  }
}

TYPED_TEST(CudaScatter, ScatterEqualsTheScalarOne) {
  using T = TypeParam;
  using V = accumulate_t<T>;
  std::mt19937_64 random(18);
  for (auto const& fill : fills<V>()) {
    std::vector<T> expected(4000, T(V(9)));
    std::vector<std::uint32_t> indices;
    std::vector<V> values;
    for (std::uint32_t i = 0; i < 4000; i += 1 + random() % 4) {
      indices.push_back(100 + i);
      values.push_back(fill.draw(random));
    }
    Array<T> const actual(expected);
    Array<V> const packed(values);
    auto const scatter_at = [&](std::vector<std::uint32_t> const& where) {
      Array<std::uint32_t> const device(where);
      One<std::uint32_t> const outside;
      library().kernels<T>().scatter(actual.data(), actual.size(), device.data(), packed.data(),
                                     where.size(), V{3}, 100, outside.data(), nullptr);
      return outside.get();
    };
    EXPECT_EQ(scatter_at(indices), 0u);
    scatter<T>(expected, indices, values, V{3}, 100);
    expect_equal(actual.get(), expected);
    EXPECT_EQ(scatter_at({99}), 1u);
    EXPECT_EQ(scatter_at({4100}), 1u);
    expect_equal(actual.get(), expected);
  }
}

TEST(CudaPacking, AddSparseKeepsWhatStoodThere) {
  Array<float> const dense(std::vector<float>{1, 2, 3, 4}), before(2);
  Array<std::uint32_t> const indices(std::vector<std::uint32_t>{6, 8});
  Array<float> const values(std::vector<float>{10, 20});
  One<std::uint32_t> const outside;
  auto const add = [&](std::size_t size) {
    library().values_f32.add_sparse(dense.data(), size, indices.data(), values.data(), 2, 5,
                                    before.data(), outside.data(), nullptr);
  };
  add(4);
  EXPECT_EQ(dense.get(), (std::vector<float>{1, 12, 3, 24}));
  EXPECT_EQ(before.get(), (std::vector<float>{2, 4}));
  EXPECT_EQ(outside.get(), 0u);
  add(3);
  EXPECT_EQ(outside.get(), 1u);
}

TYPED_TEST(CudaScatter, TopKPerBucketEqualsTheScalarOne) {
  using T = TypeParam;
  using V = accumulate_t<T>;
  std::mt19937_64 random(19);
  for (auto const& fill : fills<V>()) {
    for (std::size_t const row : {1, 17, 700, 5000}) {
      std::size_t const rows = 1 + random() % 3;
      std::size_t const offset = random() % 3;
      std::vector<T> x(offset + rows * row);
      for (T& value : x) value = T(fill.draw(random));
      // Few buckets: each is a block of 256 fibres.
      std::size_t const bucket =
          std::vector<std::size_t>{row / 5 + 1, 512, max_bucket}[random() % 3];
      std::vector<std::size_t> const ks{0, 1, bucket / 7 + 1, bucket, 2 * row};
      for (std::size_t const k : {ks[random() % 5], bucket / 3 + 1}) {
        SCOPED_TRACE(testing::Message() << fill.name << ", " << rows << " rows of " << row
                                        << ", bucket " << bucket << ", k " << k);
        std::size_t const count = rows * bucket_top_k_count(row, bucket, k);
        std::vector<std::uint32_t> expected_indices(count);
        std::vector<V> expected_values(count);
        top_k_per_bucket<T>(std::span<T const>(x).subspan(offset), row, bucket, k,
                            {expected_indices, expected_values}, inline_executor(),
                            kernel_tables<T>().front());
        Array<T> const device(x);
        Array<std::uint32_t> const indices(count);
        Array<V> const values(count);
        shuffle(random(), 2);
        library().kernels<T>().top_k_per_bucket(device.data() + offset, rows * row, row, bucket, k,
                                                {indices.data(), values.data()}, nullptr);
        EXPECT_EQ(indices.get(), expected_indices);
        expect_equal(values.get(), expected_values);
      }
    }
  }
}

template <class V>
void check_sum(std::size_t size, std::size_t streams, double density, std::mt19937_64& random) {
  SCOPED_TRACE(testing::Message() << streams << " of " << size << ", density " << density);
  SparseSum<V> scalar;
  scalar.reset(0, size);
  UnionKernels const& kernels = library().unions;
  auto const space = workspace(kernels.workspace(size));
  One<std::uint32_t> const invalid;
  One<std::uint64_t> const count(77);
  kernels.clear(size, space.data(), nullptr);
  std::vector<Array<std::uint32_t>> indices;
  std::vector<Array<V>> values;
  std::vector<std::vector<std::uint32_t>> all_own(streams);  // which the sum reads at its end
  std::vector<std::vector<V>> all_numbers(streams);
  for (std::size_t s = 0; s < streams; ++s) {
    std::vector<std::uint32_t>& own = all_own[s];
    std::vector<V>& numbers = all_numbers[s];
    for (std::size_t i = 0; i < size; ++i) {
      if (static_cast<double>(random() % 1000) >= density * 1000) continue;
      own.push_back(static_cast<std::uint32_t>(i));
      numbers.push_back(static_cast<V>(static_cast<double>(random() % 2001) - 1000) / V(8));
    }
    scalar.add({own, numbers});
    indices.emplace_back(own);
    values.emplace_back(numbers);
    shuffle(random(), 3);
    kernels.mark(indices[s].data(), own.size(), size, space.data(), invalid.data(), nullptr);
  }
  EXPECT_EQ(invalid.get(), 0u);
  kernels.number(size, space.data(), count.data(), nullptr);
  auto const expected = scalar.sum();
  ASSERT_EQ(count.get(), expected.nnz());
  Array<std::uint32_t> const places(expected.nnz());
  Array<V> const sums(std::vector<V>(expected.nnz(), V(-0.0)));
  kernels.list(size, space.data(), places.data(), nullptr);
  for (std::size_t s = 0; s < streams; ++s) {
    kernels.add<V>()(indices[s].data(), values[s].data(), indices[s].size(), size, space.data(),
                     sums.data(), nullptr);
  }
  EXPECT_TRUE(std::ranges::equal(places.get(), expected.indices));
  EXPECT_TRUE(std::ranges::equal(sums.get(), expected.values));
}

TEST(CudaPacking, SumsOfSparseVectorsEqualTheScalarOnes) {
  std::mt19937_64 random(20);
  for (std::size_t const size : {0, 1, 31, 32, 33, 8191, 30000}) {
    for (double const density : {0.001, 0.2, 1.0}) {
      check_sum<float>(size, 1 + random() % 5, density, random);
      check_sum<double>(size, 2, density, random);
      check_sum<std::int32_t>(size, 3, density, random);
      check_sum<std::int64_t>(size, 2, density, random);
    }
  }
}

TEST(CudaPacking, ASumSeesWhatIsNoSparseVector) {
  UnionKernels const& kernels = library().unions;
  auto const space = workspace(kernels.workspace(100));
  for (auto const& wrong : {std::vector<std::uint32_t>{3, 3}, {5, 4}, {100}, {0, 0xffffffffu}}) {
    One<std::uint32_t> const invalid;
    Array<std::uint32_t> const indices(wrong);
    kernels.clear(100, space.data(), nullptr);
    kernels.mark(indices.data(), wrong.size(), 100, space.data(), invalid.data(), nullptr);
    EXPECT_EQ(invalid.get(), 1u);
  }
}

TEST(CudaPacking, CodesThatNoQuantizerMakesAreSeen) {
  for (int const bits : {2, 4, 8}) {
    ValueCodecEntry const& codec =
        value_codec_for(value_codec_named(concat("qsgd", bits)), DType::f32);
    constexpr std::size_t size = 1029;
    std::vector<float> values(size, 1.5f);
    std::vector<std::byte> good(codec.encoded_bytes(size, 4));
    functions<float>(codec).encode(values, good);
    auto const is_invalid = [&](std::vector<std::byte> const& codes) {
      Array<std::byte> const device(codes);
      One<std::uint32_t> const invalid;
      library().values_f32.qsgd_check(device.data(), size, bits, 1024, invalid.data(), nullptr);
      bool const seen = invalid.get() == 1;
      std::vector<float> decoded(size);
      bool refused = false;
      try {
        functions<float>(codec).decode(codes, decoded);
      } catch (MalformedFrame const&) {
        refused = true;
      }
      EXPECT_EQ(seen, refused);
      return seen;
    };
    EXPECT_FALSE(is_invalid(good));
    std::mt19937_64 random(21);
    int seen = 0;
    for (int i = 0; i < 100; ++i) {
      auto codes = good;
      codes[random() % 2 == 0 ? random() % 4 : codes.size() - 1] = static_cast<std::byte>(random());
      seen += is_invalid(codes);
    }
    EXPECT_GT(seen, 2);
    EXPECT_LT(seen, 100);
  }
}

}  // namespace
}  // namespace sparsecomm::cuda
