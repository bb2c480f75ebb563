// Simulates steps in which a rank fails, one for each seed, which draws the algorithm, the number
// of ranks, and which of them fails at which of its messages and how: `make explore`. Or
// allreduces through aggregators, of which one fails, or a rank does, in the same way. Or
// operations with names, which ranks submit in any order, amid which a rank fails or lacks one.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <string_view>
#include <thread>
#include <tuple>

#include "failing_aggregators.h"
#include "failing_names.h"
#include "simulated_failures.h"

namespace sparsecomm::test {
namespace {

struct ExploreOptions {
  std::string_view faults = "ranks";
  std::uint64_t first = 0, seeds = 10000;
  double minutes = 60;
};

constexpr char const* usage =
    "usage: explore [--faults ranks|aggregators|names] [--seed FIRST] [--seeds COUNT] [--minutes "
    "LIMIT]\n"
    "Exit status 1: some seed has violated a contract; `explore --seed IT --seeds 1` repeats it.\n";

template <class T>
T parse_number(std::string_view name, std::string_view text) {
  T value{};
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc{} && end == text.data() + text.size() && value >= 0, name, " is \"",
          text, "\", must be a number of 0 or more");
  return value;
}

ExploreOptions parse_options(std::vector<std::string_view> const& words) {
  ExploreOptions options;
  require(words.size() % 2 == 0, "an option without a value; ", usage);
  for (std::size_t i = 0; i < words.size(); i += 2) {
    std::string_view const name = words[i], value = words[i + 1];
    if (name == "--faults") {
      options.faults = value;
      require(value == "ranks" || value == "aggregators" || value == "names", name, " is \"", value,
              "\", must be ranks, aggregators or names");
    } else if (name == "--seed") {
      options.first = parse_number<std::uint64_t>(name, value);
    } else if (name == "--seeds") {
      options.seeds = parse_number<std::uint64_t>(name, value);
    } else if (name == "--minutes") {
      options.minutes = parse_number<double>(name, value);
    } else {
      throw InvalidArgument(concat("no such option: ", name, "; ", usage));
    }
  }
  return options;
}

// Glibc keeps the stacks of threads that have ended, if they are not too large, for the next ones.
void make_threads_cheap() {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, std::size_t{512} << 10);
  pthread_setattr_default_np(&attributes);
  pthread_attr_destroy(&attributes);
}

std::vector<int> usable_cores() {
  cpu_set_t usable;
  require(sched_getaffinity(0, sizeof(usable), &usable) == 0, "the cores are not known");
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &usable)) cores.push_back(core);
  }
  return cores;
}

// And so do the threads that this one starts: of a simulation one runs at a time, and hands over to
// the next.
void stay_on(int core) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  sched_setaffinity(0, sizeof(only), &only);
}

class Explorer {
 public:
  explicit Explorer(ExploreOptions options) : options_(options), next_(options.first) {}

  // True if no seed has violated a contract.
  bool run() {
    auto const begin = std::chrono::steady_clock::now();
    end_ = begin + std::chrono::duration_cast<Duration>(
                       std::chrono::duration<double, std::ratio<60>>(options_.minutes));
    std::vector<std::thread> threads;
    for (int const core : usable_cores()) {
      threads.emplace_back([this, core] {
        stay_on(core);
        explore();
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::chrono::duration<double> const seconds = std::chrono::steady_clock::now() - begin;
    std::cout << done_ << " faults from seed " << options_.first << " in " << seconds.count()
              << " s: " << violations_ << " violations\n";
    return violations_ == 0;
  }

 private:
  void explore() {
    for (;;) {
      std::uint64_t const seed = next_++;
      if (seed - options_.first >= options_.seeds) return;
      if (std::chrono::steady_clock::now() >= end_) return;
      std::string const violation = options_.faults == "aggregators"
                                        ? violation_of_aggregators(seed)
                                    : options_.faults == "names" ? violation_of_names(seed)
                                                                 : violation_of_ranks(seed);
      ++done_;
      if (violation.empty()) continue;
      ++violations_;
      std::lock_guard const lock(mutex_);
      std::cout << violation << "\n" << std::flush;
    }
  }

  // Empty: none.
  template <class Simulate>
  static std::string violation_of(std::string const& run, Simulate const& simulate) {
    std::string violation;
    try {
      violation = simulate();
    } catch (std::exception const& error) {
      violation = error.what();
    }
    return violation.empty() ? "" : concat(run, ": ", violation);
  }

  std::string violation_of_ranks(std::uint64_t seed) {
    FailingRun const run = draw(seed);
    return violation_of(describe(run), [&] { return find_violation(run, simulate_failure(run)); });
  }

  static std::string violation_of_aggregators(std::uint64_t seed) {
    using Kind = LinkFault::Kind;
    constexpr Kind kinds[] = {Kind::lost,     Kind::restart,   Kind::silent, Kind::corrupt,
                              Kind::truncate, Kind::duplicate, Kind::former, Kind::die};
    std::mt19937_64 random(seed);
    auto const below = [&](int most) { return static_cast<int>(random() % std::uint64_t(most)); };
    FailingAggregators::Shape const shape{.ranks = 2 + below(4), .aggregators = 1 + below(3)};
    LinkFault fault{.kind = kinds[below(std::size(kinds))],
                    .aggregator = below(shape.aggregators),
                    .rank = below(shape.ranks),
                    .operation = 1 + below(FailingAggregators::steps - 1),
                    .message = below(FailingAggregators::messages_of_a_step),
                    .byte = below(160)};
    // One rank dies at a time, and an aggregator restarts for all.
    bool const of_all = fault.kind != Kind::die && (fault.kind == Kind::restart || below(2) == 0);
    if (of_all) fault.rank = LinkFault::every_rank;
    int const retry = 1 + below(3);
    bool const integers = below(2) == 0;
    return violation_of(concat("seed ", seed, ": ", describe(shape, fault), ", retry ", retry),
                        [&] {
                          FailingAggregators run(shape, fault, seed);
                          run.retry = retry;
                          for (std::exception_ptr const& error : run.run({}, integers)) {
                            if (error) std::rethrow_exception(error);
                          }
                          return find_violation(run);
                        });
  }

  static std::string violation_of_names(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    auto const below = [&](int most) { return static_cast<int>(random() % std::uint64_t(most)); };
    NamesRun run{.ranks = 2 + below(5),
                 .names = 1 + std::size_t(below(8)),
                 .cached = 1 + std::size_t(below(10)),
                 .seed = seed};
    run.lacking = below(run.ranks);
    if (below(5) > 0) {
      auto const kind = static_cast<NetworkFault::Kind>(below(NetworkFault::kinds));
      run.fault.emplace(below(run.ranks), kind, std::uint64_t(below(120)));
    }
    return violation_of(describe(run), [&] { return find_violation(run, simulate_names(run)); });
  }

  FailingRun draw(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    auto const rows = algorithms();
    FailingRun run{.algorithm = std::string(rows[random() % rows.size()].name),
                   .ranks = 2 + static_cast<int>(random() % 7),
                   .seed = seed};
    run.fault.rank = static_cast<int>(random() % static_cast<std::uint64_t>(run.ranks));
    run.fault.kind = static_cast<NetworkFault::Kind>(random() % NetworkFault::kinds);
    run.fault.message = random() % messages_of(run);
    return run;
  }

  // That the rank at fault sends in two steps.
  std::uint64_t messages_of(FailingRun const& run) {
    std::lock_guard const lock(mutex_);
    auto const [place, is_new] =
        messages_.try_emplace({run.algorithm, run.ranks, run.fault.rank}, 0);
    if (is_new) {
      place->second = messages_of_two_steps(run.algorithm, run.ranks, run.numel, run.fault.rank);
    }
    return place->second;
  }

  ExploreOptions const options_;
  TimePoint end_{};
  std::atomic<std::uint64_t> next_, done_ = 0, violations_ = 0;
  std::mutex mutex_;  // of the output, and of what follows
  std::map<std::tuple<std::string, int, int>, std::uint64_t> messages_;
};

}  // namespace
}  // namespace sparsecomm::test

int main(int count, char** words) {
  using namespace sparsecomm::test;
  try {
    make_threads_cheap();
    return Explorer(parse_options({words + 1, words + count})).run() ? 0 : 1;
  } catch (std::exception const& error) {
    std::cerr << "explore: " << error.what() << "\n";
    return 2;
  }
}
