// Timelines that stay in memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/timeline.h"
#include "ranks.h"

namespace sparsecomm::test {

class Recorder final : public TimelineRecorder {
 public:
  void set_recording(std::uint32_t number) { recording_ = number; }
  void add_communicator(std::uint32_t recording, std::uint32_t communicator,
                        RecordedGroup const& group, int rank) override {
    std::lock_guard const lock(mutex_);
    if (recording != recording_) return;
    communicators.emplace_back(communicator, group.title, rank);
  }
  void add_row(std::uint32_t recording, std::uint32_t communicator, std::uint32_t row,
               std::string_view name) override {
    std::lock_guard const lock(mutex_);
    if (recording != recording_) return;
    EXPECT_TRUE(rows.emplace(std::pair(communicator, row), name).second) << name;
  }
  void add(std::uint32_t recording, TimelineEvent const& event) noexcept override {
    std::lock_guard const lock(mutex_);
    if (recording == recording_) events.push_back(event);
  }
  // The slices of a row in the order in which they begin, the longer ones first.
  std::vector<TimelineEvent> of(std::string const& name) const {
    std::vector<TimelineEvent> found;
    for (TimelineEvent const& event : events) {
      if (rows.at({event.communicator, event.row}) == name) found.push_back(event);
    }
    std::ranges::stable_sort(found, [](TimelineEvent const& one, TimelineEvent const& other) {
      return std::tuple(one.begin, other.end) < std::tuple(other.begin, one.end);
    });
    return found;
  }

  std::vector<std::tuple<std::uint32_t, std::string, int>> communicators;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::string> rows;
  std::vector<TimelineEvent> events;

 private:
  std::mutex mutex_;
};

inline std::string names(std::vector<TimelineEvent> const& slices) {
  std::string text;
  for (TimelineEvent const& slice : slices) {
    if (!text.empty()) text += ' ';
    text += describe(slice.slice).name;
  }
  return text;
}

// Slices of a row lie inside one another or beside one another.
inline void expect_nested(std::vector<TimelineEvent> const& slices) {
  std::vector<TimePoint> open;
  for (TimelineEvent const& slice : slices) {
    EXPECT_LE(slice.begin, slice.end) << describe(slice.slice).name;
    while (!open.empty() && slice.begin >= open.back()) open.pop_back();
    if (!open.empty()) {
      EXPECT_LE(slice.end, open.back()) << describe(slice.slice).name << " in " << names(slices);
    }
    open.push_back(slice.end);
  }
}

// One for each rank.
struct Recorders {
  explicit Recorders(int size) {
    for (int rank = 0; rank < size; ++rank) all.push_back(std::make_shared<Recorder>());
  }
  Surroundings around() const {
    Surroundings around;
    around.equip = [this](CommunicatorOptions& options, std::uint64_t, int rank, int size) {
      options.timeline = {all.at(rank), {"a test", std::vector<int>(size)}};
    };
    return around;
  }
  std::vector<std::shared_ptr<Recorder>> all;
};

}  // namespace sparsecomm::test
