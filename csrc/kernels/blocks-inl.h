// The kernels over blocks, with vectors. Included once per instruction set.
#if defined(SPARSECOMM_KERNELS_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_KERNELS_BLOCKS_INL_H_
#undef SPARSECOMM_KERNELS_BLOCKS_INL_H_
#else
#define SPARSECOMM_KERNELS_BLOCKS_INL_H_
#endif

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/blocks.h"
#include "kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

using BlockTag = hn::ScalableTag<std::uint32_t>;

HWY_INLINE hn::Vec<BlockTag> load_words(std::byte const* p) {
  BlockTag const d;
  return hn::BitCast(d, hn::LoadU(hn::RepartitionToNarrow<hn::RepartitionToNarrow<BlockTag>>(),
                                  reinterpret_cast<std::uint8_t const*>(p)));
}

HWY_INLINE void store_words(hn::Vec<BlockTag> words, std::byte* p) {
  hn::StoreU(hn::BitCast(hn::RepartitionToNarrow<hn::RepartitionToNarrow<BlockTag>>(), words),
             hn::RepartitionToNarrow<hn::RepartitionToNarrow<BlockTag>>(),
             reinterpret_cast<std::uint8_t*>(p));
}

HWY_INLINE bool holds_bits(hn::Vec<BlockTag> words) {
  BlockTag const d;
  return !hn::AllTrue(d, hn::Eq(words, hn::Zero(d)));
}

// One bit a block, of a block that is no shorter than a vector. Ends with the first four vectors
// that have a bit: what is behind them is copied, or need not be read.
template <bool FetchAhead>
HWY_INLINE bool holds_bits(std::byte const* p, std::size_t block_bytes) {
  BlockTag const d;
  std::size_t const step = hn::Lanes(d) * 4;
  std::size_t i = 0;
  for (; i + 4 * step <= block_bytes; i += 4 * step) {
    if constexpr (FetchAhead) prefetch_bytes(p + i, 4 * step);
    auto const first = hn::Or(load_words(p + i), load_words(p + i + step));
    auto const second = hn::Or(load_words(p + i + 2 * step), load_words(p + i + 3 * step));
    if (holds_bits(hn::Or(first, second))) return true;
  }
  auto any = hn::Zero(d);
  for (; i + step <= block_bytes; i += step) {
    if constexpr (FetchAhead) prefetch_bytes(p + i, step);
    any = hn::Or(any, load_words(p + i));
  }
  if (i < block_bytes) any = hn::Or(any, load_words(p + block_bytes - step));
  return holds_bits(any);
}

// Copies a block that is no shorter than a vector, in less time than memcpy takes.
HWY_INLINE void copy_block(std::byte const* p, std::size_t block_bytes, std::byte* to) {
  std::size_t const step = hn::Lanes(BlockTag()) * 4;
  std::size_t i = 0;
  for (; i + 4 * step <= block_bytes; i += 4 * step) {
    auto const first = load_words(p + i);
    auto const second = load_words(p + i + step);
    auto const third = load_words(p + i + 2 * step);
    auto const fourth = load_words(p + i + 3 * step);
    store_words(first, to + i);
    store_words(second, to + i + step);
    store_words(third, to + i + 2 * step);
    store_words(fourth, to + i + 3 * step);
  }
  for (; i + step <= block_bytes; i += step) store_words(load_words(p + i), to + i);
  if (i < block_bytes) {
    store_words(load_words(p + block_bytes - step), to + block_bytes - step);
  }
}

// Bit i: whether word i of the 64 words at p has a bit that is set.
HWY_INLINE std::uint64_t nonzero_words(std::byte const* p) {
  BlockTag const d;
  std::size_t const lanes = hn::Lanes(d);
  prefetch_bytes(p, 256);
  std::uint64_t bits = 0;
  for (std::size_t word = 0; word < 64; word += lanes) {
    bits |= mask_bits(d, hn::Ne(load_words(p + 4 * word), hn::Zero(d))) << word;
  }
  return bits;
}

// `ones` bits set at the start of each `period`.
constexpr std::uint64_t pattern(unsigned ones, unsigned period) {
  std::uint64_t bits = 0;
  for (unsigned at = 0; at < 64; at += period) bits |= ((std::uint64_t{1} << ones) - 1) << at;
  return bits;
}

// Moves the `Ones` bits at the start of each `Period` to the low end.
template <unsigned Ones, unsigned Period>
HWY_INLINE std::uint64_t gather_bits(std::uint64_t bits) {
  bits &= pattern(Ones, Period);
  if constexpr (Period < 64) {
    return gather_bits<2 * Ones, 2 * Period>(bits | bits >> (Period - Ones));
  } else {
    return bits;
  }
}

// Of each `Width` neighbouring bits whether one is set, in the lowest 64 / Width bits.
template <unsigned Width>
HWY_INLINE std::uint64_t or_neighbours(std::uint64_t bits) {
  if constexpr (Width == 1) {
    return bits;
  } else {
    for (unsigned by = 1; by < Width; by *= 2) bits |= bits >> by;
    return gather_bits<1, Width>(bits);
  }
}

// The bits of 64 blocks of `Words` words.
template <unsigned Words>
HWY_INLINE std::uint64_t small_blocks_of(std::byte const* p) {
  std::uint64_t blocks = 0;
  for (std::size_t block = 0; block < 64; block += 64 / Words) {
    blocks |= or_neighbours<Words>(nonzero_words(p + 4 * Words * block)) << block;
  }
  return blocks;
}

// The same for any number of words, fewer than a vector holds.
HWY_INLINE std::uint64_t small_blocks(std::byte const* p, std::size_t words) {
  switch (words) {
    case 1:
      return small_blocks_of<1>(p);
    case 2:
      return small_blocks_of<2>(p);
    case 4:
      return small_blocks_of<4>(p);
    case 8:
      return small_blocks_of<8>(p);
    default:
      break;
  }
  std::uint64_t blocks = 0;
  constexpr std::size_t most_words = hn::MaxLanes(BlockTag());
  std::array<std::uint64_t, most_words + 1> nonzero;
  for (std::size_t i = 0; i < words; ++i) nonzero[i] = nonzero_words(p + 256 * i);
  nonzero[words] = 0;
  std::uint64_t const all = (std::uint64_t{1} << words) - 1;
  for (std::size_t block = 0; block < 64; ++block) {
    std::size_t const at = block * words;
    std::uint64_t const window = nonzero[at / 64] >> (at % 64) | nonzero[at / 64 + 1]
                                                                     << 1 << (63 - at % 64);
    blocks |= std::uint64_t{(window & all) != 0} << block;
  }
  return blocks;
}

std::size_t nonzero_blocks(std::span<const std::byte> bytes, std::size_t block_bytes,
                           std::span<std::uint64_t> bitmap) {
  require_blocks(bytes.size(), block_bytes, bitmap.size());
  std::size_t const vector_bytes = hn::Lanes(BlockTag()) * 4;
  std::size_t const sets = bytes.size() / block_bytes / 64;
  std::size_t found = 0;
  for (std::size_t set = 0; set < sets; ++set) {
    std::byte const* p = bytes.data() + set * 64 * block_bytes;
    std::uint64_t word = 0;
    if (block_bytes < vector_bytes) {
      word = small_blocks(p, block_bytes / 4);
    } else {
      for (std::size_t block = 0; block < 64; ++block) {
        word |= std::uint64_t{holds_bits<true>(p + block * block_bytes, block_bytes)} << block;
      }
    }
    bitmap[set] = word;
    found += static_cast<std::size_t>(std::popcount(word));
  }
  return found + nonzero_block_range(bytes, block_bytes, sets * 64, bitmap);
}

// Does not fetch ahead: where that was measured, it took a quarter longer.
BlockWalk copy_nonzero_blocks(std::span<const std::byte> bytes, std::size_t block_bytes,
                              std::uint64_t first, std::span<std::byte> slots,
                              std::span<std::uint32_t> numbers) {
  require_walk(bytes.size(), block_bytes, first, slots.size(), numbers.size());
  std::size_t const vector_bytes = hn::Lanes(BlockTag()) * 4;
  std::size_t const whole = block_bytes < vector_bytes ? 0 : bytes.size() / block_bytes;
  BlockWalk walk{.next = first};
  for (; walk.next < whole && walk.found < numbers.size(); ++walk.next) {
    std::byte const* p = bytes.data() + walk.next * block_bytes;
    if (!holds_bits<false>(p, block_bytes)) continue;
    copy_block(p, block_bytes, slots.data() + walk.found * block_bytes);
    numbers[walk.found++] = static_cast<std::uint32_t>(walk.next);
  }
  return copy_nonzero_range(bytes, block_bytes, walk, slots, numbers);
}

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();
#endif
