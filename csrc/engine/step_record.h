// The last step of one group on this rank, and sums over its steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/clock.h"
#include "transport/transport.h"

namespace sparsecomm {

// Sums over all calls so far.
struct ExchangeStats {
  std::uint64_t steps = 0;
  std::uint64_t selected = 0;    // entries this rank packed
  std::uint64_t result_nnz = 0;  // entries of the results
  std::uint64_t numel = 0;       // entries of the gradients
  Duration agree{}, select{}, exchange{}, apply{};

  // Adds another group's; the steps are those of the one that has made most.
  ExchangeStats& operator+=(ExchangeStats const& other) {
    steps = std::max(steps, other.steps);
    selected += other.selected;
    result_nnz += other.result_nnz;
    numel += other.numel;
    agree += other.agree;
    select += other.select;
    exchange += other.exchange;
    apply += other.apply;
    return *this;
  }
};

struct StepRecord {
  std::string_view algorithm;  // that ran; empty before the first step
  std::uint64_t step = 0;      // from 0
  bool finite = true;          // every rank's gradient was
  std::uint64_t selected = 0;  // entries this rank packed
  std::uint64_t result_nnz = 0;
  // That entries were selected by, and steps since it was found in a gradient; none where another
  // rule chose them, or, of the age, since before a checkpoint.
  std::optional<double> threshold = {};
  std::optional<std::uint64_t> threshold_age = {};
  // The agreement's included, and what an engine's own allreduce sends is not.
  std::uint64_t sent_bytes = 0, received_bytes = 0, messages = 0;
  Duration agree{};  // waiting for the other ranks included
  Duration select{}, exchange{}, apply{};
  // What a plan predicts and compares: without the wait for ranks that came late.
  double observed_seconds = 0;
  std::optional<double> predicted_seconds = {};  // where there is a plan
};

// Over all peers.
struct Traffic {
  std::uint64_t sent_bytes = 0, received_bytes = 0, messages = 0;

  static Traffic of(Counters const& counters) {
    return {Counters::total(counters.sent_bytes), Counters::total(counters.received_bytes),
            Counters::total(counters.sent_messages)};
  }
};

}  // namespace sparsecomm
