#include "kernels/half.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "kernels/kernels.h"
#include "sparse/reduction.h"

namespace sparsecomm {
namespace {

constexpr std::size_t guard = 16;  // elements, also the most that an address is shifted by

template <class T>
class HalfKernels : public ::testing::Test {};
using Types = ::testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(HalfKernels, Types);

// The sizes around those of a few vectors, and one for all values.
std::vector<std::size_t> sizes(std::size_t all) {
  std::vector<std::size_t> sizes;
  for (std::size_t size = 0; size <= 70; ++size) sizes.push_back(size);
  sizes.push_back(all);
  return sizes;
}

// Bits, except that a NaN equals any other.
bool same(float a, float b) {
  return std::isnan(a) ? std::isnan(b)
                       : std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

// Elements at an address that is not aligned for them, which end with their memory.
template <class T>
std::vector<std::byte> unaligned(std::span<const T> elements) {
  std::vector<std::byte> bytes(elements.size_bytes() + 1);
  if (!elements.empty()) std::memcpy(bytes.data() + 1, elements.data(), elements.size_bytes());
  return bytes;
}

template <class T>
std::vector<T> all_elements() {
  std::vector<T> all(1u << 16);
  for (std::uint32_t bits = 0; bits < all.size(); ++bits) {
    all[bits].bits = static_cast<std::uint16_t>(bits);
  }
  return all;
}

// Calls the kernel with `before` in the sums and compares them with what f makes of both.
template <class T, class Kernel, class Function>
void check_sums(std::string_view target, Kernel kernel, std::span<const float> before,
                std::span<const T> elements, std::size_t offset, Function f) {
  constexpr float unwritten = -77.0f;
  auto const bytes = unaligned(elements);
  std::vector<float> storage(elements.size() + 2 * guard, unwritten);
  auto const sums = std::span(storage).subspan(offset, elements.size());
  std::ranges::copy(before, sums.begin());
  kernel(sums, bytes.data() + 1);
  for (std::size_t i = 0; i < elements.size(); ++i) {
    float const expected = f(before[i], float(elements[i]));
    ASSERT_TRUE(same(sums[i], expected))
        << target << ": " << before[i] << " and " << float(elements[i]) << " become " << sums[i]
        << ", not " << expected << ", at " << i << " of " << elements.size();
  }
  std::ranges::fill(sums, unwritten);
  ASSERT_EQ(std::ranges::count(storage, unwritten), std::ssize(storage)) << target;
}

TYPED_TEST(HalfKernels, TheTablesAreThoseOfTheOtherKernels) {
  EXPECT_TRUE(std::ranges::equal(half_kernel_tables<TypeParam>(), kernel_tables<float>(), {},
                                 &HalfKernelTable<TypeParam>::target, &KernelTable<float>::target));
  EXPECT_EQ(half_kernels<TypeParam>().target, kernels<float>().target);
}

TYPED_TEST(HalfKernels, WidenEveryElement) {
  auto const all = all_elements<TypeParam>();
  std::vector<float> const before(all.size());
  std::mt19937 random(1);
  for (auto const& table : half_kernel_tables<TypeParam>()) {
    for (std::size_t const size : sizes(all.size())) {
      std::size_t const first = random() % (all.size() - size + 1);
      check_sums<TypeParam>(table.target, table.widen, std::span(before).first(size),
                            std::span(all).subspan(first, size), random() % guard,
                            [](float, float element) { return element; });
      if (this->HasFailure()) return;
    }
  }
}

// Every element meets numbers of all exponents, zeros of both signs, infinities and NaN.
TYPED_TEST(HalfKernels, CombineAsTheReductionsDo) {
  using T = TypeParam;
  using Limits = std::numeric_limits<float>;
  std::uint64_t const seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(static_cast<unsigned>(seed));
  auto elements = all_elements<T>();
  std::ranges::shuffle(elements, random);
  std::vector<float> before(elements.size());
  float const special[] = {0.0f,
                           -0.0f,
                           Limits::infinity(),
                           -Limits::infinity(),
                           Limits::max(),
                           Limits::lowest(),
                           Limits::denorm_min(),
                           Limits::quiet_NaN()};
  for (std::size_t i = 0; i < before.size(); ++i) {
    before[i] = random() % 4 == 0   ? special[random() % std::size(special)]
                : random() % 4 == 0 ? float(elements[i])
                                    : std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  }
  for (auto const& table : half_kernel_tables<T>()) {
    for (std::size_t const size : sizes(elements.size())) {
      std::size_t const first = random() % (elements.size() - size + 1);
      auto const check = [&](auto kernel, auto f) {
        check_sums<T>(table.target, kernel, std::span(before).subspan(first, size),
                      std::span(elements).subspan(first, size), random() % guard, f);
      };
      check(table.sum, Combine<Reduction::sum, float>{});
      check(table.product, Combine<Reduction::product, float>{});
      check(table.min, Combine<Reduction::min, float>{});
      check(table.max, Combine<Reduction::max, float>{});
      if (this->HasFailure()) return;
    }
  }
}

template <class T>
void check_narrow(HalfKernelTable<T> const& table, std::span<const float> wide, bool in_place) {
  constexpr std::byte unwritten{0x5a};
  std::vector<std::byte> storage(wide.size_bytes() + 2 * guard, unwritten);
  std::vector<float> copy(wide.begin(), wide.end());
  std::byte* const elements =
      in_place ? reinterpret_cast<std::byte*>(copy.data()) : storage.data() + 1;
  table.narrow(elements, copy);
  for (std::size_t i = 0; i < wide.size(); ++i) {
    ASSERT_EQ(load_element<T>(elements, i).bits, T(wide[i]).bits)
        << table.target << ": " << wide[i] << ", bits " << std::bit_cast<std::uint32_t>(wide[i])
        << (in_place ? ", in place" : "");
  }
  if (in_place) return;
  std::fill_n(elements, wide.size() * sizeof(T), unwritten);
  ASSERT_EQ(std::ranges::count(storage, unwritten), std::ssize(storage)) << table.target;
}

// Each element, what lies half-way to the next one, and the floats on both sides of those; floats
// of all exponents; NaN of all payloads that have one bit.
TYPED_TEST(HalfKernels, NarrowToTheNearestElement) {
  using T = TypeParam;
  std::vector<float> values;
  auto const add = [&](std::uint32_t bits) {
    for (std::uint32_t const sign : {0u, 0x80000000u}) {
      values.push_back(std::bit_cast<float>((bits & 0x7fffffffu) | sign));
    }
  };
  auto const all = all_elements<T>();
  for (std::size_t i = 0; i < all.size() / 2 && std::isfinite(float(all[i])); ++i) {
    float const next = std::isfinite(float(all[i + 1])) ? float(all[i + 1]) : 2 * float(all[i]);
    float const middle = float(all[i]) / 2 + next / 2;
    for (float const value : {float(all[i]), middle}) {
      for (std::uint32_t const by : {~0u, 0u, 1u}) add(std::bit_cast<std::uint32_t>(value) + by);
    }
  }
  add(0x477ff000u);      // the least that f16 rounds to infinity
  add(0x477ff000u - 1);  // and the largest that it does not
  add(0x7f7f8000u);      // the same of bf16
  add(0x7f7f8000u - 1);
  for (unsigned bit = 0; bit < 23; ++bit) add(0x7f800000u | 1u << bit);
  std::uint64_t const seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200'000; ++i) add(static_cast<std::uint32_t>(random()));
  for (auto const& table : half_kernel_tables<T>()) {
    for (std::size_t const size : sizes(values.size())) {
      std::size_t const first = random() % (values.size() - size + 1);
      for (bool const in_place : {false, true}) {
        check_narrow<T>(table, std::span(values).subspan(first, size), in_place);
        if (this->HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace sparsecomm
