// Philox4x32-10: a random generator that is a function of key and counter, so that a number depends
// on what it is for and not on how many were drawn before. Source: Salmon, Moraes, Dror, Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

namespace sparsecomm {

inline constexpr int philox_rounds = 10;
inline constexpr std::uint32_t philox_left_factor = 0xd2511f53u;
inline constexpr std::uint32_t philox_right_factor = 0xcd9e8d57u;
inline constexpr std::uint32_t philox_left_step = 0x9e3779b9u;  // of the key, after each round
inline constexpr std::uint32_t philox_right_step = 0xbb67ae85u;

constexpr std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                  std::array<std::uint32_t, 2> key) {
  auto [a, b, c, d] = counter;
  auto [k, l] = key;
#pragma GCC unroll 10
  for (int round = 0; round < philox_rounds; ++round) {
    std::uint64_t const left = std::uint64_t{a} * philox_left_factor;
    std::uint64_t const right = std::uint64_t{c} * philox_right_factor;
    a = static_cast<std::uint32_t>(right >> 32) ^ b ^ k;
    b = static_cast<std::uint32_t>(right);
    c = static_cast<std::uint32_t>(left >> 32) ^ d ^ l;
    d = static_cast<std::uint32_t>(left);
    k += philox_left_step;
    l += philox_right_step;
  }
  return {a, b, c, d};
}

}  // namespace sparsecomm
