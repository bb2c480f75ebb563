// Aggregators that are programs of their own die or stop amid operations over TCP.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <random>
#include <thread>

#include "aggregated_steps.h"
#include "ina/tcp_link.h"
#include "transport/process.h"

namespace sparsecomm::test {
namespace {

// Ends when this does.
class Program {
 public:
  Program() {
    std::array<int, 2> ends{};
    require<Error>(::pipe2(ends.data(), O_CLOEXEC) == 0, "no pipe");
    FileDescriptor const reads(ends[0]);
    FileDescriptor writes(ends[1]);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, writes.get(), STDOUT_FILENO);
    std::string path = SPARSECOMM_AGGREGATOR, listen = "--listen", where = "127.0.0.1:0",
                way = "--transport", tcp = "tcp";
    std::array<char*, 6> arguments{path.data(), listen.data(), where.data(),
                                   way.data(),  tcp.data(),    nullptr};
    int const error =
        ::posix_spawn(&process_, path.c_str(), &actions, nullptr, arguments.data(), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    require<Error>(error == 0, "cannot start ", path, ": error ", error);
    writes = FileDescriptor();
    std::string line;
    for (char letter = 0; letter != '\n' && ::read(reads.get(), &letter, 1) == 1;) line += letter;
    constexpr std::string_view begin = "listening at ";
    if (!line.starts_with(begin) || !line.ends_with('\n')) {
      signal(SIGKILL);
      throw Error(concat("the program says '", line, "'"));
    }
    address_ = line.substr(begin.size(), line.size() - begin.size() - 1);
  }
  ~Program() {
    signal(SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  Program(Program const&) = delete;
  Program& operator=(Program const&) = delete;

  std::string const& address() const { return address_; }
  void signal(int number) const { ::kill(process_, number); }

 private:
  pid_t process_ = -1;
  std::string address_;
};

struct Seen {
  std::vector<std::string> log;
  std::vector<AggregatorLoss> lost;
  int steps = 0;
};

// The first step in which a program gets the signal, and the time from its beginning.
struct Blow {
  std::size_t program;
  int number;
  int step;
  std::chrono::microseconds delay;
};

constexpr int ranks = 3;
constexpr int steps = 30;
constexpr int last_steps = 25;  // all signals have come before these

// All steps have their sums on all ranks, and each program that was hit is named once.
void check(std::vector<Blow> const& blows) {
  std::size_t const numel = 60000;
  std::array<Program, 2> programs;
  std::vector const addresses{programs[0].address(), programs[1].address()};
  std::vector<Seen> seen(ranks);
  std::atomic<int> step_of_first = -1;
  std::atomic<std::size_t> landed = 0;
  std::atomic<bool> over = false;
  std::thread striker([&] {
    for (Blow const& blow : blows) {
      while (step_of_first < blow.step && !over) std::this_thread::yield();
      std::this_thread::sleep_for(blow.delay);
      programs[blow.program].signal(blow.number);
      ++landed;
    }
  });
  Surroundings around;
  around.equip = [&](CommunicatorOptions& options, std::uint64_t run, int rank, int size) {
    MessageOptions over_tcp;
    over_tcp.transport = MessageTransport::tcp;
    JobMember const member{.job = {run, 0},
                           .workers = static_cast<std::uint16_t>(size),
                           .worker = static_cast<std::uint16_t>(rank)};
    options.aggregators = connect_aggregators(addresses, member, soon(), over_tcp);
    // One that is killed is noticed at once, and one that is stopped by the patience alone.
    bool const stops =
        std::ranges::any_of(blows, [](auto& blow) { return blow.number == SIGSTOP; });
    options.aggregator_patience = stops ? patiently(std::chrono::milliseconds(1500)) : long_time();
    options.log_aggregator = [&seen, rank](std::string const& line) {
      seen[rank].log.push_back(line);
    };
  };
  auto const start = std::chrono::steady_clock::now();
  expect_no_errors(run_ranks(
      ranks,
      [&](Communicator& communicator) {
        int const rank = communicator.rank();
        auto const operation =
            std::make_shared<AggregatedSum<float>>(communicator, AlgorithmOptions{});
        for (int step = 0; step < steps; ++step) {
          if (rank == 0) step_of_first = step;
          while (step == last_steps && landed < blows.size() && !over) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          auto data = aggregated_input<float>(rank, ranks, step, numel);
          operation->bind(data);
          communicator.run(operation);
          ASSERT_EQ(data, aggregated_sum<float>(ranks, step, numel)) << "in step " << step;
          ++seen[rank].steps;
        }
        seen[rank].lost = communicator.lost_aggregators();
      },
      patient_options(), {}, around));
  over = true;
  striker.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, long_time() / 2);
  for (Seen const& rank : seen) {
    EXPECT_EQ(rank.steps, steps);
    ASSERT_EQ(rank.lost.size(), blows.size());
    ASSERT_EQ(rank.log.size(), blows.size());
    for (std::size_t i = 0; i < blows.size(); ++i) {
      EXPECT_EQ(rank.lost[i].address, addresses[blows[i].program]);
      EXPECT_NE(rank.log[i].find(addresses[blows[i].program]), std::string::npos) << rank.log[i];
    }
  }
}

// At some moment amid a step.
Blow blow(std::size_t program, int number, int step, unsigned seed) {
  std::mt19937 random(seed);
  return {program, number, step, std::chrono::microseconds(random() % 3000)};
}

TEST(InaProcess, OneThatIsKilledIsNamedAndTheOtherGoesOn) {
  for (unsigned seed = 0; seed < 3; ++seed) check({blow(seed % 2, SIGKILL, 10, seed)});
}

TEST(InaProcess, OneThatIsStoppedIsNamedAndTheOtherGoesOn) {
  for (unsigned seed = 0; seed < 2; ++seed) check({blow(seed, SIGSTOP, 10, seed)});
}

TEST(InaProcess, WithoutAnyTheRanksGoOnAlone) {
  check({blow(0, SIGKILL, 5, 1), blow(1, SIGSTOP, 15, 2)});
}

}  // namespace
}  // namespace sparsecomm::test
