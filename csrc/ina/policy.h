// The rule by which workers and aggregators agree on the blocks of each round: the two machines
// that follow it. Links, client, host and server are the same under each.
#pragma once

#include <memory>

#include "ina/aggregator.h"
#include "ina/worker.h"
#include "ina/worker_machine.h"

namespace sparsecomm {

struct InaPolicy {
  std::unique_ptr<WorkerMachine> (*make_worker)();
  std::unique_ptr<InaAggregator> (*make_aggregator)(InaPlan const& largest);
};

template <class Worker, class Aggregator>
inline constexpr InaPolicy policy_of = {
    .make_worker = []() -> std::unique_ptr<WorkerMachine> { return std::make_unique<Worker>(); },
    .make_aggregator = [](InaPlan const& largest) -> std::unique_ptr<InaAggregator> {
      return std::make_unique<Aggregator>(largest);
    }};

// Ours: workers vote for their next blocks. Source: Gu et al. 2024 (OmNICCL), section 2.
inline constexpr InaPolicy const& vote_policy = policy_of<InaWorker, InaAggregator>;

}  // namespace sparsecomm
