// The transport over MPI, run by mpiexec: every rank is one process and runs every test.
#include "transport/mpi/mpi_transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>

#include "engine/verdict.h"
#include "failing_steps.h"
#include "rings.h"

namespace sparsecomm {
namespace {

using test::soon;
using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251 + seed);
  return bytes;
}

TEST(MpiTransport, DeliversAnyLengthOnBothSidesOfTheCountLimit) {
  auto const transport = make_mpi_transport(MPI_COMM_WORLD, {.max_count = 1000});
  int const next = (transport->rank() + 1) % transport->size();
  int const previous = (transport->rank() + transport->size() - 1) % transport->size();
  for (std::size_t const size : {0, 1, 999, 1000, 1001, 1999, 2000, 2001, 123'456}) {
    Bytes const out = pattern(size, transport->rank());
    Bytes in(size + 1500);  // more room than the message needs: the length must still be right
    auto const deadline = soon();
    Request receive = transport->irecv(previous, 5, in);
    Request send = transport->isend(next, 5, out);
    ASSERT_EQ(transport->wait(receive, deadline), size);
    transport->wait(send, deadline);
    in.resize(size);
    EXPECT_EQ(in, pattern(size, previous)) << size;
  }
  EXPECT_EQ(transport->counters().sent_messages[next], 9u);
}

TEST(MpiTransport, KeepsTagsApartAndOrderWithinATag) {
  auto const transport = make_mpi_transport(MPI_COMM_WORLD);
  int const peer = transport->rank() ^ 1;
  // The largest operation number and the smallest, every phase.
  std::vector<Tag> tags;
  for (Tag const operation : {0u, 1u, 0x0ffffffu, (tag_limit >> 3) - 1}) {
    for (Tag phase = 0; phase < 8; ++phase) tags.push_back((operation << 3) | phase);
  }
  auto const deadline = soon();
  std::vector<Request> requests;
  Bytes const first = pattern(100, 1);
  Bytes const second = pattern(50, 2);
  for (auto tag = tags.rbegin(); tag != tags.rend(); ++tag) {
    requests.push_back(transport->isend(peer, *tag, first));
    requests.push_back(transport->isend(peer, *tag, second));
  }
  for (Tag const tag : tags) {
    Bytes in(100);
    Request one = transport->irecv(peer, tag, in);
    Bytes more(100);
    Request two = transport->irecv(peer, tag, more);
    EXPECT_EQ(transport->wait(one, deadline), 100u);
    EXPECT_EQ(in, first);
    EXPECT_EQ(transport->wait(two, deadline), 50u);
  }
  for (Request& request : requests) transport->wait(request, deadline);
}

TEST(MpiTransport, RingsAreHeard) {
  auto const transport = make_mpi_transport(MPI_COMM_WORLD);
  test::check_rings(*transport);
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(MpiTransport, NamesTheSenderOfAMessageThatIsTooLong) {
  auto const transport = make_mpi_transport(MPI_COMM_WORLD);
  int const peer = transport->rank() ^ 1;
  Bytes const out(100);
  Bytes in(99);
  auto const deadline = soon();
  Request receive = transport->irecv(peer, 1, in);
  Request send = transport->isend(peer, 1, out);
  try {
    transport->wait(receive, deadline);
    ADD_FAILURE() << "100 bytes fitted into 99";
  } catch (PeerInvalid const& error) {
    EXPECT_EQ(error.ranks(), std::vector<int>{peer});
    EXPECT_NE(std::string(error.what()).find("99 bytes"), std::string::npos) << error.what();
  }
  transport->wait(send, deadline);
}

TEST(MpiTransport, GivesTheMemoryBackWhenTheDeadlinePasses) {
  auto const transport = make_mpi_transport(MPI_COMM_WORLD);
  int const peer = transport->rank() ^ 1;
  Bytes in(10, std::byte{1});
  Request receive = transport->irecv(peer, 1, in);
  try {
    transport->wait(receive, soon(std::chrono::milliseconds(30)));
    ADD_FAILURE() << "nobody had sent anything";
  } catch (Timeout const& error) {
    EXPECT_EQ(error.ranks(), std::vector<int>{peer});
  }
  MPI_Barrier(MPI_COMM_WORLD);
  // What comes too late goes to the next receive, not into the memory of the one that was given up.
  Bytes const out(10, std::byte{2});
  Bytes next(10);
  Request send = transport->isend(peer, 1, out);
  Request again = transport->irecv(peer, 1, next);
  EXPECT_EQ(transport->wait(again, soon()), 10u);
  transport->wait(send, soon());
  EXPECT_EQ(next, out);
  EXPECT_EQ(in, Bytes(10, std::byte{1}));
}

TEST(MpiTransport, AReportEndsTheWaitOfTheOthersAtOnce) {
  auto const transport = make_mpi_transport(MPI_COMM_WORLD);
  FailureReport const report{7, FailureReport::Cause::own, {}, std::string(10'000, 'x')};
  if (transport->rank() == 0) {
    transport->board().post_failure(report);
    transport->abort();
    EXPECT_THROW(transport->isend(1, 1, {}), Interrupted);
  } else {
    Bytes in(10);
    Request receive = transport->irecv(transport->rank() ^ 1, 1, in);
    try {
      transport->wait(receive, soon(10 * test::long_time()));
      ADD_FAILURE() << "rank 0 had given up";
    } catch (Interrupted const& error) {
      EXPECT_EQ(error.ranks(), std::vector<int>{0});
    }
    auto const reports = transport->board().failures();
    ASSERT_TRUE(reports[0]);
    EXPECT_EQ(reports[0]->operation, 7u);
    EXPECT_EQ(reports[0]->text.front(), 'x');
    EXPECT_LT(reports[0]->text.size(), report.text.size());
    EXPECT_FALSE(reports[1]);
    transport->abort();
  }
}

// Rank 0 waited for rank 2, and that for rank 1, which does nothing.
TEST(MpiFailureReports, WhomAnInterruptedRankWaitedForIsNamed) {
  auto const transport = make_mpi_transport(MPI_COMM_WORLD);
  ASSERT_EQ(transport->size(), 3);
  Counters const counters(3);
  auto const post = [&](FailureReport::Cause cause, int suspect) {
    transport->board().post_failure(
        {7, cause, {suspect}, "", counters.sent_messages, counters.received_messages});
    transport->abort();
  };
  if (transport->rank() == 0) post(FailureReport::Cause::timeout, 2);
  if (transport->rank() == 2) {
    Bytes in(10);
    Request receive = transport->irecv(1, 1, in);
    try {
      transport->wait(receive, soon());
      ADD_FAILURE() << "rank 0 had given up";
    } catch (Interrupted const& error) {
      EXPECT_EQ(error.ranks(), std::vector{1});
    }
    post(FailureReport::Cause::interrupted, 1);
  }
  for (auto const deadline = soon(); !deadline.passed();) {
    auto const reports = transport->board().failures();
    if (reports[0] && reports[2]) break;
  }
  EXPECT_EQ(conclude(transport->board().failures()).culprits, std::vector{1});
  MPI_Barrier(MPI_COMM_WORLD);
}

// One message of each kind, at random, in each algorithm. Rank 1 fails and its process goes on.
class MpiFailure : public ::testing::TestWithParam<FaultKind> {};

INSTANTIATE_TEST_SUITE_P(Faults, MpiFailure,
                         ::testing::Values(FaultKind::die, FaultKind::delay, FaultKind::truncate,
                                           FaultKind::corrupt));

TEST_P(MpiFailure, SurvivorsNameTheRank) {
  constexpr std::size_t numel = 600;
  constexpr int culprit = 1;
  // Ranks that poll share cores, and nothing but the deadline tells of one that is gone.
  Duration const short_time = test::patiently(std::chrono::milliseconds(500));
  CommunicatorOptions const options{.timeout = short_time, .failure_grace = short_time};
  int const ranks = make_mpi_transport(MPI_COMM_WORLD)->size();
  std::minstd_rand random(static_cast<unsigned>(GetParam()) + 1);
  for (AlgorithmEntry const& entry : algorithms()) {
    if (entry.needs == Needs::aggregators) continue;  // those of tests serve one process
    std::string const algorithm(entry.name);
    Fault const fault{GetParam(),
                      random() % test::messages_of_two_steps(algorithm, ranks, numel, culprit)};
    SCOPED_TRACE(concat(algorithm, ", fault at message ", fault.message));
    auto transport = make_mpi_transport(MPI_COMM_WORLD);
    int const rank = transport->rank();
    if (rank == culprit) transport = make_faulty(std::move(transport), fault);
    if (auto const wrap = test::services_for(algorithm).wrap)
      transport = wrap(std::move(transport));
    auto const start = std::chrono::steady_clock::now();
    std::size_t applied = 0;
    {
      Communicator communicator(std::move(transport), options);
      auto const survivor = test::run_until_failure(communicator, algorithm, numel);
      if (rank != culprit) test::expect_accused(survivor, culprit);
      applied = test::applied_steps(survivor.log);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, test::long_time());
    std::vector<std::uint64_t> all(ranks);
    std::uint64_t const own = applied;
    MPI_Allgather(&own, 1, MPI_UINT64_T, all.data(), 1, MPI_UINT64_T, MPI_COMM_WORLD);
    for (int other = 0; other < ranks; ++other) {
      if (other == culprit || rank == culprit) continue;
      EXPECT_EQ(all[other], own) << "steps of rank " << other;
    }
  }
}

}  // namespace
}  // namespace sparsecomm

int main(int count, char** arguments) {
  int level = 0;
  MPI_Init_thread(&count, &arguments, MPI_THREAD_MULTIPLE, &level);
  testing::InitGoogleTest(&count, arguments);
  int const status = RUN_ALL_TESTS();
  // A rank that fails leaves others waiting.
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_Finalize();
  return status;
}
