// The loops of the index codecs, with vectors. Included once per instruction set.
#if defined(SPARSECOMM_WIRE_INDEX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_WIRE_INDEX_INL_H_
#undef SPARSECOMM_WIRE_INDEX_INL_H_
#else
#define SPARSECOMM_WIRE_INDEX_INL_H_
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/lanes.h"
#include "hwy/highway.h"
#include "wire/index_kernels.h"
#include "wire/low_parts.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using IndexTag = hn::CappedTag<std::uint32_t, 16>;

bool increasing(std::span<const std::uint32_t> indices) {
  IndexTag const d;
  std::size_t const lanes = hn::Lanes(d);
  std::uint32_t const* const p = indices.data();
  std::size_t i = 1;
  // Four vectors at a time, without leaving early within them.
  for (; i + 4 * lanes <= indices.size(); i += 4 * lanes) {
    auto const rises = [&](std::size_t at) HWY_ATTR {
      return hn::Lt(hn::LoadU(d, p + at - 1), hn::LoadU(d, p + at));
    };
    auto const first = hn::And(rises(i), rises(i + lanes));
    auto const second = hn::And(rises(i + 2 * lanes), rises(i + 3 * lanes));
    if (!hn::AllTrue(d, hn::And(first, second))) return false;
  }
  for (; i < indices.size(); ++i) {
    if (p[i - 1] >= p[i]) return false;
  }
  return true;
}

// The positions of the bits that are set among as many as a vector has lanes, at `bytes`.
HWY_INLINE hn::Vec<IndexTag> positions(std::uint8_t const* bytes, std::uint32_t bits) {
  IndexTag const d;
  if constexpr (hn::MaxLanes(IndexTag()) > table_lanes) {
    return hn::Compress(hn::Iota(d, 0), hn::LoadMaskBits(d, bytes));
  } else {
    return hn::LoadU(d, set_lanes_table[bits].data());
  }
}

Ones ones_of(std::span<const std::byte> in, std::uint32_t base, std::size_t enough,
             std::uint32_t* out) {
  IndexTag const d;
  auto const lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  std::uint32_t* to = out;
  std::size_t at = 0;
  while (static_cast<std::size_t>(to - out) < enough && at < in.size()) {
    std::uint64_t word = 0;
    if (at + sizeof(word) <= in.size()) [[likely]] {
      std::memcpy(&word, in.data() + at, sizeof(word));
    } else {
      std::memcpy(&word, in.data() + at, in.size() - at);
    }
    std::uint8_t bytes[2 * sizeof(word)];
    std::memcpy(bytes, &word, sizeof(word));
    auto const first = base + static_cast<std::uint32_t>(at * 8);
    for (std::uint32_t bit = 0; bit < 64; bit += lanes) {
      auto const bits = static_cast<std::uint32_t>(word >> bit & ((std::uint64_t{1} << lanes) - 1));
      // Of vectors shorter than a byte only the table is asked.
      auto const found = positions(bytes + bit / 8, bits);
      hn::StoreU(hn::Add(found, hn::Set(d, first + bit)), d, to);
      to += std::popcount(bits);
    }
    at += sizeof(word);
  }
  return {static_cast<std::size_t>(to - out), std::min(at, in.size())};
}

std::uint32_t gaps_of(std::uint32_t const* indices, std::uint32_t next, std::uint32_t* gap) {
  IndexTag const d;
  std::size_t const lanes = hn::Lanes(d);
  auto const one = hn::Set(d, 1);
  gap[0] = indices[0] - next;
  auto all = hn::Set(d, gap[0]);
  auto const step = [&](std::size_t i) HWY_ATTR {
    auto const before = hn::LoadU(d, indices + i - 1);
    auto const found = hn::Sub(hn::Sub(hn::LoadU(d, indices + i), before), one);
    hn::StoreU(found, d, gap + i);
    all = hn::Or(all, found);
  };
  for (std::size_t i = 1; i + lanes <= delta::block_size; i += lanes) step(i);
  step(delta::block_size - lanes);
  std::uint32_t word = 0;
  HWY_ALIGN std::uint32_t each[hn::MaxLanes(IndexTag())];
  hn::Store(all, d, each);
  for (std::size_t i = 0; i < lanes; ++i) word |= each[i];
  return word;
}

std::uint32_t high_bits_of(std::uint32_t const* gap, std::uint32_t parameter) {
  IndexTag const d;
  auto const most = hn::Set(d, delta::max_unary);
  auto sum = hn::Zero(d);
  for (std::size_t i = 0; i < delta::block_size; i += hn::Lanes(d)) {
    auto const high = hn::ShiftRightSame(hn::LoadU(d, gap + i), static_cast<int>(parameter));
    sum = hn::Add(sum, hn::Min(high, most));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// Eight low parts take as many bytes as one has bits: two vectors of four, each from where the
// first of it begins.
std::uint32_t join_of(std::byte const* lows, std::uint32_t parameter, std::uint32_t next,
                      std::uint32_t const* ones, std::uint32_t* indices) {
  hn::CappedTag<std::uint32_t, 4> const d;
  hn::Repartition<std::uint8_t, decltype(d)> const byte;
  LowPartLanes const& first = low_part_lanes[parameter][0];
  LowPartLanes const& second = low_part_lanes[parameter][1];
  auto const mask = hn::Set(d, (1u << parameter) - 1);
  auto const first_bytes = hn::LoadU(byte, first.bytes.data());
  auto const first_shifts = hn::LoadU(d, first.shifts.data());
  auto const second_bytes = hn::LoadU(byte, second.bytes.data());
  auto const second_shifts = hn::LoadU(d, second.shifts.data());
  auto const four = hn::Set(d, 4);
  auto const start = hn::Set(d, next);
  auto number = hn::Iota(d, 0);
  auto sum = hn::Zero(d);
  auto const* from = reinterpret_cast<std::uint8_t const*>(lows);
  auto const step = [&](std::uint8_t const* at, auto bytes, auto shifts, std::size_t i) HWY_ATTR {
    auto const words = hn::BitCast(d, hn::TableLookupBytes(hn::LoadU(byte, at), bytes));
    auto low = hn::And(hn::Shr(words, shifts), mask);
    low = hn::Add(low, hn::ShiftLeftLanes<1>(d, low));
    low = hn::Add(low, hn::ShiftLeftLanes<2>(d, low));
    auto const high =
        hn::ShiftLeftSame(hn::Sub(hn::LoadU(d, ones + i), number), static_cast<int>(parameter));
    sum = hn::Add(sum, low);
    hn::StoreU(hn::Add(hn::Add(sum, high), hn::Add(start, number)), d, indices + i);
    sum = hn::Broadcast<3>(sum);
    number = hn::Add(number, four);
  };
  for (std::size_t i = 0; i < delta::block_size; i += 8) {
    step(from, first_bytes, first_shifts, i);
    step(from + parameter / 2, second_bytes, second_shifts, i + 4);
    from += parameter;
  }
  return hn::GetLane(sum);
}

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();
#endif
