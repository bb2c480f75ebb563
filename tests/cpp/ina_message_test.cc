// Every field of a message is checked, and nothing that arrives does more than raise
// MalformedFrame.
#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "ina/message.h"
#include "ina_run.h"
#include "wire/checksum.h"

namespace sparsecomm::test {
namespace {

InaPlan const plan{.elements = 100, .block_bytes = 64, .workers = 3, .window = 2};  // 7 blocks

BlockList list(std::vector<std::uint32_t> const& numbers) {
  BlockList made;
  for (std::uint32_t const number : numbers) made.push_back(number);
  return made;
}

// Block 1 of the round's 2 and 3, and votes for 4 and 6.
Bytes contribution(std::uint32_t round) {
  Bytes head(most_head_bytes(plan.window));
  Bytes const block(64, std::byte{7});
  return assemble(encode_contribution({.operation = 9, .round = round, .worker = 1, .bitmap = 0b10},
                                      plan, list({4, 6}), block, {}, head));
}
Bytes update(std::uint32_t round) {
  Bytes head(most_head_bytes(plan.window));
  Bytes const blocks(128, std::byte{7});
  return assemble(
      encode_update({.operation = 9, .round = round, .bitmap = 0b11}, list({4, 6}), blocks, head));
}
Bytes refusal() {
  return encode_refusal(9, {.reason = RefusalReason::late, .accused = {0, 2}, .text = "late"});
}

void repair(Bytes& message) {
  InaHeader header;
  std::memcpy(&header, message.data(), sizeof(header));
  std::size_t blocks = 0;
  if (header.kind != InaKind::refusal) blocks = 64 * std::size_t(std::popcount(header.bitmap));
  if (message.size() < sizeof(header) + blocks) return;
  header.checksum = 0;
  Checksum checksum;
  checksum.add(std::as_bytes(std::span(&header, 1)));
  checksum.add(
      std::span(message).subspan(sizeof(header), message.size() - sizeof(header) - blocks));
  checksum.add(std::span(message).last(blocks));
  header.checksum = checksum.value();
  std::memcpy(message.data(), &header, sizeof(header));
}

struct Kind {
  char const* name;
  Bytes message;
  std::function<void(std::span<const std::byte>)> parse;
};

std::vector<Kind> kinds() {
  static BlockList const first = plan.first_blocks();
  static BlockList const later = list({2, 3});
  auto const expected = [](std::uint32_t round) {
    return InaExpected{.operation = 9, .round = round, .blocks = round == 0 ? &first : &later};
  };
  return {
      {"opening", contribution(0), [](auto in) { parse_opening(in); }},
      {"contribution 0", contribution(0),
       [=](auto in) { parse_contribution(in, plan, 1, expected(0)); }},
      {"contribution 5", contribution(5),
       [=](auto in) { parse_contribution(in, plan, 1, expected(5)); }},
      {"update 0", update(0), [=](auto in) { parse_update(in, plan, expected(0)); }},
      {"update 5", update(5), [=](auto in) { parse_update(in, plan, expected(5)); }},
      {"refusal", refusal(), [](auto in) { parse_refusal(in, 9, 3); }},
  };
}

std::string refused(Kind const& kind, Bytes const& message) {
  try {
    kind.parse(message);
  } catch (MalformedFrame const& error) {
    return error.what();
  } catch (std::exception const& error) {
    ADD_FAILURE() << kind.name << ": another exception: " << error.what();
  }
  return {};
}

TEST(InaMessageTest, WhatIsWrittenIsReadBack) {
  BlockList const round = list({2, 3});
  Bytes const sent = contribution(5);
  auto const got = parse_contribution(sent, plan, 1, {9, 5, &round});
  EXPECT_EQ(got.header.bitmap, 0b10u);
  EXPECT_EQ(got.votes, list({4, 6}));
  EXPECT_EQ(Bytes(got.blocks.begin(), got.blocks.end()), Bytes(64, std::byte{7}));
  EXPECT_EQ(got.plan, plan);
  InaPlan other = plan;
  other.elements = 7;
  Bytes const first = contribution(0);
  EXPECT_EQ(parse_contribution(first, other, 1, {9, 0, &round}).plan, plan);
  EXPECT_EQ(parse_opening(first), plan);
  Bytes const reduced = update(5);
  auto const back = parse_update(reduced, plan, {9, 5, &round});
  EXPECT_EQ(back.next, list({4, 6}));
  EXPECT_EQ(back.blocks.size(), 128u);
  Refusal const why = parse_refusal(refusal(), 9, 3);
  EXPECT_EQ(why.reason, RefusalReason::late);
  EXPECT_EQ(why.accused, (std::vector{0, 2}));
  EXPECT_EQ(why.text, "late");
}

TEST(InaMessageTest, TheLongestIs16512BytesWithTheUsualPlan) {
  EXPECT_EQ(most_message_bytes({.elements = 0, .workers = 4}), 16512u);
}

TEST(InaMessageTest, EveryBitIsCovered) {
  for (Kind const& kind : kinds()) {
    EXPECT_EQ(refused(kind, kind.message), "") << kind.name;
    for (std::size_t bit = 0; bit < 8 * kind.message.size(); ++bit) {
      Bytes message = kind.message;
      message[bit / 8] ^= std::byte(1u << bit % 8);
      EXPECT_NE(refused(kind, message), "") << kind.name << ", bit " << bit;
    }
  }
}

TEST(InaMessageTest, EveryLengthButItsOwnIsRefused) {
  for (Kind const& kind : kinds()) {
    for (std::size_t size = 0; size < kind.message.size(); ++size) {
      Bytes message(kind.message.begin(), kind.message.begin() + std::ptrdiff_t(size));
      EXPECT_NE(refused(kind, message), "") << kind.name << ", " << size << " bytes";
    }
    Bytes message = kind.message;
    message.push_back(std::byte{0});
    EXPECT_NE(refused(kind, message).find("length"), std::string::npos) << kind.name;
  }
}

// With a checksum that is right.
TEST(InaMessageTest, EveryFieldIsCheckedAndNamed) {
  struct Change {
    char const* field;
    std::size_t place, bytes;
    std::uint64_t value;
  };
  constexpr std::size_t plan_at = sizeof(InaHeader);
  Change const header[] = {
      {"magic", offsetof(InaHeader, magic), 2, 1},
      {"version", offsetof(InaHeader, version), 1, 2},
      {"kind", offsetof(InaHeader, kind), 1, 0},
      {"kind", offsetof(InaHeader, kind), 1, 4},
      {"reserved", offsetof(InaHeader, reserved), 1, 1},
      {"numbers", offsetof(InaHeader, numbers), 1, 3},
      {"length", offsetof(InaHeader, numbers), 1, 1},
      {"bitmap", offsetof(InaHeader, bitmap), 8, 0b111},
      {"length", offsetof(InaHeader, bitmap), 8, 0b0},
  };
  Change const stamped[] = {
      {"operation", offsetof(InaHeader, operation), 4, 8},
      {"round", offsetof(InaHeader, round), 4, 4},
      {"worker", offsetof(InaHeader, worker), 2, 2},
  };
  Change const opening[] = {
      {"round", offsetof(InaHeader, round), 4, 1},
      {"worker", offsetof(InaHeader, worker), 2, 3},
      {"elements", plan_at + offsetof(InaPlanRecord, elements), 8, ~0ull},
      {"block_bytes", plan_at + offsetof(InaPlanRecord, block_bytes), 4, 65},
      {"workers", plan_at + offsetof(InaPlanRecord, workers), 2, 0},
      {"window", plan_at + offsetof(InaPlanRecord, window), 1, 0},
      {"type", plan_at + offsetof(InaPlanRecord, type), 1, 9},
      {"reduction", plan_at + offsetof(InaPlanRecord, reduction), 1, 4},
      {"order", plan_at + offsetof(InaPlanRecord, order), 1, 2},
      {"plan's reserved", plan_at + offsetof(InaPlanRecord, reserved), 1, 1},
      {"plan's reserved", plan_at + offsetof(InaPlanRecord, reserved) + 5, 1, 1},
  };
  Change const numbers[] = {
      {"block number", sizeof(InaHeader), 4, 3},      // reduced already
      {"block number", sizeof(InaHeader), 4, 6},      // then the next does not increase
      {"block number", sizeof(InaHeader) + 4, 4, 7},  // there is none
  };
  Change const refusals[] = {
      {"operation", offsetof(InaHeader, operation), 4, 8},
      {"round", offsetof(InaHeader, round), 4, 1},
      {"worker", offsetof(InaHeader, worker), 2, 1},
      {"numbers", offsetof(InaHeader, numbers), 1, 1},
      {"reserved", offsetof(InaHeader, reserved), 1, 1},
      {"bitmap", offsetof(InaHeader, bitmap), 8, 1},
      {"reason", sizeof(InaHeader), 4, 0},
      {"reason", sizeof(InaHeader), 4, 6},
      {"accused", sizeof(InaHeader) + 4, 4, 4},
      {"accused", sizeof(InaHeader) + 4, 4, 0},
      {"length behind the header", sizeof(InaHeader) + 4, 4, 1},
      {"text_bytes", sizeof(InaHeader) + 8, 4, most_refusal_text + 1},
      {"length behind the header", sizeof(InaHeader) + 8, 4, 3},
      {"refusal's reserved", sizeof(InaHeader) + 12, 4, 1},
      {"accused worker", sizeof(InaHeader) + 16, 4, 2},
      {"accused worker", sizeof(InaHeader) + 20, 4, 3},
  };
  auto const all = kinds();
  auto const check = [&](std::size_t index, std::span<const Change> changes) {
    Kind const& kind = all[index];
    for (Change const& change : changes) {
      Bytes message = kind.message;
      std::memcpy(message.data() + change.place, &change.value, change.bytes);
      repair(message);
      std::string const text = refused(kind, message);
      EXPECT_NE(text.find(concat(change.field, " is ")), std::string::npos)
          << kind.name << ", " << change.field << ": " << text;
    }
  };
  for (std::size_t const index : {0, 1, 2, 3, 4}) check(index, header);
  for (std::size_t const index : {2, 4}) check(index, stamped);
  check(0, opening);
  check(1, std::span(opening).subspan(2));
  for (std::size_t const index : {2, 4}) check(index, numbers);
  check(5, refusals);
  // The bits of a later round's update must all be there.
  Bytes message = all[4].message;
  message[offsetof(InaHeader, bitmap)] = std::byte{1};
  message.erase(message.end() - 64, message.end());
  repair(message);
  EXPECT_NE(refused(all[4], message).find("bitmap is 1"), std::string::npos);
}

// As a fuzzer would, with the checksum repaired.
TEST(InaMessageTest, RandomDamageRaisesMalformedFrameOrNothing) {
  std::mt19937 random(5);
  int accepted = 0;
  for (Kind const& kind : kinds()) {
    for (int i = 0; i < 20000; ++i) {
      Bytes message = kind.message;
      for (unsigned count = 1 + random() % 3; count > 0; --count) {
        message[random() % (random() % 2 == 0 ? 32 : message.size())] = std::byte(random() % 256);
      }
      if (random() % 4 == 0) message.resize(random() % (message.size() + 8));
      if (message.size() >= sizeof(InaHeader)) repair(message);
      accepted += refused(kind, message).empty() ? 1 : 0;
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_LT(accepted, 100000);
}

}  // namespace
}  // namespace sparsecomm::test
