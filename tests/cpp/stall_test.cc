// Who waits for whom is said while they wait, more and more rarely, and never once it is over.
#include "engine/stall.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>

#include "ranks.h"

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
  EXPECT_EQ(describe_proposal(proposal), at.what);
  EXPECT_EQ(describe_proposal("operation=calibration"), "calibration");
  EXPECT_EQ(describe_proposal(""), "");
  for (char const* const bytes : {"", "nonsense", "1 1", "1 1 4 2\n", "1 1 -3 2\n", "1 1 0 -2\n"}) {
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

// Sleeps before it makes its proposal, on one rank.
class Sleeping final : public Operation {
 public:
  explicit Sleeping(Duration time) : time_(time) {}
  Proposal prepare() override {
    std::this_thread::sleep_for(time_);
    return {.text = proposal};
  }
  void run(Channel&, Agreement const&) override {}

 private:
  Duration time_;
};

struct Logged {
  std::mutex mutex;
  std::vector<std::pair<TimePoint, std::string>> texts;

  CommunicatorOptions options(Duration limit, Duration timeout) {
    CommunicatorOptions options;
    options.timeout = timeout;
    options.failure_grace = milliseconds(300);
    options.stall = {limit, [this](std::string const& text) {
                       std::lock_guard const lock(mutex);
                       texts.emplace_back(steady_clock().now(), text);
                     }};
    return options;
  }
};

// The last of them: by then, even on a loaded machine, all ranks have said where they are.
std::string last_of(Logged const& logged, int rank) {
  std::string last;
  for (auto const& [time, text] : logged.texts) {
    if (text.starts_with(concat("rank ", rank, " "))) last = text;
  }
  return last;
}

TEST(StallWatchTest, WhoWaitsNamesWhoIsMissingWithBackOffUntilItComes) {
  Logged logged;
  std::size_t count = 0;
  TimePoint const start = steady_clock().now();
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        communicator.run(std::make_shared<Sleeping>(milliseconds(0)));
        if (communicator.rank() == 2) std::this_thread::sleep_for(milliseconds(1500));
        communicator.run(std::make_shared<Sleeping>(milliseconds(0)));
        std::this_thread::sleep_for(milliseconds(200));  // nobody waits, so nobody speaks
        if (communicator.rank() == 0) {
          std::lock_guard const lock(logged.mutex);
          count = logged.texts.size();
        }
      },
      logged.options(milliseconds(150), std::chrono::seconds(30))));
  // At 150, 300, 600 and 1200 ms, on two ranks; a loaded machine may be late.
  EXPECT_GE(count, 4u);
  EXPECT_LE(count, 8u);
  EXPECT_EQ(logged.texts.size(), count);
  for (auto const& [time, text] : logged.texts) {
    EXPECT_GE(time - start, milliseconds(150));
    EXPECT_NE(text.find("in operation 2 (gradient exchange of group 0 from weight, step 3) for "
                        "rank 2: "),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("fails after 30 s"), std::string::npos) << text;
  }
  for (int const rank : {0, 1}) {
    std::string const text = last_of(logged, rank);
    EXPECT_NE(text.find("rank 2 is in no operation for at least "), std::string::npos) << text;
    EXPECT_NE(text.find("its last was operation 1 (gradient exchange of group 0"),
              std::string::npos)
        << text;
  }
}

TEST(StallWatchTest, ARankThatComputesIsSaidToAndADeadlineEndsTheWarnings) {
  Logged logged;
  std::vector<TimePoint> failed(2);
  expect_no_errors(run_ranks(
      2,
      [&](Communicator& communicator) {
        bool const slow = communicator.rank() == 1;
        EXPECT_THROW(communicator.run(std::make_shared<Sleeping>(milliseconds(slow ? 900 : 0))),
                     Error);
        failed[communicator.rank()] = steady_clock().now();
        std::this_thread::sleep_for(milliseconds(slow ? 0 : 300));
      },
      logged.options(milliseconds(100), milliseconds(500))));
  ASSERT_FALSE(logged.texts.empty());
  for (auto const& [time, text] : logged.texts) {
    EXPECT_LT(time, failed[0]);
    EXPECT_NE(text.find("rank 0 has waited for 0."), std::string::npos) << text;
  }
  EXPECT_NE(last_of(logged, 0).find("for rank 1: rank 1 computes in operation 1 for at least 0."),
            std::string::npos)
      << last_of(logged, 0);
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
  CommunicatorOptions options;
  options.stall = {milliseconds(20), [](std::string const&) { throw Error("a full disk, say"); }};
  expect_no_errors(run_ranks(
      2,
      [](Communicator& communicator) {
        std::this_thread::sleep_for(milliseconds(100 * communicator.rank()));
        communicator.run(std::make_shared<Sleeping>(milliseconds(0)));
      },
      options));
}

}  // namespace
}  // namespace sparsecomm::test
