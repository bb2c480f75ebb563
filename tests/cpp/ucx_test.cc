// The transport over UCX between threads of this process; processes are tests/python's.
#include "transport/ucx.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <latch>
#include <numeric>

#include "ucx_ranks.h"

namespace sparsecomm::test {
namespace {

using std::chrono::milliseconds;

// body() gets its rank's transport, which it may destroy.
std::vector<std::exception_ptr> on_ranks(
    int size, std::function<void(std::unique_ptr<Transport>)> const& body,
    std::function<UcxOptions(int rank)> const& options = [](int) { return ucx_options_here(); }) {
  load_ucx_modules();
  auto const meeting = std::make_shared<Meeting>(size);
  return on_threads(size, [&](int rank) {
    body(make_ucx_transport(rank, size, std::make_shared<ThreadRendezvous>(rank, meeting),
                            options(rank)));
  });
}

class UcxTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string const problem = ucx_problem(ucx_options_here()); !problem.empty()) {
      GTEST_SKIP() << problem;
    }
  }
};

std::vector<std::byte> pattern(std::size_t size, int seed) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + seed);
  return bytes;
}

// Around every size at which UCX changes its ways.
constexpr std::size_t sizes[] = {0,    1,     7,     8,     100,    1000,   4095,    8191,
                                 8192, 16384, 65535, 65536, 100000, 262144, 1000000, 5000000};

TEST_F(UcxTest, EveryRankSendsToEveryOtherAndLearnsHowMuchCame) {
  for (int const size : {1, 2, 3, 4}) {
    expect_no_errors(on_ranks(size, [&](std::unique_ptr<Transport> transport) {
      int const rank = transport->rank();
      EXPECT_EQ(transport->name(), "ucx");
      for (std::size_t const bytes : sizes) {
        std::vector<std::vector<std::byte>> outgoing, incoming;
        std::vector<Request> sends, receives;
        for (int peer = 0; peer < size; ++peer) {
          incoming.emplace_back(bytes + 10);
          outgoing.push_back(pattern(bytes, rank * 10 + peer));
        }
        for (int peer = 0; peer < size; ++peer) {
          if (peer == rank) continue;
          receives.push_back(transport->irecv(peer, 5, incoming[peer]));
          sends.push_back(transport->isend(peer, 5, outgoing[peer]));
        }
        for (int peer = 0, next = 0; peer < size; ++peer) {
          if (peer == rank) continue;
          EXPECT_EQ(transport->wait(receives[next], soon()), bytes);
          incoming[peer].resize(bytes);
          EXPECT_EQ(incoming[peer], pattern(bytes, peer * 10 + rank)) << bytes;
          transport->wait(sends[next++], soon());
        }
      }
    }));
  }
}

// Of 11 ranks, 0 has 1, 2, 4, 8 and 10, 9, 7, 3 for partners, but neither 5 nor 6.
TEST_F(UcxTest, RanksThatAreNoPartnersConnectWhenTheyFirstTalk) {
  constexpr int size = 11;
  expect_no_errors(on_ranks(size, [&](std::unique_ptr<Transport> transport) {
    int const rank = transport->rank();
    std::vector<std::byte> const own = pattern(1000, rank);
    for (int const distance : {5, 3}) {
      int const to = (rank + distance) % size;
      int const from = (rank - distance + size) % size;
      std::vector<std::byte> came(1000);
      Request receive = transport->irecv(from, 3, came);
      Request send = transport->isend(to, 3, own);
      EXPECT_EQ(transport->wait(receive, soon()), came.size());
      transport->wait(send, soon());
      EXPECT_EQ(came, pattern(1000, from));
    }
    // A rank that leaves tells those that wait for it, who have sent it nothing.
    if (rank != 5) return;
    std::vector<std::byte> came(1);
    Request receive = transport->irecv(0, 4, came);
    auto const start = steady_clock().now();
    EXPECT_THROW(transport->wait(receive, soon()), PeerLost);
    EXPECT_LT(steady_clock().now() - start, long_time() / 2);
  }));
}

TEST_F(UcxTest, MessagesMeetTheReceiveOfTheirTagInOrder) {
  expect_no_errors(on_ranks(2, [](std::unique_ptr<Transport> transport) {
    int const peer = 1 - transport->rank();
    std::vector<Request> sends;
    std::vector<std::uint32_t> numbers(200);
    std::iota(numbers.begin(), numbers.end(), 0u);
    for (std::uint32_t const& n : numbers) {
      sends.push_back(transport->isend(peer, n % 2, std::as_bytes(std::span(&n, 1))));
    }
    for (std::uint32_t const tag : {1u, 0u}) {
      for (std::uint32_t n = tag; n < numbers.size(); n += 2) {
        std::uint32_t came = 0;
        Request receive = transport->irecv(peer, tag, std::as_writable_bytes(std::span(&came, 1)));
        EXPECT_EQ(transport->wait(receive, soon()), sizeof came);
        EXPECT_EQ(came, n);
      }
    }
    for (Request& send : sends) transport->wait(send, soon());
  }));
}

TEST_F(UcxTest, AMessageThatIsTooLongAccusesItsSender) {
  expect_no_errors(on_ranks(2, [](std::unique_ptr<Transport> transport) {
    std::vector<std::byte> bytes(100);
    if (transport->rank() == 0) {
      Request send = transport->isend(1, 0, bytes);
      transport->wait(send, soon());
      return;
    }
    Request receive = transport->irecv(0, 0, std::span(bytes).first(99));
    try {
      transport->wait(receive, soon());
      ADD_FAILURE() << "nothing was thrown";
    } catch (PeerInvalid const& error) {
      EXPECT_EQ(error.ranks(), std::vector{0});
      EXPECT_STREQ(error.what(), "rank 0 sent more than the 99 bytes that were expected");
    }
  }));
}

TEST_F(UcxTest, ADeadlineIsKeptAndNamesThePeer) {
  std::latch raised(1);
  expect_no_errors(on_ranks(2, [&](std::unique_ptr<Transport> transport) {
    std::vector<std::byte> bytes(100);
    if (transport->rank() == 1) return raised.wait();
    Request receive = transport->irecv(1, 0, bytes);
    auto const start = steady_clock().now();
    try {
      transport->wait(receive, {steady_clock(), milliseconds(150)});
      ADD_FAILURE() << "nothing was thrown";
    } catch (Timeout const& timeout) {
      EXPECT_EQ(timeout.ranks(), std::vector{1});
    }
    EXPECT_GE(steady_clock().now() - start, milliseconds(150));
    EXPECT_LT(steady_clock().now() - start, long_time());
    raised.count_down();
  }));
}

TEST_F(UcxTest, APeerThatLeavesIsNoticedAfterWhatItHadSent) {
  for (std::size_t const bytes : {std::size_t{8}, std::size_t{60000}}) {
    std::latch left(1);
    expect_no_errors(on_ranks(3, [&](std::unique_ptr<Transport> transport) {
      std::vector<std::byte> buffer = pattern(bytes, 1);
      if (transport->rank() == 0) {
        for (int const peer : {1, 2}) {
          Request send = transport->isend(peer, 0, buffer);
          transport->wait(send, soon());
        }
        transport.reset();
        return left.count_down();
      }
      left.wait();
      std::vector<std::byte> came(bytes);
      Request receive = transport->irecv(0, 0, came);
      EXPECT_EQ(transport->wait(receive, soon()), bytes);
      EXPECT_EQ(came, buffer);
      auto const start = steady_clock().now();
      receive = transport->irecv(0, 1, came);
      EXPECT_THROW(transport->wait(receive, soon()), PeerLost);
      EXPECT_LT(steady_clock().now() - start, long_time() / 2);
      EXPECT_THROW(transport->isend(0, 0, buffer), PeerLost);
      int const other = 3 - transport->rank();  // those that are left go on
      Request send = transport->isend(other, 2, buffer);
      receive = transport->irecv(other, 2, came);
      EXPECT_EQ(transport->wait(receive, soon()), bytes);
      transport->wait(send, soon());
    }));
  }
}

TEST_F(UcxTest, AnInterruptFromAnotherThreadEndsAWaitAndAnAbortIsNoticedByThePeers) {
  expect_no_errors(on_ranks(2, [](std::unique_ptr<Transport> transport) {
    std::vector<std::byte> bytes(100);
    int const peer = 1 - transport->rank();
    Request receive = transport->irecv(peer, 0, bytes);
    bool const interrupted = transport->rank() == 0;
    std::thread interrupter;
    if (interrupted) {
      interrupter = std::thread([&] {
        std::this_thread::sleep_for(milliseconds(100));  // most likely it waits by then
        transport->interrupt();
      });
    }
    auto const start = steady_clock().now();
    try {
      transport->wait(receive, soon());
      ADD_FAILURE() << "nothing was thrown";
    } catch (PeerError const& error) {
      EXPECT_EQ(dynamic_cast<Interrupted const*>(&error) != nullptr, interrupted) << error.what();
      EXPECT_EQ(error.ranks(), std::vector{peer});
      transport->abort();  // as the communicator does
    }
    EXPECT_LT(steady_clock().now() - start, long_time() / 2);
    if (interrupter.joinable()) interrupter.join();
    EXPECT_THROW(transport->irecv(peer, 0, bytes), Interrupted);
  }));
}

TEST_F(UcxTest, RequestsThatNobodyWaitedForDieWithTheTransport) {
  std::vector<std::byte> large = pattern(3000000, 3);
  std::vector<std::vector<std::byte>> buffers(2, std::vector<std::byte>(3000000));
  expect_no_errors(on_ranks(2, [&](std::unique_ptr<Transport> transport) {
    int const peer = 1 - transport->rank();
    transport->irecv(peer, 1, buffers[transport->rank()]);
    if (transport->rank() == 0) transport->isend(peer, 2, large);
  }));
}

TEST_F(UcxTest, SeveralAtOnceAndOneAfterTheOther) {
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> groups;
    for (int group = 0; group < 3; ++group) {
      groups.emplace_back([group] {
        expect_no_errors(on_ranks(2, [&](std::unique_ptr<Transport> transport) {
          int const peer = 1 - transport->rank();
          std::vector<std::byte> const own = pattern(20000, group);
          std::vector<std::byte> came(20000);
          for (int message = 0; message < 20; ++message) {
            Request receive = transport->irecv(peer, 0, came);
            Request send = transport->isend(peer, 0, own);
            EXPECT_EQ(transport->wait(receive, soon()), came.size());
            transport->wait(send, soon());
            EXPECT_EQ(came, own);
          }
        }));
      });
    }
    for (std::thread& group : groups) group.join();
  }
}

TEST_F(UcxTest, EveryRankSaysTheSameIfOneLacksTheLibrary) {
  auto const errors = on_ranks(
      3, [](std::unique_ptr<Transport> const&) {},
      [](int rank) {
        UcxOptions options = ucx_options_here();
        if (rank == 1) options.library = "/nowhere/libucp.so.0";
        return options;
      });
  for (auto const& error : errors) {
    EXPECT_EQ(message_of(error), message_of(errors[0]));
    EXPECT_THROW(std::rethrow_exception(error), TransportUnavailable);
  }
  EXPECT_NE(message_of(errors[0]).find("rank 1: "), std::string::npos);
}

TEST_F(UcxTest, AFileThatIsNoUcxIsNamed) {
  UcxOptions options = ucx_options_here();
  options.library = "libm.so.6";
  EXPECT_NE(ucx_problem(options).find("libm.so.6 has no function uc"), std::string::npos)
      << ucx_problem(options);
  options.library = "/nowhere/libucp.so.0";
  EXPECT_NE(ucx_problem(options).find("/nowhere/libucp.so.0"), std::string::npos);
  EXPECT_NE(ucx_problem(options).find("pip install libucx-cu13"), std::string::npos);
}

TEST_F(UcxTest, ASettingThatUcxDoesNotHaveIsNamed) {
  auto const errors = on_ranks(
      1, [](std::unique_ptr<Transport> const&) {},
      [](int) {
        UcxOptions options = ucx_options_here();
        options.settings = {{"RNDV_THRESH", "many"}};
        return options;
      });
  EXPECT_NE(message_of(errors[0]).find("RNDV_THRESH=many"), std::string::npos)
      << message_of(errors[0]);
}

TEST_F(UcxTest, TheBarePingPongIsTimed) {
  auto const meeting = std::make_shared<Meeting>(2);
  std::vector<std::vector<double>> times(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadRendezvous rendezvous(rank, meeting);
      times[rank] = ucx_ping_pong(rank, rendezvous, ucx_options_here(), 1000, 50);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto const& of_rank : times) {
    ASSERT_EQ(of_rank.size(), 50u);
    for (double const time : of_rank) EXPECT_GT(time, 0.0);
  }
}

}  // namespace
}  // namespace sparsecomm::test
