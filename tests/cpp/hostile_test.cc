// A rank that keeps to the protocol and lies: its messages are whole, their checksums right, and
// their figures absurd. The others may take a lie that could be true; what they must not do is read
// or write where they should not, ask for absurd memory, hang, or lose gradient.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "../fuzz/frame_fuzz.h"
#include "collectives/global_cut.h"
#include "failing_steps.h"

namespace sparsecomm::test {
namespace {

constexpr std::size_t numel = 600;
constexpr int liar = 1;
constexpr std::uint64_t lies = 8;  // about each message

// Changes one figure of one message, anywhere behind magic, version, kind and operation, and
// corrects the checksum.
class Lying final : public WrappedTransport {
 public:
  Lying(std::unique_ptr<Transport> inner, std::uint64_t message, std::uint64_t seed)
      : WrappedTransport(std::move(inner)), message_(message), random_(seed) {}

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    if (sent_++ != message_) return inner().isend(peer, tag, bytes);
    lie_.assign(bytes.begin(), bytes.end());
    // One of the frames of the message.
    std::vector<std::span<std::byte>> frames;
    for (std::span<std::byte> rest(lie_); rest.size() >= header_bytes;) {
      FrameHeader header;
      std::memcpy(&header, rest.data(), header_bytes);
      std::size_t const length =
          header_bytes + std::size_t{header.index_bytes} + header.value_bytes;
      frames.push_back(rest.first(std::min(length, rest.size())));
      rest = rest.subspan(frames.back().size());
    }
    if (!frames.empty()) distort(frames[random_() % frames.size()]);
    return inner().isend(peer, tag, lie_);
  }

 private:
  void distort(std::span<std::byte> frame) {
    std::size_t const width = std::size_t{1} << random_() % 4;
    bool const in_header = frame.size() < header_bytes + width || random_() % 4 == 0;
    std::size_t const first = in_header ? 4 : header_bytes;
    std::size_t const end = in_header ? header_bytes : frame.size();
    std::size_t const offset = first + random_() % ((end - first) / width) * width;
    std::uint64_t const absurd[] = {0,
                                    1,
                                    std::numeric_limits<std::uint32_t>::max() / 2,
                                    0x80000000u,
                                    0x7fc00000u,
                                    0x7f800000u,
                                    std::numeric_limits<std::uint32_t>::max(),
                                    std::numeric_limits<std::uint64_t>::max() / 2,
                                    std::uint64_t{1} << 63,
                                    0x7ff8000000000000u,
                                    std::numeric_limits<std::uint64_t>::max()};
    std::uint64_t figure = absurd[random_() % std::size(absurd)];
    if (random_() % 4 == 0) {  // off by one, or swapped
      std::memcpy(&figure, frame.data() + offset, width);
      figure += random_() % 2 == 0 ? 1 : -1;
    }
    std::memcpy(frame.data() + offset, &figure, width);
    fuzz::repair(frame);
  }

  std::uint64_t message_, sent_ = 0;
  std::mt19937_64 random_;
  std::vector<std::byte> lie_;  // until the inner transport has been waited for
};

// Who is blamed is another matter: a rank passes on others' frames, and no checksum says whose they
// are.
void check_lie(std::string const& algorithm, int ranks, std::uint64_t message, std::uint64_t seed) {
  SCOPED_TRACE(concat(algorithm, ", P=", ranks, ", message ", message, ", seed ", seed));
  auto transports = make_inproc_transports(ranks);
  transports[liar] = std::make_unique<Lying>(std::move(transports[liar]), message, seed);
  CommunicatorOptions const options{.timeout = std::chrono::milliseconds(300),
                                    .failure_grace = std::chrono::milliseconds(100)};
  auto const start = std::chrono::steady_clock::now();
  // What is no Error is a failure here: bad_alloc, say.
  expect_no_errors(run_ranks(
      std::move(transports),
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        auto const exchange = std::make_shared<GradientExchange<float>>(
            "test", numel, failure_options(algorithm), communicator);
        std::vector<float> residual(numel, 0.0f);
        for (int step = 0; step < 3; ++step) {
          auto const input = patterns[0].make(rank, ranks, numel, step);
          std::vector<float> gradient(input.begin(), input.end());
          auto const before = residual;
          exchange->bind({{gradient, residual}});
          try {
            communicator.submit(exchange).wait();
            continue;
          } catch (Error const&) {
          }
          for (std::size_t i = 0; i < numel; ++i) {
            ASSERT_EQ(gradient[i] + residual[i], before[i] + static_cast<float>(input[i])) << i;
          }
        }
      },
      options, {}, services_for(algorithm)));
  EXPECT_LT(std::chrono::steady_clock::now() - start, long_time());
}

class HostileTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Algorithms, HostileTest, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (auto const& entry : algorithms()) names.emplace_back(entry.name);
                           return names;
                         }()),
                         [](auto const& info) { return info.param; });

TEST_P(HostileTest, AbsurdFiguresInAnyMessageAreRefusedOrTaken) {
  for (int const ranks : {2, 3, 4}) {
    std::uint64_t const messages = messages_of_two_steps(GetParam(), ranks, numel, liar);
    // Several at once, since most of the time goes by in waiting for deadlines.
    std::atomic<std::uint64_t> next = 0;
    expect_no_errors(on_threads(4, [&](int) {
      for (std::uint64_t lie = next++; lie < lies * messages; lie = next++) {
        check_lie(GetParam(), ranks, lie / lies, lie);
      }
    }));
  }
}

// Either liar could be right by itself; together their counts do not fit into 32 bits.
TEST(HostileTest, CountsThatAddUpToMoreThanAFigureHoldsAreHeldAgainstThoseTheyAreOf) {
  auto transports = make_inproc_transports(3);
  std::uint64_t const most = std::numeric_limits<std::uint32_t>::max() - 1;
  std::uint64_t const k = 10;
  std::vector<int> culprits;
  on_threads(3, [&](int rank) {
    Channel channel(*transports[rank], 1, Deadline(steady_clock(), long_time()));
    if (rank == 0) {
      GlobalCut<float> cut;
      std::vector<float> const values(10, 1.0f);
      try {
        cut.run(channel, values, k, ThresholdSource::exact, most);
      } catch (PeerInvalid const& invalid) {
        culprits = invalid.ranks();
      }
    } else {
      CensusAllreduce<std::uint32_t> census;
      std::vector<std::uint32_t> counts(GlobalCut<float>::bins(k) + 2);
      counts.front() = 3'000'000'000;
      census.run(channel, Phase::threshold, std::span(counts), std::plus{}, [](auto&&...) {});
    }
    transports[rank]->abort();
  });
  EXPECT_EQ(culprits, (std::vector{1, 2}));
}

}  // namespace
}  // namespace sparsecomm::test
