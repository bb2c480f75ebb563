#include "benchmark/load.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <exception>
#include <mutex>
#include <span>
#include <thread>

#include "base/error.h"
#include "engine/join_aggregators.h"
#include "ina/client.h"

namespace sparsecomm {
namespace {

// Ones in the first blocks, zeros in the others. The first element is the workers' own.
std::vector<float> make_input(InaPlan const& plan, double zero) {
  std::vector<float> input(plan.elements);
  double const blocks = static_cast<double>(plan.blocks()) * (1 - zero);
  std::size_t const in_block = plan.block_bytes / sizeof(float);
  auto const ones = std::min(input.size(), static_cast<std::size_t>(blocks) * in_block);
  std::fill_n(input.begin(), ones, 1.F);
  input[0] = 0;
  return input;
}

class Load {
 public:
  Load(AggregatorAddresses const& aggregators, LoadOptions const& options)
      : aggregators_(aggregators),
        options_(options),
        loads_(static_cast<std::size_t>(options.jobs)),
        connected_(std::ptrdiff_t{options.jobs} * options.workers) {
    for (JobLoad& load : loads_) load.job = draw_job();
  }

  std::vector<JobLoad> run() {
    {
      std::vector<std::jthread> threads;
      for (JobLoad& load : loads_) {
        for (int worker = 0; worker < options_.workers; ++worker) {
          try {
            threads.emplace_back([this, &load, worker] { work(load, worker); });
          } catch (...) {
            fail();
            connected_.arrive_and_drop();
          }
        }
      }
    }
    if (error_) std::rethrow_exception(error_);
    return loads_;
  }

 private:
  void work(JobLoad& load, int worker) {
    bool waits = true;
    try {
      JobMember const member{.job = load.job,
                             .workers = static_cast<std::uint16_t>(options_.workers),
                             .worker = static_cast<std::uint16_t>(worker)};
      Deadline const deadline(steady_clock(), aggregators_.connect_timeout);
      InaClient client(connect_aggregators(aggregators_.addresses, member, deadline,
                                           aggregators_.messages, aggregators_.prove),
                       worker);
      waits = false;
      connected_.arrive_and_wait();
      if (!failed_.load()) reduce(client, load, worker);
    } catch (...) {
      fail();
      if (waits) connected_.arrive_and_drop();
    }
  }

  void fail() {
    std::lock_guard const lock(mutex_);
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }

  // The first worker ends the job: its first element is not zero in the last reduction.
  void reduce(InaClient& client, JobLoad& load, int worker) {
    InaPlan const plan{.elements = options_.elements,
                       .workers = static_cast<std::uint16_t>(options_.workers)};
    std::vector<float> input = make_input(plan, options_.zero);
    std::vector<float> output(input.size());
    TimePoint const begin = steady_clock().now();
    std::uint64_t reductions = 0;
    while (output[0] == 0) {
      bool const over = failed_.load() || steady_clock().now() - begin >= options_.time;
      if (worker == 0 && over) input[0] = 1;
      output[0] = 0;
      client.reduce(plan, std::as_bytes(std::span(input)),
                    std::as_writable_bytes(std::span(output)),
                    {steady_clock(), aggregators_.connect_timeout});
      ++reductions;
    }
    if (worker != 0) return;
    load.reductions = reductions;
    load.time = steady_clock().now() - begin;
  }

  AggregatorAddresses const& aggregators_;
  LoadOptions const& options_;
  std::vector<JobLoad> loads_;
  std::barrier<> connected_;
  std::mutex mutex_;
  std::exception_ptr error_;
  std::atomic<bool> failed_ = false;
};

}  // namespace

std::vector<JobLoad> load_aggregators(AggregatorAddresses const& aggregators,
                                      LoadOptions const& options) {
  require(options.jobs > 0 && options.workers > 0 && options.workers <= 1024,
          "load: ", options.jobs, " jobs of ", options.workers,
          " workers, must be at least 1, and at most 1024 workers");
  require(options.elements > 0 && options.zero >= 0 && options.zero <= 1,
          "load: ", options.elements, " elements, of whose blocks a share of ", options.zero,
          " is zero; must be at least 1, and 0 to 1");
  return Load(aggregators, options).run();
}

}  // namespace sparsecomm
