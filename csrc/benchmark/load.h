// Load on aggregators: jobs at once, whose workers are threads of this process and reduce as often
// as they can.
#pragma once

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "ina/host.h"
#include "ina/tcp_link.h"

namespace sparsecomm {

struct LoadOptions {
  int jobs = 1;
  int workers = 4;                   // of each job
  std::uint64_t elements = 1 << 18;  // f32, of each reduction
  double zero = 0;                   // share of the blocks that are zero, the same on all workers
  Duration time = std::chrono::seconds(5);  // in which reductions begin
};

// What a job has come to: its reductions, and the time from the first to the end of the last.
struct JobLoad {
  JobId job{};
  std::uint64_t reductions = 0;
  Duration time{};
};

// Connects all workers before any begins. Throws the first error of a worker, after which the
// others end, too.
std::vector<JobLoad> load_aggregators(AggregatorAddresses const& aggregators,
                                      LoadOptions const& options);

}  // namespace sparsecomm
