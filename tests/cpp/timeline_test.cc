// What a communicator records of its operations, and the file that keeps it.
#include "engine/timeline.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/gradient_exchange.h"
#include "engine/timeline_file.h"
#include "gradients.h"
#include "named_sums.h"
#include "ranks.h"
#include "recorded.h"

namespace sparsecomm::test {
namespace {

std::uint64_t sum(Communicator& communicator, std::string const& name) {
  auto const operation = std::make_shared<Sum>(name, 1, true);
  communicator.submit(operation, {}, name).wait();
  return operation->sum;
}

TEST(TimelineTest, ShowsTheStagesOfAGradient) {
  Recorders const recorders(2);
  constexpr std::size_t numel = 1000;
  expect_no_errors(run_ranks(
      2,
      [&](Communicator& communicator) {
        Recorder& recorder = *recorders.all[communicator.rank()];
        ExchangeOptions options;
        options.density = 0.05;
        auto const exchange =
            std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
        std::vector<float> residual(numel, 0.0f);
        auto const step = [&](int number) {
          auto const input =
              patterns[0].make(communicator.rank(), communicator.size(), numel, number);
          std::vector<float> gradient(input.begin(), input.end());
          exchange->bind({{gradient, residual}});
          communicator.submit(exchange, {}, "gradients").wait();
        };
        step(0);
        EXPECT_TRUE(recorder.events.empty() && recorder.rows.empty());
        recorder.set_recording(1);
        step(1);
        step(2);
        recorder.set_recording(0);
        step(3);
      },
      patient_options(), {}, recorders.around()));
  for (auto const& recorder : recorders.all) {
    std::string const one = "negotiate prepare queue run select exchange apply";
    EXPECT_EQ(names(recorder->of("gradients")), one + ' ' + one);
    expect_nested(recorder->of("gradients"));
    for (TimelineEvent const& event : recorder->of("gradients")) {
      if (event.slice == Slice::run) {
        EXPECT_GT(event.figures[0], 0u);
      }
    }
    EXPECT_EQ(recorder->communicators.size(), 1u);
    EXPECT_GE(recorder->of("rounds").size(), 2u);
    expect_nested(recorder->of("rounds"));
  }
}

TEST(TimelineTest, RoundsHaveTheSameNumbersOnAllRanks) {
  Recorders const recorders(3);
  for (auto const& recorder : recorders.all) recorder->set_recording(1);
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        auto const rank = static_cast<std::size_t>(communicator.rank());
        std::vector<std::string> const order{"a", "b", "c"};
        for (int step = 0; step < 5; ++step) {
          std::vector<Communicator::Handle> handles;
          for (std::size_t i = 0; i < 3; ++i) {
            std::string const& name = order[(i + rank) % 3];
            handles.push_back(communicator.submit(
                std::make_shared<Sum>(name, 1, true, nullptr, false), {}, name));
          }
          for (auto const& handle : handles) handle.wait();
          communicator.submit(std::make_shared<Sum>("unnamed", 1, false)).wait();
        }
      },
      patient_options(), {}, recorders.around()));
  auto const rounds_of = [](Recorder const& recorder) {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> rounds;  // number, operations that run
    for (TimelineEvent const& event : recorder.of("rounds")) {
      rounds.emplace_back(event.figures[0], event.figures[2]);
    }
    return rounds;
  };
  auto const first = rounds_of(*recorders.all[0]);
  std::uint64_t runs = 0;
  for (auto const& [number, selected] : first) runs += selected;
  EXPECT_EQ(runs, 20u);
  for (auto const& recorder : recorders.all) {
    EXPECT_EQ(rounds_of(*recorder), first);
    for (auto const& [place, name] : recorder->rows) expect_nested(recorder->of(name));
    auto const runs_of = [&](std::string const& name) {
      return std::ranges::count(recorder->of(name), Slice::run, &TimelineEvent::slice);
    };
    for (std::string const name : {"a", "b", "c", "operations without a name"}) {
      EXPECT_EQ(runs_of(name), 5) << name;
    }
  }
}

TEST(TimelineTest, ShowsWhatIsComparedAndWhatFails) {
  Recorders const recorders(2);
  for (auto const& recorder : recorders.all) recorder->set_recording(1);
  expect_no_errors(run_ranks(
      2,
      [&](Communicator& communicator) {
        EXPECT_EQ(sum(communicator, "x"), 2u);
        EXPECT_EQ(sum(communicator, "x"), 2u);
        std::string const text = communicator.rank() == 0 ? "this" : "that";
        auto const differing = std::make_shared<Sum>(text, 1, true);
        EXPECT_THROW(communicator.submit(differing, {}, "x").wait(), Mismatch);
      },
      patient_options(), {}, recorders.around()));
  for (auto const& recorder : recorders.all) {
    auto const slices = recorder->of("x");
    EXPECT_EQ(names(slices),
              "negotiate prepare queue run compare negotiate prepare queue run "
              "negotiate prepare queue run compare");
    std::vector<bool> failed;
    for (TimelineEvent const& event : slices) {
      if (event.slice == Slice::run) failed.push_back(event.failed);
    }
    EXPECT_EQ(failed, (std::vector{false, false, true}));
  }
}

// A clock that the test sets.
class HandClock final : public Clock {
 public:
  TimePoint now() const override { return TimePoint(std::chrono::seconds(seconds)); }
  int seconds = 1;
};

struct TimelineRowsTest : ::testing::Test {
  TimelineRowsTest() { recorder->set_recording(1); }
  void run(std::string const& name, std::optional<std::size_t> leader = std::nullopt) {
    timeline.begin_run(name, submitted, leader);
    ++clock.seconds;
    timeline.end_run(false, {}, {});
  }
  void round(std::size_t selected) {
    submitted = clock.now();
    TimePoint const began = clock.now();
    ++clock.seconds;
    timeline.end_round(1, began, 1, selected);
    ++clock.seconds;
  }

  HandClock clock;
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();
  Timeline timeline{{recorder, {"a test", {0}}}, 0, clock};
  TimePoint submitted{};
};

TEST_F(TimelineRowsTest, WhatIsExchangedWithAnotherSaysWith) {
  round(3);
  run("leader");
  run("between");
  run("fused", 0);
  auto const slices = recorder->of("fused");
  EXPECT_EQ(names(slices), "negotiate queue fused run");
  auto const leader = recorder->of("leader");
  EXPECT_EQ(slices[2].figures[0], leader.back().row);
  EXPECT_EQ(slices[2].begin, leader.back().begin);
  EXPECT_EQ(slices[1].end, leader.back().begin);
  expect_nested(slices);
}

// As of stand-ins, and of what waits when a recording begins.
TEST_F(TimelineRowsTest, WhatIsNotKnownToHaveBeenSubmittedNegotiatesInItsRound) {
  round(1);
  run("x");
  clock.seconds += 100;
  round(1);
  TimePoint const began = clock.now() - std::chrono::seconds(2);
  submitted = {};
  run("x");
  auto const slices = recorder->of("x");
  EXPECT_EQ(names(slices), "negotiate queue run negotiate queue run");
  EXPECT_EQ(slices[3].begin, began);
}

TEST_F(TimelineRowsTest, AreBounded) {
  for (std::size_t i = 0; i < Timeline::most_rows + 10; ++i) {
    round(1);
    run(std::to_string(i));
  }
  EXPECT_EQ(recorder->rows.size(), Timeline::most_rows + 2);  // the rounds', and that of others
  EXPECT_EQ(recorder->of("operations of further names").size(), 10u);
  expect_nested(recorder->of("operations of further names"));
}

TEST_F(TimelineRowsTest, BelongToOneRecording) {
  round(1);
  timeline.begin_run("x", submitted, std::nullopt);
  recorder->set_recording(2);  // amid an operation
  timeline.begin(Stage::select);
  timeline.end(Stage::select);
  timeline.end_run(false, {}, {});
  run("y");  // of a round that the former one has seen
  std::size_t const before = recorder->events.size();
  recorder->rows.clear();
  round(1);
  run("x");
  for (std::size_t i = before; i < recorder->events.size(); ++i) {
    TimelineEvent const& event = recorder->events[i];
    EXPECT_TRUE(recorder->rows.contains({event.communicator, event.row}));
  }
  EXPECT_EQ(before, 3u);  // the round, and what went before the operation
}

struct TimelineFileTest : ::testing::Test {
  TimelineFileTest() {
    std::string name = (std::filesystem::temp_directory_path() / "timeline-XXXXXX").string();
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    folder = name;
  }
  ~TimelineFileTest() override { std::filesystem::remove_all(folder); }
  std::string path(std::string const& name = "recording.json") const {
    return (folder / name).string();
  }
  std::vector<std::string> lines(std::string const& name = "recording.json") const {
    std::ifstream file(path(name));
    std::vector<std::string> all;
    for (std::string line; std::getline(file, line);) all.push_back(line);
    return all;
  }

  std::filesystem::path folder;
  TimelineFile file;
};

TEST_F(TimelineFileTest, HasALineForEachEvent) {
  file.start(path(), 7);
  EXPECT_NE(file.recording(), 0u);
  std::uint32_t const recording = file.recording();
  file.add_communicator(recording, 1, {"a \"title\"\n", {4, 7}, 3}, 1);
  file.add_row(recording, 1, 2, "back\\slash");
  TimePoint const now = steady_clock().now();
  file.add(recording,
           {1, 2, Slice::run, true, now, now + std::chrono::nanoseconds(1234567), {10, 20}});
  file.stop();
  EXPECT_EQ(file.recording(), 0u);
  auto const written = lines();
  ASSERT_EQ(written.size(), 9u);
  EXPECT_EQ(written.front(), "[");
  EXPECT_EQ(written.back(), "]");
  EXPECT_NE(written[1].find("\"rank\":7,\"unix_ns\":"), std::string::npos) << written[1];
  EXPECT_EQ(
      written[2],
      R"({"ph":"M","pid":1,"tid":0,"name":"process_name","args":{"name":"rank 7: a \"title\"\u000a"}},)");
  EXPECT_NE(written[3].find("\"ranks\":[4,7],\"number\":3"), std::string::npos) << written[3];
  EXPECT_NE(written[4].find(R"({"name":"back\\slash"})"), std::string::npos) << written[4];
  EXPECT_TRUE(
      written[6].starts_with(R"({"ph":"X","name":"run","cat":"sparsecomm","pid":1,"tid":2,)"))
      << written[6];
  EXPECT_TRUE(written[6].ends_with(
      R"("dur":1234.567,"args":{"sent_bytes":10,"received_bytes":20,"failed":true}},)"))
      << written[6];
}

TEST_F(TimelineFileTest, CanBeginAgainAndEndsWithItsOwner) {
  file.start(path("first.json"), 0);
  EXPECT_THROW(file.start(path(), 0), InvalidArgument);
  std::uint32_t const first = file.recording();
  file.stop();
  file.stop();
  file.add(first, {1, 0, Slice::round, false, {}, {}});  // nobody is there to write it
  {
    TimelineFile other;
    other.start(path(), 0);
    other.add(other.recording(), {1, 0, Slice::round, false, {}, steady_clock().now(), {1, 2, 3}});
  }
  EXPECT_EQ(lines().back(), "]");
  EXPECT_NE(lines()[2].find("\"ts\":0.000"), std::string::npos) << "what began before is cut off";
  file.start(path("second.json"), 0);
  EXPECT_NE(file.recording(), first);
  // Threads that know of the former one come late.
  file.add(first, {1, 0, Slice::round, false, {}, {}});
  file.add_communicator(first, 1, {"late", {0}}, 0);
  file.add_row(first, 1, 1, "late");
  file.stop();
  EXPECT_EQ(lines("second.json").size(), 4u);
}

TEST_F(TimelineFileTest, SaysWhatItLacks) {
  TimelineFile small(10);
  small.start(path(), 0);
  TimelineEvent const event{1, 0, Slice::round, false, {}, steady_clock().now(), {1, 2, 3}};
  // The writer may take some of them.
  for (int i = 0; i < 1000; ++i) small.add(small.recording(), event);
  std::string said;
  try {
    small.stop();
  } catch (Error const& error) {
    said = error.what();
  }
  std::size_t const written = lines().size() - 4;
  EXPECT_LT(written, 1000u);
  EXPECT_NE(said.find(concat("lacks ", 1000 - written, " events")), std::string::npos) << said;
}

TEST_F(TimelineFileTest, IsOfOneProcess) {
  file.start(path(), 0);
  TimelineFile other;
  EXPECT_THROW(other.start(path(), 0), Error);
  file.stop();
  other.start(path(), 0);
}

TEST_F(TimelineFileTest, SaysWhereItCannotBeWritten) {
  std::string const nowhere = path("no folder") + "/recording.json";
  try {
    file.start(nowhere, 0);
    FAIL();
  } catch (InvalidArgument const&) {
    FAIL() << "no argument is wrong";
  } catch (Error const& error) {
    EXPECT_NE(std::string(error.what()).find(nowhere), std::string::npos) << error.what();
  }
  EXPECT_EQ(file.recording(), 0u);
  // A device that is always full.
  file.start("/dev/full", 0);
  EXPECT_THROW(file.stop(), Error);
  file.start(path(), 0);
  file.stop();
}

TEST_F(TimelineFileTest, AForkedChildLeavesItAlone) {
  file.start(path(), 0);
  // Until the writer waits for more.
  while (lines().size() < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  pid_t const child = ::fork();
  if (child == 0) {
    file.stop();
    file.~TimelineFile();
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  file.add(file.recording(), {1, 0, Slice::round, false, {}, steady_clock().now(), {1, 2, 3}});
  file.stop();
  EXPECT_EQ(lines().size(), 5u);
}

}  // namespace
}  // namespace sparsecomm::test
