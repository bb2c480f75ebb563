// Who waits for whom is said while they wait, more and more rarely, and never once it is over.
#include "engine/stall.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>

#include "simulated_ranks.h"

namespace sparsecomm::test {
namespace {

using std::chrono::milliseconds;

constexpr char const* proposal = "operation=gradient exchange;group=0 from weight;numel=9;step=3";

TEST(WhereaboutsTest, TravelAsTextAndAreValidated) {
  Whereabouts const at{42, true, 3, 61.5, "gradient exchange of group 0 from weight, step 3"};
  auto const back = parse_whereabouts(serialize_whereabouts(at), 4);
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->operation, 42u);
  EXPECT_TRUE(back->running);
  EXPECT_EQ(back->awaited, 3);
  EXPECT_EQ(back->seconds, 61.5);
  EXPECT_EQ(back->what, at.what);
  EXPECT_EQ(back->service, "");
  Whereabouts const beside{42, true, a_service, 61.5, "a sum", "the aggregator at 10.0.0.9:7000"};
  auto const again = parse_whereabouts(serialize_whereabouts(beside), 4);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->awaited, a_service);
  EXPECT_EQ(again->what, "a sum");
  EXPECT_EQ(again->service, beside.service);
  EXPECT_EQ(describe_proposal(proposal), at.what);
  EXPECT_EQ(describe_proposal("operation=calibration"), "calibration");
  EXPECT_EQ(describe_proposal(""), "");
  for (char const* const bytes :
       {"", "nonsense", "1 1", "1 1 4 2\n", "1 1 -5 2\n", "1 1 -3 2\n\na sum",
        "1 1 0 2\nan aggregator\na sum", "1 1 0 -2\n"}) {
    EXPECT_FALSE(parse_whereabouts(bytes, 4).has_value()) << bytes;
  }
}

// Rank 0 waits for rank 1, which waits for rank 2, which has not come.
TEST(DescribeStallTest, TheRanksThatHaveNotComeAreNamedAndWhereTheyAre) {
  Whereabouts const own{42, true, 1, 60, "gradient exchange, step 4"};
  std::vector<std::optional<Whereabouts>> others(4);
  others[1] = {42, true, 2, 59, "gradient exchange, step 4"};
  others[3] = {42, true, everybody, 58, "gradient exchange, step 4"};
  auto const text = [&] { return describe_stall(0, own, others, std::chrono::minutes(30)); };
  EXPECT_EQ(text(),
            "rank 0 has waited for 60 s in operation 42 (gradient exchange, step 4) for rank 2: "
            "nothing is heard of rank 2, after it came to operation 41: it is stopped, cut off or "
            "gone, or was busy until just now. The operation fails after 1800 s");
  others[2] = {41, false, nobody, 71.26, "gradient exchange, step 3"};
  EXPECT_EQ(
      text(),
      "rank 0 has waited for 60 s in operation 42 (gradient exchange, step 4) for rank 2: "
      "rank 2 is in no operation for at least 71 s, its last was operation 41 (gradient exchange, "
      "step 3). The operation fails after 1800 s");
  others[2] = {42, true, nobody, 7.13, ""};
  EXPECT_NE(text().find("for rank 2: rank 2 computes in operation 42 for at least 7.1 s."),
            std::string::npos)
      << text();
  others[3] = {0, false, nobody, 60, ""};
  EXPECT_NE(text().find("for ranks 2, 3: "), std::string::npos) << text();
  EXPECT_NE(text().find("; rank 3 has begun no operation for at least 60 s."), std::string::npos)
      << text();
  // They wait in a circle: a message is missing.
  others[2] = {42, true, 0, 60, "x"};
  others[3] = {42, true, 0, 60, "x"};
  EXPECT_NE(text().find("for rank 1: rank 1 waits for at least 59 s for rank 2 in operation 42"),
            std::string::npos)
      << text();
  others[2] = {43, false, nobody, 60, "x"};
  EXPECT_NE(text().find("for rank 1: "), std::string::npos) << text();
}

TEST(DescribeStallTest, AServiceIsNamedAndTheRanksThatItMayBeWaitingFor) {
  Whereabouts const own{5, true, a_service, 60, "a sum", "the aggregator at 10.0.0.9:7000"};
  std::vector<std::optional<Whereabouts>> others(3);
  others[1] = own;
  others[2] = {5, true, 0, 60, "a sum"};
  auto const text = [&] { return describe_stall(0, own, others, std::chrono::minutes(30)); };
  EXPECT_EQ(text(),
            "rank 0 has waited for 60 s in operation 5 (a sum) for the aggregator at "
            "10.0.0.9:7000. The operation fails after 1800 s");
  others[2] = {4, false, nobody, 61, "a sum"};
  EXPECT_EQ(text(),
            "rank 0 has waited for 60 s in operation 5 (a sum) for the aggregator at "
            "10.0.0.9:7000 and for rank 2: rank 2 is in no operation for at least 61 s, its last "
            "was operation 4 (a sum). The operation fails after 1800 s");
  others[2].reset();
  EXPECT_NE(text().find("and for rank 2: nothing is heard of rank 2, after it came to operation 4"),
            std::string::npos)
      << text();
  // It waits for rank 1, which waits for the service.
  Whereabouts const waiting{5, true, 1, 60, "a sum"};
  others[2] = {4, false, nobody, 61, "a sum"};
  others[1] = {4, true, a_service, 61, "a sum", "the aggregator at 10.0.0.9:7000"};
  EXPECT_NE(describe_stall(0, waiting, others, std::chrono::minutes(30))
                .find("rank 1 waits for at least 61 s for the aggregator at 10.0.0.9:7000 in"),
            std::string::npos);
}

// Calls something before it makes its proposal.
class Proposing final : public Operation {
 public:
  explicit Proposing(std::function<void()> before = [] {}) : before_(std::move(before)) {}
  Proposal prepare() override {
    before_();
    return {.text = proposal};
  }
  void run(Channel&, Agreement const&) override {}

 private:
  std::function<void()> before_;
};

class Logged {
 public:
  explicit Logged(Runtime runtime) : runtime_(runtime) {}

  using Texts = std::vector<std::pair<TimePoint, std::string>>;

  CommunicatorOptions options(Duration limit, Duration timeout) {
    CommunicatorOptions options;
    options.timeout = timeout;
    options.failure_grace = milliseconds(300);
    options.stall = {limit, [this](std::string const& text) {
                       std::lock_guard const lock(mutex_);
                       texts_.emplace_back(runtime_.clock().now(), text);
                       changed_.notify_all();
                     }};
    return options;
  }

  Texts of(int rank) {
    std::lock_guard const lock(mutex_);
    return find(rank);
  }

  // Until the rank has logged so many texts, and one of them has `part`.
  void wait_for(int rank, std::size_t count, std::string_view part) {
    std::unique_lock lock(mutex_);
    bool const came = changed_.wait_for(lock, std::chrono::hours(1), [&] {
      Texts const texts = find(rank);
      return texts.size() >= count && has(texts, part);
    });
    EXPECT_TRUE(came) << "rank " << rank << " does not say '" << part << "'";
  }

  static bool has(Texts const& texts, std::string_view part) {
    return std::ranges::any_of(
        texts, [&](auto const& text) { return text.second.find(part) != std::string::npos; });
  }

 private:
  Texts find(int rank) const {
    Texts found;
    std::ranges::copy_if(texts_, std::back_inserter(found), [&](auto const& text) {
      return text.second.starts_with(concat("rank ", rank, " "));
    });
    return found;
  }

  Runtime const runtime_;
  std::mutex mutex_;
  Condition changed_{runtime_, "a text of the log"};
  Texts texts_;
};

TEST(StallWatchTest, WhoWaitsNamesWhoIsMissingWithBackOffUntilItComes) {
  constexpr Duration limit = milliseconds(150);
  SeededSimulation simulation(1);
  Logged logged(simulation);
  Latch begins(simulation, 2), over(simulation, 3);
  std::vector<TimePoint> began(2);
  std::vector<Logged::Texts> texts(2), later(2);
  expect_no_errors(simulate_ranks(
      simulation, 3,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        communicator.run(std::make_shared<Proposing>());
        if (rank == 2) {
          for (int const waiting : {0, 1})
            logged.wait_for(waiting, 3, "rank 2 is in no operation for at least ");
        } else {
          begins.arrive_and_wait();
          began[rank] = simulation.now();
        }
        communicator.run(std::make_shared<Proposing>());
        over.arrive_and_wait();
        if (rank == 2) return;
        simulation.sleep(2 * limit);  // what was being said has been said
        texts[rank] = logged.of(rank);
        simulation.sleep(4 * limit);  // nobody waits, so nobody speaks
        later[rank] = logged.of(rank);
      },
      logged.options(limit, std::chrono::hours(1))));
  EXPECT_TRUE(logged.of(2).empty());
  for (int const rank : {0, 1}) {
    EXPECT_EQ(later[rank].size(), texts[rank].size());
    EXPECT_TRUE(Logged::has(texts[rank], "its last was operation 1 (gradient exchange of group 0"));
    Duration waited = limit;
    for (auto const& [time, text] : texts[rank]) {
      EXPECT_GE(time - began[rank], waited) << text;
      waited *= 2;
      EXPECT_NE(text.find("in operation 2 (gradient exchange of group 0 from weight, step 3) for "
                          "rank 2: "),
                std::string::npos)
          << text;
      EXPECT_NE(text.find("fails after 3600 s"), std::string::npos) << text;
    }
  }
}

TEST(StallWatchTest, ARankThatComputesIsSaidToAndADeadlineEndsTheWarnings) {
  SeededSimulation simulation(1);
  Logged logged(simulation);
  Latch raised(simulation, 1);
  TimePoint failed;
  expect_no_errors(simulate_ranks(
      simulation, 2,
      [&](Communicator& communicator) {
        bool const slow = communicator.rank() == 1;
        auto const operation = std::make_shared<Proposing>([&] {
          if (slow) raised.wait();
        });
        EXPECT_THROW(communicator.run(operation), Error);
        if (slow) return;
        failed = simulation.now();
        raised.count_down();
        simulation.sleep(std::chrono::minutes(1));
      },
      logged.options(milliseconds(50), std::chrono::seconds(1))));
  Logged::Texts const texts = logged.of(0);
  for (auto const& [time, text] : texts) EXPECT_LE(time, failed) << text;
  EXPECT_TRUE(Logged::has(texts, "for rank 1: rank 1 computes in operation 1 for at least 0."));
  EXPECT_TRUE(logged.of(1).empty());
}

// Waits for a service until it is told to stop.
class Served final : public Operation {
 public:
  explicit Served(Latch& served) : served_(served) {}
  Proposal prepare() override { return {.text = proposal}; }
  void run(Channel& channel, Agreement const&) override {
    auto const waiting = channel.waiting_for("the aggregator at 10.0.0.9:7000");
    served_.wait();
  }

 private:
  Latch& served_;
};

TEST(StallWatchTest, ARankThatWaitsForAServiceSaysSo) {
  SeededSimulation simulation(1);
  Logged logged(simulation);
  Latch served(simulation, 1);
  expect_no_errors(simulate_ranks(
      simulation, 2,
      [&](Communicator& communicator) {
        auto const handle = communicator.submit(std::make_shared<Served>(served));
        if (communicator.rank() == 0) {
          logged.wait_for(0, 1, "for the aggregator at 10.0.0.9:7000. The operation fails");
          served.count_down();
        }
        handle.wait();
      },
      logged.options(milliseconds(50), std::chrono::hours(1))));
}

TEST(StallWatchTest, OfManyRanksFewAsk) {
  EXPECT_TRUE(StallWatch::asks(63, 64));
  int asking = 0;
  for (int rank = 0; rank < 1000; ++rank) asking += StallWatch::asks(rank, 1000) ? 1 : 0;
  EXPECT_EQ(asking, 33);
}

TEST(StallWatchTest, ALimitMustBePositiveAndWhatLoggingThrowsHarmsNobody) {
  auto transports = make_inproc_transports(1);
  EXPECT_THROW(StallWatch(*transports[0], {Duration::zero(), [](auto const&) {}}, Duration::max()),
               InvalidArgument);
  SeededSimulation simulation(1);
  Logged logged(simulation);
  CommunicatorOptions options = logged.options(milliseconds(20), std::chrono::hours(1));
  options.stall.log = [log = options.stall.log](std::string const& text) {
    log(text);
    throw Error("a full disk, say");
  };
  expect_no_errors(simulate_ranks(
      simulation, 2,
      [&](Communicator& communicator) {
        if (communicator.rank() == 1) logged.wait_for(0, 1, "rank 1");
        communicator.run(std::make_shared<Proposing>());
      },
      options));
}

}  // namespace
}  // namespace sparsecomm::test
