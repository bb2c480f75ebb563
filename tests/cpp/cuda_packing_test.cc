// The CUDA kernels on what is packed, and on blocks of bytes, against those of the processor; see
// cuda_logic_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "cuda/device_memory.h"
#include "fills.h"
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

template <class T>
class CudaScatter : public testing::Test {};
using Elements = testing::Types<float, double, Half, BFloat16>;
TYPED_TEST_SUITE(CudaScatter, Elements);

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

}  // namespace
}  // namespace sparsecomm::cuda
