#include "engine/timeline.h"

#include <algorithm>
#include <utility>

#include "engine/join.h"

namespace sparsecomm {
namespace {

constexpr std::string_view rounds = "rounds", unnamed = "operations without a name", joins = "join",
                           others = "operations of further names";

std::optional<Slice> slice_of(Stage stage) {
  switch (stage) {
    case Stage::whole:
      return std::nullopt;
    case Stage::agree:
      return Slice::compare;
    case Stage::select:
      return Slice::select;
    case Stage::exchange:
      return Slice::exchange;
    case Stage::apply:
      return Slice::apply;
  }
  return std::nullopt;
}

}  // namespace

SliceEntry const& describe(Slice slice) {
  static constexpr std::array<SliceEntry, slice_kinds> entries{{
      {"round", {"number", "pending", "run"}},
      {"negotiate", {}},
      {"prepare", {}},
      {"queue", {}},
      {"fused", {"row"}},
      {"run", {"sent_bytes", "received_bytes"}},
      {"compare", {}},
      {"select", {}},
      {"exchange", {}},
      {"apply", {}},
  }};
  return entries.at(static_cast<std::size_t>(slice));
}

Timeline::Timeline(TimelineOptions options, int rank, Clock const& clock)
    : options_(std::move(options)), rank_(rank), clock_(clock) {
  if (options_.recorder) communicator_ = options_.recorder->draw_communicator();
}

// Returns whether a recording is going on, which has its rows then.
bool Timeline::follow_recording() {
  std::uint32_t const now = options_.recorder ? options_.recorder->recording() : 0;
  if (now == 0 || now == recording_) return now != 0;
  recording_ = now;
  running_ = nullptr;
  turns_.clear();
  rows_.clear();
  others_ = {};
  options_.recorder->add_communicator(recording_, communicator_, options_.group, rank_);
  options_.recorder->add_row(recording_, communicator_, 0, rounds);
  return true;
}

Timeline::Row& Timeline::row_of(std::string_view name) {
  if (name.empty()) name = unnamed;
  if (name == Join::name) name = joins;
  auto const known = rows_.find(name);
  if (known != rows_.end()) return known->second;
  auto const number = static_cast<std::uint32_t>(rows_.size() + 1);
  if (rows_.size() < most_rows) {
    options_.recorder->add_row(recording_, communicator_, number, name);
    return rows_.emplace(name, Row{number}).first->second;
  }
  if (others_.number == 0) {
    others_.number = number;
    options_.recorder->add_row(recording_, communicator_, number, others);
  }
  return others_;
}

void Timeline::add(std::uint32_t row, Slice slice, TimePoint begin, TimePoint end,
                   std::array<std::uint64_t, 3> figures, bool failed) {
  options_.recorder->add(recording_, {communicator_, row, slice, failed, begin, end, figures});
}

void Timeline::prepared(std::string_view name, TimePoint begin) {
  if (!follow_recording()) return;
  Row const& row = row_of(name);
  if (&row != &others_) add(row.number, Slice::prepare, begin, clock_.now());
}

void Timeline::end_round(std::uint64_t number, TimePoint begin, std::size_t pending,
                         std::size_t selected) {
  if (!follow_recording()) return;
  round_begin_ = begin;
  round_end_ = clock_.now();
  turns_.clear();
  add(0, Slice::round, begin, round_end_, {number, pending, selected});
}

void Timeline::begin_run(std::string_view name, TimePoint submitted,
                         std::optional<std::size_t> leader) {
  if (!is_on() || options_.recorder->recording() != recording_) return;
  Row& row = row_of(name);
  TimePoint const now = clock_.now();
  if (&row != &others_) {
    // What has no name waits in one row for those before it.
    TimePoint const begin = std::max(submitted == TimePoint{} ? round_begin_ : submitted, row.end);
    add(row.number, Slice::negotiate, std::min(begin, round_end_), round_end_);
    bool const is_fused = leader && *leader < turns_.size();
    add(row.number, Slice::queue, round_end_, is_fused ? turns_[*leader].begin : now);
    if (is_fused) add(row.number, Slice::fused, turns_[*leader].begin, now, {turns_[*leader].row});
  }
  turns_.push_back({row.number, now});
  running_ = &row;
}

void Timeline::end_run(bool failed, Traffic const& before, Traffic const& after) {
  if (running_ == nullptr) return;
  Row& row = *std::exchange(running_, nullptr);
  row.end = clock_.now();
  add(row.number, Slice::run, turns_.back().begin, row.end,
      {after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes}, failed);
}

void Timeline::begin(Stage stage) noexcept {
  if (running_ != nullptr) stages_[static_cast<std::size_t>(stage)] = clock_.now();
}

void Timeline::end(Stage stage) noexcept {
  std::optional<Slice> const slice = slice_of(stage);
  if (running_ == nullptr || !slice) return;
  add(running_->number, *slice, stages_[static_cast<std::size_t>(stage)], clock_.now());
}

}  // namespace sparsecomm
