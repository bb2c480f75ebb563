// What a coordinator hands over, and when, on ranks that are threads.
#include "engine/coordinator.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "named_sums.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

Pending pending(std::string name) {
  return {.operation = std::make_shared<Quiet>(std::move(name)),
          .ticket = std::make_shared<Ticket>(Runtime())};
}

// A rank with nothing to do yet, and its place among the others.
struct Rank {
  explicit Rank(Transport& its_transport)
      : transport(its_transport),
        coordinator(make_coordinator(comparison, {.capacity = 100,
                                                  .timeout = patient_options().timeout,
                                                  .fusion_bytes = 0,
                                                  .timeline = timeline})) {}

  void round(Scheduled& next) {
    Channel channel(transport, ++rounds, Deadline(steady_clock(), patient_options().timeout));
    coordinator->round(channel, next, false, nullptr);
  }

  Transport& transport;
  Comparison comparison{transport.size(), nullptr};
  Timeline timeline{{}, transport.rank(), steady_clock()};
  std::unique_ptr<Coordinator> coordinator;
  std::uint32_t rounds = 0;
};

void on_ranks(int size, std::function<void(Rank&)> const& body) {
  auto const transports = make_inproc_transports(size);
  expect_no_errors(on_threads(size, [&](int number) {
    Rank rank(*transports[number]);
    body(rank);
  }));
}

TEST(CoordinatorTest, HandsOverInTheOrderOfAddition) {
  on_ranks(3, [](Rank& rank) {
    std::vector<Pending> const added{pending("a"), pending("b"), pending("c")};
    EXPECT_TRUE(rank.coordinator->empty());
    for (Pending const& one : added) rank.coordinator->add(one);
    for (Pending const& one : added) {
      EXPECT_FALSE(rank.coordinator->empty());
      Scheduled next;
      rank.round(next);
      EXPECT_EQ(next.pending.operation, one.operation);
      EXPECT_FALSE(next.error);
    }
    EXPECT_TRUE(rank.coordinator->empty());
  });
}

TEST(CoordinatorTest, HandsOverWhatIsNotToRunOnAnyRank) {
  on_ranks(3, [](Rank& rank) {
    int const number = rank.transport.rank();
    Pending const cancelled = pending("a"), different = pending(number == 1 ? "b" : "c");
    Pending const good = pending("d");
    if (number == 2) {
      EXPECT_TRUE(cancelled.ticket->cancel());
    }
    for (Pending const& one : {cancelled, different, good}) rank.coordinator->add(one);
    for (Pending const& one : {cancelled, different, good}) {
      Scheduled next;
      rank.round(next);
      EXPECT_EQ(next.pending.operation, one.operation);
      EXPECT_EQ(next.error == nullptr, one.operation == good.operation);
      EXPECT_FALSE(one.ticket->cancel()) << "what has been handed over";
      if (one.operation == cancelled.operation) {
        EXPECT_THROW(std::rethrow_exception(next.error), Cancelled);
      } else if (one.operation == different.operation) {
        EXPECT_THROW(std::rethrow_exception(next.error), Mismatch);
      }
    }
  });
}

// Its batch has as many left as told; shows whether it ended it.
class Part final : public Operation {
 public:
  explicit Part(std::optional<std::size_t> left) : batch_(left) {}
  Proposal prepare() override { return {.text = "operation=part"}; }
  void run(Channel& channel, Agreement const& agreement) override {
    ended = agreement.ends_batch;
    messages = Counters::total(channel.transport().counters().sent_messages);
    agreement.commit(channel);
    messages = Counters::total(channel.transport().counters().sent_messages) - messages;
  }
  Batch const* batch() const override { return &batch_; }

  bool ended = false;
  std::uint64_t messages = 0;

 private:
  FixedBatch batch_;
};

TEST(BatchTest, EndsWithAnOperationThatIsAllThatIsLeftOnAllRanks) {
  using Left = std::optional<std::size_t>;
  std::vector<std::vector<Left>> const cases{{1, 1, 1}, {1, 2, 1}, {1, 1, std::nullopt}, {2, 2, 2},
                                             {1},       {2},       {std::nullopt}};
  for (std::vector<Left> const& left : cases) {
    int const ranks = static_cast<int>(left.size());
    bool const ends = std::ranges::all_of(left, [](Left const& one) { return one == 1; });
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      auto const part = std::make_shared<Part>(left[communicator.rank()]);
      communicator.run(part);
      EXPECT_EQ(part->ended, ends);
      EXPECT_EQ(part->messages, ends ? commit_cost(ranks).messages : 0);
    }));
  }
}

TEST(CoordinatorTest, KeepsWhatIsPendingIfARoundFails) {
  auto const transports = make_inproc_transports(2);
  Rank rank(*transports[0]);
  Pending const first = pending("a"), second = pending("b");
  rank.coordinator->add(first);
  rank.coordinator->add(second);
  transports[1]->abort();
  Scheduled next;
  EXPECT_THROW(rank.round(next), PeerError);
  EXPECT_FALSE(next.pending.operation);
  EXPECT_EQ(rank.coordinator->take().operation, first.operation);
  EXPECT_TRUE(second.ticket->cancel());
  EXPECT_EQ(rank.coordinator->take().operation, second.operation);
  EXPECT_FALSE(second.ticket->cancel()) << "what has been taken";
  EXPECT_TRUE(rank.coordinator->empty());
}

}  // namespace
}  // namespace sparsecomm::test
