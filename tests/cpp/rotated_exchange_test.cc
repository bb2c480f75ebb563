// The windowed exchange of the reduce-scatters: what is posted when a frame is consumed.
#include "collectives/rotated_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "ranks.h"
#include "transport/wrapped.h"

namespace sparsecomm::test {
namespace {

class PostCounter final : public WrappedTransport {
 public:
  using WrappedTransport::WrappedTransport;
  int sends = 0;
  int receives = 0;

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    ++sends;
    return WrappedTransport::do_isend(peer, tag, bytes);
  }
  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    ++receives;
    return WrappedTransport::do_irecv(peer, tag, bytes);
  }
};

constexpr std::size_t frame_bytes = header_bytes + 2;

// Each frame says who sent it to whom.
void check_exchange(PostCounter& posted, int slots, int sends) {
  int const rank = posted.rank();
  int const peers = posted.size() - 1;
  Channel channel(posted, 7, Deadline(steady_clock(), long_time()));
  RotatedExchange exchange;
  for (int run = 1; run <= 2; ++run) {
    std::vector<std::byte> outgoing(peers * frame_bytes), incoming(slots * frame_bytes);
    posted.sends = posted.receives = 0;
    int consumed = 0;
    exchange.run(
        channel,
        {.outgoing = outgoing, .incoming = incoming, .max_frame = frame_bytes, .sends = sends},
        [&](int destination, std::span<std::byte> room) -> std::span<const std::byte> {
          std::array const payload{std::byte(rank), std::byte(destination)};
          return room.first(encode_bytes(channel.stamp(), payload, room));
        },
        [&](int source, FrameView const& frame) {
          EXPECT_EQ(source, rotated_source(rank, consumed + 1, peers + 1));
          EXPECT_EQ(std::vector(frame.values.begin(), frame.values.end()),
                    (std::vector{std::byte(source), std::byte(rank)}));
          EXPECT_EQ(posted.receives, std::min(consumed + slots, peers));
          EXPECT_EQ(posted.sends, std::min(consumed + sends, peers));
          ++consumed;
        });
    EXPECT_EQ(consumed, peers);
    EXPECT_EQ(posted.sends, peers);
    EXPECT_EQ(posted.receives, peers);
  }
}

TEST(RotatedExchangeTest, TheNextFramesAreOnTheirWayWhenOneIsConsumed) {
  for (int const ranks : {1, 2, 3, 5, 9}) {
    for (int const slots : {1, 2, 4, 8}) {
      for (int const sends : {1, slots, ranks - 1}) {
        SCOPED_TRACE(testing::Message()
                     << ranks << " ranks, " << slots << " receives, " << sends << " sends");
        auto transports = make_inproc_transports(ranks);
        expect_no_errors(on_threads(ranks, [&](int rank) {
          PostCounter posted(std::move(transports[rank]));
          check_exchange(posted, slots, sends);
        }));
      }
    }
  }
}

}  // namespace
}  // namespace sparsecomm::test
