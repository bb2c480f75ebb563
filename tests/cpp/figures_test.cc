#include "collectives/figures.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "contributions.h"

namespace sparsecomm::test {
namespace {

constexpr auto anything = [](auto&&...) {};

void expect_cost(Transport const& transport, Cost const& cost) {
  Counters const& counters = transport.counters();
  EXPECT_EQ(Counters::total(counters.sent_messages), cost.messages);
  EXPECT_EQ(Counters::total(counters.received_bytes), cost.bytes);
  EXPECT_EQ(Counters::total(counters.sent_bytes), cost.bytes);
}

// Powers of two, so that a rank left out or taken twice shows in the sum.
TEST(FiguresTest, ACensusCombinesEveryRanksFiguresOnce) {
  for (int ranks = 1; ranks <= 33; ++ranks) {
    auto transports = make_inproc_transports(ranks);
    expect_no_errors(run_transports(transports, [&](Transport& transport) {
      Channel channel(transport, 1, soon());
      CensusAllreduce<std::uint64_t> census;
      std::vector<std::uint64_t> figures{std::uint64_t{1} << transport.rank(), 1, 0};
      census.run(channel, Phase::threshold, std::span(figures), std::plus{}, anything);
      std::uint64_t const all = (std::uint64_t{1} << ranks) - 1;
      EXPECT_EQ(figures, (std::vector<std::uint64_t>{all, static_cast<std::uint64_t>(ranks), 0}));
      expect_cost(transport, census_cost(ranks, 3 * sizeof(std::uint64_t)));
    }));
  }
}

TEST(FiguresTest, ACensusIsTakenOfStructuresToo) {
  struct Range {
    std::uint32_t least, most;
  };
  for (int ranks = 1; ranks <= 9; ++ranks) {
    auto transports = make_inproc_transports(ranks);
    expect_no_errors(run_transports(transports, [&](Transport& transport) {
      Channel channel(transport, 1, soon());
      CensusAllreduce<Range> census;
      auto const own = static_cast<std::uint32_t>(7 * transport.rank() % ranks);
      Range range{own, own};
      auto const combine = [](Range const& a, Range const& b) {
        return Range{std::min(a.least, b.least), std::max(a.most, b.most)};
      };
      census.run(channel, Phase::threshold, std::span(&range, 1), combine, anything);
      std::uint32_t const most = ranks == 7 ? 0 : static_cast<std::uint32_t>(ranks - 1);
      EXPECT_EQ(range.least, 0u) << "P=" << ranks;
      EXPECT_EQ(range.most, most) << "P=" << ranks;
    }));
  }
}

TEST(FiguresTest, EveryRankGathersEverybodysFigure) {
  for (int ranks = 1; ranks <= 33; ++ranks) {
    auto transports = make_inproc_transports(ranks);
    expect_no_errors(run_transports(transports, [&](Transport& transport) {
      Channel channel(transport, 1, soon());
      PackedAllgather<std::uint64_t> gather;
      auto const figure = [](int rank) { return static_cast<std::uint64_t>(rank) * rank + 3; };
      auto const figures = gather.run(channel, Phase::threshold, figure(transport.rank()),
                                      [&](int rank, std::uint64_t arrived) {
                                        EXPECT_EQ(arrived, figure(rank)) << "of rank " << rank;
                                      });
      ASSERT_EQ(figures.size(), static_cast<std::size_t>(ranks));
      for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(figures[rank], figure(rank));
      expect_cost(transport, packed_allgather_cost(ranks, sizeof(std::uint64_t)));
    }));
  }
}

// The ranks that get an impossible figure name the one that sent it; the others see those give up.
template <class Run>
void expect_named(int liar, std::vector<int> const& witnesses, Run&& run) {
  auto transports = make_inproc_transports(5);
  auto const errors = run_transports(transports, [&](Transport& transport) {
    Channel channel(transport, 1, soon());
    run(channel);
  });
  for (int const witness : witnesses) {
    EXPECT_EQ(message_of(errors[witness]),
              concat("rank ", liar, " sent an invalid message: 9 is more than 8"));
  }
  EXPECT_EQ(message_of(errors[liar]).find("rank " + std::to_string(liar)), std::string::npos);
}

constexpr auto at_most_8 = [](std::uint64_t figure) {
  require<MalformedFrame>(figure <= 8, figure, " is more than 8");
};

TEST(FiguresTest, WhoSendsAnImpossibleFigureIsNamed) {
  int const liar = 3;
  // P - 1 is 4, 100 in binary: the liar's own figure reaches the rank before it.
  expect_named(liar, {2}, [&](Channel& channel) {
    CensusAllreduce<std::uint64_t> census;
    std::uint64_t figure = channel.rank() == liar ? 9 : 1;
    census.run(channel, Phase::threshold, std::span(&figure, 1), std::plus{},
               [&](std::span<const std::uint64_t> arrived, int) {
                 if (channel.rank() != liar) at_most_8(arrived.front());
               });
  });
  expect_named(liar, {2}, [&](Channel& channel) {
    PackedAllgather<std::uint64_t> gather;
    gather.run(channel, Phase::threshold, std::uint64_t{channel.rank() == liar ? 9u : 1u},
               [](int, std::uint64_t figure) { at_most_8(figure); });
  });
}

// A rank passes on nothing that its peers would refuse, for which they would blame it.
TEST(FiguresTest, FiguresThatContradictOneAnotherAreHeldAgainstAllTheyAreOf) {
  int const liar = 3;
  auto transports = make_inproc_transports(5);
  auto const errors = run_transports(transports, [&](Transport& transport) {
    Channel channel(transport, 1, soon());
    CensusAllreduce<std::uint64_t> census;
    // Of eight in all each rank has one; what the liar says could be true by itself.
    std::uint64_t figure = channel.rank() == liar ? 8 : 1;
    census.run(channel, Phase::threshold, std::span(&figure, 1), std::plus{},
               [&](std::span<const std::uint64_t> figures, int) { at_most_8(figures.front()); });
  });
  EXPECT_EQ(message_of(errors[1]),
            "the figures of ranks 2, 3 contradict one another: 9 is more than 8");
  EXPECT_EQ(message_of(errors[2]),
            "the figures of ranks 3, 4 contradict one another: 9 is more than 8");
  for (std::exception_ptr const& error : errors) {
    if (!error) continue;  // the liar, where all its peers' figures came before they gave up
    try {
      std::rethrow_exception(error);
    } catch (PeerInvalid const& invalid) {
      EXPECT_TRUE(std::ranges::count(invalid.ranks(), liar)) << invalid.what();
    } catch (PeerLost const&) {  // of a rank that gave up
    }
  }
}

TEST(FiguresTest, WhatARankItselfCannotHaveItSaysInsteadOfSendingIt) {
  auto transports = make_inproc_transports(2);
  auto const errors = run_transports(transports, [&](Transport& transport) {
    Channel channel(transport, 1, soon());
    CensusAllreduce<std::uint64_t> census;
    std::uint64_t figure = transport.rank() == 0 ? 9 : 1;
    census.run(channel, Phase::threshold, std::span(&figure, 1), std::plus{},
               [&](std::span<const std::uint64_t> figures, int) { at_most_8(figures.front()); });
  });
  EXPECT_EQ(message_of(errors[0]), "9 is more than 8");
  EXPECT_EQ(message_of(errors[1]).find("9 is more than 8"), std::string::npos);
}

TEST(FiguresTest, AnArrayOfAnotherLengthIsRefused) {
  auto transports = make_inproc_transports(2);
  auto const errors = run_transports(transports, [&](Transport& transport) {
    Channel channel(transport, 1, soon());
    CensusAllreduce<std::uint32_t> census;
    std::vector<std::uint32_t> figures(transport.rank() == 0 ? 4 : 3);
    census.run(channel, Phase::threshold, std::span(figures), std::plus{}, anything);
  });
  EXPECT_EQ(message_of(errors[0]),
            "rank 1 sent an invalid message: figures of 12 bytes instead of 16");
}

}  // namespace
}  // namespace sparsecomm::test
