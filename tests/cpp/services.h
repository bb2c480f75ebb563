// A transport whose engine has an allreduce of its own, over inproc: the dense one of
// collectives/dense.h on the same messages, so that faults meet them too. They are counted.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "collectives/algorithm.h"
#include "ina/inproc_link.h"
#include "ranks.h"
#include "transport/wrapped.h"

namespace sparsecomm::test {

class ReducingTransport final : public WrappedTransport, public NativeAllreduce {
 public:
  using WrappedTransport::WrappedTransport;

  NativeAllreduce* native() override { return this; }
  void allreduce(std::span<std::byte> bytes, DType dtype, Reduction reduction,
                 Deadline const& deadline) override {
    auto const reduce = [&]<class T>() {
      Channel channel(*this, ++operation_, deadline);
      std::span const data(reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T));
      auto const dense = find_algorithm("dense").dense->make<T>({}, {});
      dense->run(channel, data, reduction, 1);
      dense->write(data);
    };
    if (dtype == DType::i32) return reduce.template operator()<std::int32_t>();
    if (dtype == DType::i64) return reduce.template operator()<std::int64_t>();
    visit_dtype(dtype, reduce);
  }

 private:
  std::uint32_t operation_ = 1u << 27;  // far from the communicator's
};

// Two aggregators in this process.
inline Surroundings with_aggregators(Runtime runtime = {}) {
  Surroundings around;
  auto const hub = std::make_shared<InprocAggregators>(2, std::size_t{1} << 28, long_time(),
                                                       vote_policy, runtime);
  around.equip = [hub](CommunicatorOptions& options, std::uint64_t run, int rank, int size) {
    options.aggregators = hub->connect({.job = {run, 0},
                                        .workers = static_cast<std::uint16_t>(size),
                                        .worker = static_cast<std::uint16_t>(rank)});
  };
  return around;
}

// The surroundings in which run_ranks() can run the algorithm; "auto" may take any.
inline Surroundings services_for(std::string_view algorithm, Runtime runtime = {}) {
  Surroundings around;
  auto const needs = [&](Needs service) {
    return algorithm == "auto" || find_algorithm(algorithm).needs == service;
  };
  if (needs(Needs::aggregators)) around = with_aggregators(runtime);
  if (needs(Needs::native_allreduce)) {
    around.wrap = [](std::unique_ptr<Transport> inner) {
      return std::make_unique<ReducingTransport>(std::move(inner));
    };
  }
  return around;
}

}  // namespace sparsecomm::test
