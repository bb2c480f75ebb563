// Aggregators in this process, for ranks that are its threads.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/runtime.h"
#include "ina/host.h"
#include "ina/link.h"

namespace sparsecomm {

class InprocAggregators {
 public:
  InprocAggregators(int count, std::size_t memory, Duration limit,
                    InaPolicy const& policy = vote_policy, Runtime runtime = {});
  ~InprocAggregators();
  InprocAggregators(InprocAggregators const&) = delete;
  InprocAggregators& operator=(InprocAggregators const&) = delete;

  // A worker's link to all of them, which keeps them alive. Throws as InaHost::join().
  std::shared_ptr<AggregatorLink> connect(JobMember const& member);

  // The aggregator is gone: its connections are lost.
  void kill(int aggregator);
  // The same, and another one is in its place, which knows nothing of it.
  void restart(int aggregator);
  // The aggregator takes messages and does nothing any more.
  void stop(int aggregator);
  // Sees each message before it is delivered, and may change it. Called by one thread at a time.
  using Tamper = std::function<void(int aggregator, int worker, bool up, std::span<std::byte>)>;
  void tamper(Tamper with);

  struct Hub;

 private:
  std::shared_ptr<Hub> hub_;
};

}  // namespace sparsecomm
