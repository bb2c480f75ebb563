// That figures are agreed, measured once, and within the time that they may take.
#include "engine/calibration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <string>

#include "engine/in_turn.h"
#include "engine/link_model.h"
#include "engine/sparse_collectives.h"
#include "ranks.h"
#include "services.h"
#include "transport/wrapped.h"

namespace sparsecomm::test {
namespace {

// A rank on a machine where a thread gets one `slowdown`-th of a core: time is what this thread has
// computed, so many times, and what its messages have taken.
class BusyClock final : public Clock {
 public:
  explicit BusyClock(double slowdown) : slowdown_(slowdown) {}
  TimePoint now() const override {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    double const computed =
        static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
    return TimePoint() + std::chrono::duration_cast<Duration>(
                             std::chrono::duration<double>(slowdown_ * computed + messages_));
  }
  void pass(double seconds) { messages_ += seconds; }

 private:
  double slowdown_;
  double messages_ = 0;
};

struct SimulatedLink {
  double message;  // seconds that one takes, and a rank that waits for a core
  double byte;
  std::size_t swift = SIZE_MAX;  // messages of as many bytes or more wait for nothing
};

// Lets the rank's clock run for every message.
class SimulatedTransport final : public WrappedTransport {
 public:
  SimulatedTransport(std::unique_ptr<Transport> inner, SimulatedLink link, BusyClock& clock)
      : WrappedTransport(std::move(inner)), link_(link), clock_(clock) {}

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    double const waited = bytes.size() < link_.swift ? link_.message : 0;
    clock_.pass(waited + link_.byte * static_cast<double>(bytes.size()));
    return WrappedTransport::do_isend(peer, tag, bytes);
  }

 private:
  SimulatedLink link_;
  BusyClock& clock_;
};

// A difference of two times may be less than what disturbs them, and is 0 then; so is a byte's time
// where there is one rank, and what there are no aggregators for.
bool is_difference(std::string_view figure) {
  return figure == "round" || figure == "message" || figure == "byte" || figure == "pack" ||
         figure == "momentum" || figure.starts_with("aggregator_");
}

void expect_measured(Figures const& figures) {
  auto const values = figures.values();
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_TRUE(values[i] > 0 || (values[i] == 0 && is_difference(Figures::names[i])))
        << Figures::names[i] << " took " << values[i] << " s";
  }
}

// A task run twice in a row would find in the cache what it has touched itself.
TEST(CalibrationTest, TasksThatAreMeasuredTogetherRunInTurn) {
  for (int const until_late : {0, 1, 2, 100}) {
    SCOPED_TRACE(until_late);
    double clock = 0;
    int rounds = 0;
    std::string order;
    auto const times = times_in_turn([&] { return clock; }, [&] { return rounds > until_late; },
                                     [&] {
                                       order += 'a';
                                       constexpr double took[] = {5, 1, 2};
                                       clock += took[rounds];
                                     },
                                     [&] {
                                       order += 'b';
                                       constexpr double took[] = {10, 30, 20};
                                       clock += took[rounds++];
                                     });
    int const expected = std::min(until_late + 1, 3);
    std::string turns;
    for (int round = 0; round < expected; ++round) turns += "ab";
    EXPECT_EQ(order, turns);
    constexpr double medians[][2] = {{5, 10}, {5, 30}, {2, 20}};
    EXPECT_EQ(times[0], medians[expected - 1][0]);
    EXPECT_EQ(times[1], medians[expected - 1][1]);
  }
}

TEST(CalibrationTest, AllRanksGetTheSameFiguresOnce) {
  for (int const ranks : {1, 2, 3, 4}) {
    std::vector<Figures> figures(ranks);
    auto transports = make_inproc_transports(ranks);
    expect_no_errors(on_threads(ranks, [&](int rank) {
      BusyClock clock(1);
      Communicator communicator(
          std::make_unique<SimulatedTransport>(std::move(transports[rank]),
                                               SimulatedLink{20e-6, 8e-10}, clock),
          patient_options(), &clock);
      auto const calibration = std::make_shared<Calibration>(communicator);
      communicator.run(calibration);
      figures[rank] = calibration->figures();
      auto const sent = Counters::total(communicator.counters().sent_messages);
      communicator.run(calibration);
      EXPECT_EQ(Counters::total(communicator.counters().sent_messages) - sent,
                agreement_cost(ranks, 0).messages)
          << "measured a second time";
    }));
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(figures[rank].values(), figures[0].values());
    }
    expect_measured(figures[0]);
    if (ranks > 1) {
      EXPECT_GT(figures[0].link.round + figures[0].link.message, 0);
      EXPECT_GT(figures[0].link.byte, 0);
    }
  }
}

TEST(CalibrationTest, WithAggregatorsAllRanksGetTheirFiguresToo) {
  constexpr int ranks = 3;
  std::vector<Figures> figures(ranks);
  std::atomic<double> longest = 0;
  expect_no_errors(run_ranks(
      ranks,
      [&](Communicator& communicator) {
        auto const calibration = std::make_shared<Calibration>(communicator);
        TimePoint const begin = steady_clock().now();
        communicator.run(calibration);
        std::chrono::duration<double> const took = steady_clock().now() - begin;
        if (communicator.rank() == 0) longest = took.count();
        figures[communicator.rank()] = calibration->figures();
      },
      patient_options(), std::nullopt, with_aggregators()));
  for (Figures const& of : figures) EXPECT_EQ(of.values(), figures[0].values());
  EXPECT_GT(figures[0].aggregators.round, 0);
  EXPECT_GT(figures[0].aggregators.byte, 0);
  EXPECT_LT(longest, std::chrono::duration<double>(calibration_allowance).count());
}

// By clocks that count what is simulated alone, not what this machine computes.
TEST(CalibrationTest, FindsWhatAByteTakesAlsoWhereSmallMessagesWaitForACore) {
  constexpr int ranks = 8;
  constexpr SimulatedLink links[] = {{20e-6, 8e-10},     {20e-6, 8e-9},       {200e-6, 8e-8},
                                     {3e-3, 8e-8},       {5e-4, 8e-10, 4096}, {1e-3, 8e-10, 4096},
                                     {2e-3, 8e-9, 4096}, {5e-3, 8e-10, 4096}};
  for (SimulatedLink const& link : links) {
    SCOPED_TRACE(concat(link.message, " s and ", link.byte, " s/B"));
    std::vector<Figures> figures(ranks);
    auto transports = make_inproc_transports(ranks);
    expect_no_errors(on_threads(ranks, [&](int rank) {
      BusyClock clock(0);
      SimulatedTransport transport(std::move(transports[rank]), link, clock);
      Channel channel(transport, 1, Deadline(clock, std::chrono::hours(1)));
      CalibrationBuffers buffers;
      figures[rank] = calibrate(channel, clock, buffers);
    }));
    EXPECT_GT(figures[0].link.byte, 0.9 * link.byte);
    EXPECT_LT(figures[0].link.byte, 1.1 * link.byte);
  }
}

// Every message takes a tenth of a second, and measuring more of them than the operation has time
// for.
TEST(CalibrationTest, TakesNothingOfTheTimeOfTheOperationThatNeedsIt) {
  auto transports = make_inproc_transports(2);
  expect_no_errors(on_threads(2, [&](int rank) {
    BusyClock clock(0);
    CommunicatorOptions const options{.timeout = std::chrono::milliseconds(800)};
    Communicator communicator(std::make_unique<SimulatedTransport>(std::move(transports[rank]),
                                                                   SimulatedLink{0.1, 0}, clock),
                              options, &clock);
    auto const operation = std::make_shared<AllreduceOperation<float>>(communicator);
    std::vector<float> data(10, 1.0f);
    operation->configure({"", data.size()});
    operation->bind(std::span(data));
    communicator.run(operation);
    EXPECT_EQ(data, std::vector<float>(10, 2.0f));
    double const took = std::chrono::duration<double>(clock.now() - TimePoint()).count();
    EXPECT_GT(took, 0.8) << "which leaves nothing to postpone";
  }));
}

struct Setting {
  SimulatedLink link;
  double slowdown;
};

TEST(CalibrationTest, TakesLessThan300MillisecondsOnSlowLinksAndBusyMachines) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "under a sanitizer everything takes longer";
#endif
  int const ranks = 8;
  constexpr Setting settings[] = {
      {{20e-6, 8e-10}, 1},  // finds a machine that was idle
      {{20e-6, 8e-10}, 1},  // 10 Gbit/s, a core for each rank
      {{20e-6, 8e-9}, 4},   // 8 ranks on two cores
      {{200e-6, 8e-8}, 1},  // 100 Mbit/s
      {{500e-6, 8e-8}, 4},  //
      {{3e-3, 8e-8}, 12},   // 24 on two cores, who wait for a core at every message
  };
  for (Setting const& setting : settings) {
    SCOPED_TRACE(concat(setting.link.byte, " s/B, ", setting.slowdown, " times slower"));
    auto transports = make_inproc_transports(ranks);
    std::vector<std::exception_ptr> errors(ranks);
    std::vector<std::uint64_t> messages(ranks);
    std::vector<Figures> figures(ranks);
    std::vector<std::thread> threads;
    threads.reserve(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          BusyClock clock(setting.slowdown);
          CalibrationBuffers buffers;
          SimulatedTransport transport(std::move(transports[rank]), setting.link, clock);
          TimePoint const start = clock.now();
          Channel channel(transport, 1, Deadline(clock, std::chrono::hours(1)));
          figures[rank] = calibrate(channel, clock, buffers);
          double const took = std::chrono::duration<double>(clock.now() - start).count();
          EXPECT_LT(took, 0.3) << "rank " << rank;
          messages[rank] = Counters::total(transport.counters().sent_messages);
        } catch (...) {
          errors[rank] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    expect_no_errors(errors);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(messages[rank], messages[0]) << "rank " << rank;
      EXPECT_EQ(figures[rank].values(), figures[0].values()) << "rank " << rank;
    }
    EXPECT_LE(messages[0], 63 * 3 + 16 * 7u);
    expect_measured(figures[0]);
    EXPECT_GT(figures[0].link.round + figures[0].link.message, 0);
  }
}

}  // namespace
}  // namespace sparsecomm::test
