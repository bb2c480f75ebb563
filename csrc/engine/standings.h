// How all ranks stand to each of many numbered operations, found by one small allreduce: two bits
// for each, and flags.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "collectives/figures.h"

namespace sparsecomm {

// As its two bits, high and low.
enum class Standing : std::uint8_t {
  mixed = 0b00,    // pending on some ranks only
  absent = 0b01,   // pending on none
  changed = 0b10,  // pending on all, of which some have more to say than that
  ready = 0b11,    // pending on all, as last agreed
};

// Holds if it does on all ranks.
enum class AllFlag : std::uint8_t {
  has_unnamed,  // an operation without a name is pending
  completes,    // what is pending is all that is left of its batches
};

// Holds if it does on any rank.
enum class AnyFlag : std::uint8_t {
  has_new = 2,  // a name is pending that has no number
  requests,     // see Comparison::request()
  late,         // an operation has been pending for too long
  has_first,    // something is to run before all else
};
inline constexpr int flags = 6;

class Standings {
 public:
  // Of this rank: of `count` operations none is pending, and no flag holds.
  void reset(std::size_t count) {
    count_ = count;
    words_.assign(1 + (count + bits - 1) / bits, {.high = 0, .low = ~Bits{0}});
    words_[0].high = ~digest_mask & ~all_flags;
  }
  void set(std::size_t operation, Standing standing) {
    Word& word = words_[1 + operation / bits];
    Bits const bit = Bits{1} << operation % bits;
    auto const both = static_cast<unsigned>(standing);
    word.high = (both & 0b10) != 0 ? word.high | bit : word.high & ~bit;
    word.low = (both & 0b01) != 0 ? word.low | bit : word.low & ~bit;
  }
  Standing of(std::size_t operation) const {
    Word const& word = words_[1 + operation / bits];
    auto const bit = [&](Bits of_all) { return (of_all >> operation % bits) & 1; };
    return static_cast<Standing>(2 * bit(word.high) + bit(word.low));
  }
  void set(AllFlag flag, bool holds) {
    words_[0].high = holds ? words_[0].high | bit_of(flag) : words_[0].high & ~bit_of(flag);
  }
  bool holds(AllFlag flag) const { return (words_[0].high & bit_of(flag)) != 0; }
  void set(AnyFlag flag, bool holds) {
    words_[0].high = holds ? words_[0].high & ~bit_of(flag) : words_[0].high | bit_of(flag);
  }
  bool holds(AnyFlag flag) const { return (words_[0].high & bit_of(flag)) == 0; }
  // What all ranks must have the same of: 24 bits of it.
  void set_digest(std::uint64_t digest) {
    words_[0].high = (words_[0].high & ~digest_mask) | static_cast<Bits>(digest) << 8;
  }
  bool digests_agree() const { return (~words_[0].low & digest_mask) == 0; }

  // Calls f(operation) for each that is mixed.
  template <class F>
  void for_each_mixed(F&& f) const {
    for (std::size_t i = 1; i < words_.size(); ++i) {
      for (Bits mixed = ~words_[i].high & ~words_[i].low; mixed != 0; mixed &= mixed - 1) {
        f((i - 1) * bits + static_cast<std::size_t>(std::countr_zero(mixed)));
      }
    }
  }

  // Replaces this rank's by those of all ranks together. ceil(log2 P) messages of
  // 8 (1 + count / 32) bytes, rounded up, and a header.
  void allreduce(Channel& channel) {
    census_.run(channel, Phase::agree, std::span(words_), meet,
                [this](std::span<const Word> arrived, int) { check(arrived); });
  }

 private:
  using Bits = std::uint32_t;
  static constexpr std::size_t bits = 32;
  // As many operations; the first has flags and a digest.
  struct Word {
    Bits high, low;
  };
  static constexpr Bits digest_mask = ~Bits{0xff};
  static constexpr Bits all_flags = 0b11;
  static constexpr Bits unused_flags = ~digest_mask & ~Bits{0} << flags;
  // All bits are combined by AND, so that those of AnyFlag are set if it does not hold.
  template <class Flag>
  static constexpr Bits bit_of(Flag flag) {
    return Bits{1} << static_cast<unsigned>(flag);
  }

  // Ready and changed make changed, what is the same stays, and all else is mixed. Where bits of a
  // digest differ the low one becomes 0.
  static Word meet(Word const& a, Word const& b) {
    return {.high = a.high & b.high, .low = a.low & b.low & ~(a.high ^ b.high)};
  }
  void check(std::span<const Word> arrived) const {
    require<MalformedFrame>((arrived[0].high & unused_flags) == unused_flags, "flags of ",
                            arrived[0].high);
    if (count_ % bits == 0) return;
    Word const& last = arrived.back();
    Bits const unused = ~Bits{0} << count_ % bits;
    require<MalformedFrame>((last.high & unused) == 0 && (last.low & unused) == unused,
                            "operations are pending of which there are but ", count_);
  }

  std::size_t count_ = 0;
  std::vector<Word> words_ = std::vector<Word>(1);
  CensusAllreduce<Word> census_;
};

}  // namespace sparsecomm
