// What one operation sees of a transport: frames of its own run, and an allgather of them.
#include "collectives/channel.h"

#include <gtest/gtest.h>

#include <numeric>

#include "collectives/frame_allgather.h"
#include "ranks.h"
#include "transport/wrapped.h"

namespace sparsecomm::test {
namespace {

std::vector<std::byte> payload_of(int rank) {
  return std::vector<std::byte>(static_cast<std::size_t>(40 * rank % 130), std::byte(rank));
}

std::size_t frame_for(std::vector<std::byte> const& payload, Channel const& channel,
                      std::vector<std::byte>& frame) {
  frame.resize(header_bytes + payload.size());
  return encode_bytes(channel.stamp(), payload, frame);
}

class FrameAllgatherTest : public testing::TestWithParam<int> {};

// Room for the worst frames would not be had: as much as there are addresses.
TEST_P(FrameAllgatherTest, MakesRoomForWhatComes) {
  int const size = GetParam();
  auto transports = make_inproc_transports(size);
  expect_no_errors(on_threads(size, [&](int rank) {
    for (std::size_t const worst : {std::size_t{1000}, std::size_t{1} << 56}) {
      Channel channel(*transports[rank], 7, Deadline(steady_clock(), long_time()));
      FrameAllgather gather(/*lengths_first_above=*/4000);
      std::vector<std::byte> frame;
      frame_for(payload_of(rank), channel, frame);
      std::uint64_t const before = Counters::total(transports[rank]->counters().sent_messages);
      auto const frames = gather.run(channel, Phase::gather, frame, worst);
      std::uint64_t const messages =
          Counters::total(transports[rank]->counters().sent_messages) - before;
      int const rounds = std::bit_width(static_cast<unsigned>(size - 1));
      bool const lengths_first = (size - 1) * static_cast<double>(worst) > 4000;
      EXPECT_EQ(messages, lengths_first ? 2 * rounds : rounds);
      for (int other = 0; other < size; ++other) {
        EXPECT_EQ(std::vector(frames[other].values.begin(), frames[other].values.end()),
                  payload_of(other));
      }
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, FrameAllgatherTest, testing::Values(1, 2, 3, 4, 5, 6));

// As if what it sends came from a communicator of the same ranks in another job.
class OfAnotherRun final : public WrappedTransport {
 public:
  using WrappedTransport::WrappedTransport;
  std::uint32_t run() override { return 1234; }
};

TEST(ChannelTest, AFrameOfAnotherRunIsRefusedAndNamed) {
  auto transports = make_inproc_transports(2);
  transports[1] = std::make_unique<OfAnotherRun>(std::move(transports[1]));
  auto const errors = on_threads(2, [&](int rank) {
    Channel channel(*transports[rank], 7, Deadline(steady_clock(), long_time()));
    FrameAllgather gather;
    std::vector<std::byte> frame;
    frame_for(payload_of(1), channel, frame);
    gather.run(channel, Phase::gather, frame, 1000);
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THROW(std::rethrow_exception(errors[rank]), PeerInvalid);
    std::string const text = message_of(errors[rank]);
    EXPECT_NE(text.find(concat("rank ", 1 - rank, " sent")), std::string::npos) << text;
    EXPECT_NE(text.find(rank == 0 ? "another run or communicator, 1234 instead of 0"
                                  : "another run or communicator, 0 instead of 1234"),
              std::string::npos)
        << text;
  }
}

// A damaged frame is not taken for one of another run, nor is one of another operation.
TEST(ChannelTest, OtherDefectsAreNamedAsBefore) {
  auto transports = make_inproc_transports(1);
  Channel const channel(*transports[0], 7, Deadline(steady_clock(), long_time()));
  std::vector<std::byte> frame;
  frame_for(payload_of(2), channel, frame);
  auto const refusal = [&](FrameStamp stamp) -> std::string {
    try {
      parse_frame(frame, stamp);
    } catch (MalformedFrame const& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal(7), "accepted");
  EXPECT_NE(refusal(8).find("operation is 7, must be 8"), std::string::npos);
  EXPECT_NE(refusal({8, 99}).find("another run"), std::string::npos);
  frame.back() ^= std::byte{1};
  EXPECT_NE(refusal(7).find("checksum"), std::string::npos);
  EXPECT_NE(refusal({7, 99}).find("checksum"), std::string::npos);
}

}  // namespace
}  // namespace sparsecomm::test
