#include "collectives/allgather_bytes.h"

#include <algorithm>

#include "named_sums.h"
#include "ranks.h"

namespace sparsecomm {
namespace {

std::vector<std::byte> string_of(int rank, std::size_t length) {
  std::vector<std::byte> bytes(length);
  for (std::size_t i = 0; i < length; ++i) bytes[i] = static_cast<std::byte>(31 * rank + i);
  return bytes;
}

class Gather final : public Operation {
 public:
  Gather(BytesAllgather& gather, std::vector<std::byte> own)
      : gather_(gather), own_(std::move(own)) {}

  Proposal prepare() override { return {"operation=gather"}; }
  void run(Channel& channel, Agreement const&) override {
    for (auto const string : gather_.run(channel, own_))
      strings.emplace_back(string.begin(), string.end());
  }

  std::vector<std::vector<std::byte>> strings;

 private:
  BytesAllgather& gather_;
  std::vector<std::byte> own_;
};

// [rank] of a group of five, or of as many as there are.
constexpr std::size_t lengths[][5] = {
    {0, 0, 0, 0, 0}, {1, 2, 3, 4, 5}, {0, 0, 7, 0, 0}, {9000, 0, 1, 9000, 17}, {8, 8, 8, 8, 8}};

class BytesAllgatherTest : public testing::TestWithParam<int> {};

TEST_P(BytesAllgatherTest, EveryRankGetsEveryString) {
  int const ranks = GetParam();
  test::expect_no_errors(test::run_ranks(ranks, [&](Communicator& communicator) {
    BytesAllgather gather;
    communicator.run(std::make_shared<test::Quiet>("gather"));  // so that ranks know it
    for (auto const& length : lengths) {
      int const rank = communicator.rank();
      Counters const before = communicator.counters();
      auto const operation = std::make_shared<Gather>(gather, string_of(rank, length[rank]));
      communicator.submit(operation).wait();
      ASSERT_EQ(operation->strings.size(), static_cast<std::size_t>(ranks));
      for (int peer = 0; peer < ranks; ++peer) {
        EXPECT_EQ(operation->strings[peer], string_of(peer, length[peer])) << "of rank " << peer;
      }
      Cost const bound = allgather_bytes_cost(ranks, *std::max_element(length, length + ranks));
      Cost const agreement = agreement_cost(ranks, 0);
      Counters const after = communicator.counters();
      EXPECT_EQ(Counters::total(after.sent_messages) - Counters::total(before.sent_messages),
                bound.messages + agreement.messages);
      EXPECT_LE(Counters::total(after.received_bytes) - Counters::total(before.received_bytes),
                bound.bytes + agreement.bytes);
    }
  }));
}

TEST_P(BytesAllgatherTest, TooLongAStringIsTheSameErrorEverywhere) {
  int const ranks = GetParam();
  test::expect_no_errors(test::run_ranks(ranks, [&](Communicator& communicator) {
    BytesAllgather gather(/*limit=*/16);
    int const rank = communicator.rank();
    auto const attempt = [&](std::size_t length) {
      communicator
          .submit(std::make_shared<Gather>(gather, string_of(rank, rank == ranks - 1 ? length : 1)))
          .wait();
    };
    attempt(16);
    try {
      attempt(17);
      ADD_FAILURE() << "17 bytes passed";
    } catch (Mismatch const& error) {
      EXPECT_EQ(std::string(error.what()),
                concat("rank ", ranks - 1,
                       " contributes 17 bytes, a message holds at most 16; send less at a time"));
    }
    attempt(16);
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, BytesAllgatherTest, testing::Values(1, 2, 3, 4, 5));

}  // namespace
}  // namespace sparsecomm
