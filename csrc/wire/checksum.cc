#include "wire/checksum.h"

#include <bit>
#include <cstring>

namespace sparsecomm {
namespace {

constexpr std::uint64_t multiplier = 0x9e3779b97f4a7c15u;

// A bijection of the lane for a given word and of the word for a given lane. The rotation brings
// high bits, which a multiplication never moves down, under the next multiplication.
std::uint64_t mix(std::uint64_t lane, std::uint64_t word) {
  return std::rotl(lane ^ word, 29) * multiplier;
}

std::uint64_t load(std::byte const* in) {
  std::uint64_t word;
  std::memcpy(&word, in, sizeof(word));
  return word;
}

}  // namespace

void Checksum::add(std::span<const std::byte> part) {
  constexpr std::size_t stripe = sizeof(lanes_);
  std::byte const* in = part.data();
  std::size_t left = part.size();
  auto [a, b, c, d, e, f, g, h] = lanes_;
  for (; left >= stripe; left -= stripe, in += stripe) {
    a = mix(a, load(in));
    b = mix(b, load(in + 8));
    c = mix(c, load(in + 16));
    d = mix(d, load(in + 24));
    e = mix(e, load(in + 32));
    f = mix(f, load(in + 40));
    g = mix(g, load(in + 48));
    h = mix(h, load(in + 56));
  }
  lanes_ = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; left > 0; ++i) {
    std::size_t const length = left < 8 ? left : 8;
    std::uint64_t word = 0;
    std::memcpy(&word, in, length);
    lanes_[i] = mix(lanes_[i], word);
    in += length;
    left -= length;
  }
}

std::uint64_t Checksum::value() const {
  std::uint64_t sum = 0x243f6a8885a308d3u;
  for (std::uint64_t lane : lanes_) sum = mix(sum, lane);
  sum ^= sum >> 32;
  sum *= multiplier;
  return sum ^ (sum >> 29);
}

}  // namespace sparsecomm
