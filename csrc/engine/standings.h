// How all ranks stand to each of many numbered operations, found by one small allreduce: two bits
// for each, and flags.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "collectives/figures.h"
#include "collectives/frame_allgather.h"

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
  has_some,     // an operation is pending
  has_unnamed,  // one without a name
  completes,    // what is pending is all that is left of its batches
  closed,       // nothing else will be submitted before that has ended
};

// Holds if it does on any rank.
enum class AnyFlag : std::uint8_t {
  has_unnamed = 4,  // an operation without a name is pending
  has_new,          // a name that has no number
  requests,         // see Comparison::request()
  late,             // an operation has been pending for too long
  has_first,        // something is to run before all else
  joins,            // a rank has joined, see Join
};
inline constexpr int flags = 10;

class Standings {
 public:
  // Of a message about so many operations, without its header.
  static std::size_t bytes(std::size_t count) { return sizeof(Word) * words(count); }

  // Of this rank: of `count` operations none is pending, and no flag holds.
  void reset(std::size_t count) {
    count_ = count;
    words_.assign(words(count), {.high = 0, .low = ~Bits{0}});
    words_[0].high = ~all_flags;
    words_[1].high = 0;
  }
  void set(std::size_t operation, Standing standing) {
    Word& word = words_[first_word + operation / bits];
    Bits const bit = Bits{1} << operation % bits;
    auto const both = static_cast<unsigned>(standing);
    word.high = (both & 0b10) != 0 ? word.high | bit : word.high & ~bit;
    word.low = (both & 0b01) != 0 ? word.low | bit : word.low & ~bit;
  }
  Standing of(std::size_t operation) const {
    Word const& word = words_[first_word + operation / bits];
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
  std::size_t count() const { return count_; }
  // Digests of 24 and 8 bits, of what may differ between ranks.
  void set_batches(std::uint64_t digest) {
    words_[1].high = (words_[1].high & ~batch_bits) | static_cast<Bits>(digest) << 8;
  }
  void set_steps(std::uint64_t steps) {
    words_[1].high = (words_[1].high & batch_bits) | (static_cast<Bits>(steps) & ~batch_bits);
  }
  bool batches_agree() const { return (~words_[1].low & batch_bits) == 0; }
  bool steps_agree() const { return (~words_[1].low & ~batch_bits) == 0; }

  // Calls f(operation) for each that is mixed.
  template <class F>
  void for_each_mixed(F&& f) const {
    for (std::size_t i = first_word; i < words_.size(); ++i) {
      for (Bits mixed = ~words_[i].high & ~words_[i].low; mixed != 0; mixed &= mixed - 1) {
        f((i - first_word) * bits + static_cast<std::size_t>(std::countr_zero(mixed)));
      }
    }
  }

  // Replaces this rank's by those of all ranks together. ceil(log2 P) messages of
  // 8 (2 + count / 32) bytes, rounded up, and a header.
  void allreduce(Channel& channel) {
    census_.run(channel, Phase::agree, std::span(words_), meet,
                [this](std::span<const Word> arrived, int) { check(arrived); });
  }
  // The same, and an allgather of a few bytes of each rank, at most `longest`: they are received in
  // arrived[rank] and stay until the next one. ceil(log2 P) messages, of all that the sender has.
  void allreduce_with(Channel& channel, std::span<const std::byte> rider, std::size_t longest,
                      std::vector<std::span<const std::byte>>& arrived) {
    auto const own = std::as_bytes(std::span(words_));
    message_.assign(own.begin(), own.end());
    message_.insert(message_.end(), rider.begin(), rider.end());
    auto const frame = frame_.take(header_bytes + message_.size());
    encode_bytes(channel.stamp(), message_, frame);
    auto const frames =
        gather_.run(channel, Phase::agree, frame, header_bytes + own.size() + longest);
    arrived.clear();
    for (int rank = 0; rank < channel.size(); ++rank) {
      channel.decode_from(rank, [&] {
        auto const message = frames[static_cast<std::size_t>(rank)].values;
        require<MalformedFrame>(message.size() >= own.size(), "standings of ", message.size(),
                                " bytes, must be at least ", own.size());
        others_.resize(words_.size());
        std::memcpy(others_.data(), message.data(), own.size());
        check(others_);
        std::ranges::transform(words_, others_, words_.begin(), meet);
        arrived.push_back(message.subspan(own.size()));
      });
    }
  }

 private:
  using Bits = std::uint32_t;
  static constexpr std::size_t bits = 32;
  static std::size_t words(std::size_t count) { return first_word + (count + bits - 1) / bits; }
  // As many operations; the first has flags, the second digests.
  struct Word {
    Bits high, low;
  };
  static constexpr std::size_t first_word = 2;  // of operations
  static constexpr Bits batch_bits = ~Bits{0xff};
  static constexpr Bits all_flags = 0b1111;
  static constexpr Bits unused_flags = ~Bits{0} << flags;
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
  std::vector<Word> words_ = std::vector<Word>(first_word);
  CensusAllreduce<Word> census_;
  std::vector<std::byte> message_;
  ByteBuffer frame_;
  FrameAllgather gather_;
  std::vector<Word> others_;
};

}  // namespace sparsecomm
