// What a communicator's operations do and when, as slices of time in rows: a row for each name, and
// one for the coordinator's rounds.
//
//   row of a name   negotiate (prepare)   queue   fused   run (compare, select, exchange, apply)
//   rounds          round                 round
//
// A slice lies within another one of its row, or beside it. Unless a recording is going on, nothing
// is done but to read its number, a few times for each operation.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "engine/observer.h"
#include "engine/step_record.h"

namespace sparsecomm {

enum class Slice : std::uint8_t {
  round,      // figures: the communicator's number of it, operations pending here, those that run
  negotiate,  // since submission, until a round has found that all ranks have submitted it
  prepare,    // what goes before a round, such as finding a threshold
  queue,      // behind others of its round
  fused,      // while an operation of its round exchanges for both; figures: that one's row
  run,        // figures: bytes sent and received
  compare,    // what ranks have not agreed on before
  select,     // and so on: see Stage
  exchange,
  apply,
};
inline constexpr std::size_t slice_kinds = 10;

// The same name and figures for whoever reads a recording.
struct SliceEntry {
  char const* name;
  std::array<char const*, 3> figures;  // null: no more
};
SliceEntry const& describe(Slice slice);

struct TimelineEvent {
  std::uint32_t communicator;  // of this process, from 1
  std::uint32_t row;           // of the communicator; 0: the rounds'
  Slice slice;
  bool failed = false;
  TimePoint begin, end;
  std::array<std::uint64_t, 3> figures{};
};

// Whose operations are recorded.
struct RecordedGroup {
  std::string title;       // of what made the communicator
  std::vector<int> ranks;  // as numbered among all processes, in the communicator's order
  int number = 0;          // among the communicators of these ranks, the same on all
};

// Takes what the communicators of this process record. From any thread.
class TimelineRecorder {
 public:
  virtual ~TimelineRecorder() = default;
  // Another number for each recording; 0: none is going on.
  std::uint32_t recording() const { return recording_.load(std::memory_order_relaxed); }
  std::uint32_t draw_communicator() { return ++communicators_; }
  // Before the first event of a recording that has them. `recording`: for which alone they are.
  virtual void add_communicator(std::uint32_t recording, std::uint32_t communicator,
                                RecordedGroup const& group, int rank) = 0;
  virtual void add_row(std::uint32_t recording, std::uint32_t communicator, std::uint32_t row,
                       std::string_view name) = 0;
  virtual void add(std::uint32_t recording, TimelineEvent const& event) noexcept = 0;

 protected:
  std::atomic<std::uint32_t> recording_ = 0;

 private:
  std::atomic<std::uint32_t> communicators_ = 0;
};

struct TimelineOptions {
  std::shared_ptr<TimelineRecorder> recorder = {};  // null: nothing is recorded
  RecordedGroup group = {};
};

// Of one communicator. For the thread that has the turn, but for submitted().
class Timeline final : public StageObserver {
 public:
  // Further names share one, without what lies before their turn, which would overlap.
  static constexpr std::size_t most_rows = 4096;

  Timeline(TimelineOptions options, int rank, Clock const& clock);

  // When an operation is submitted; the beginning of time unless a recording is going on.
  TimePoint submitted() const { return is_on() ? clock_.now() : TimePoint{}; }

  // While it lives, an operation is prepared.
  class Preparing {
   public:
    Preparing(Timeline& timeline, std::string_view name)
        : timeline_(timeline), name_(name), begin_(timeline.submitted()) {}
    ~Preparing() {
      if (begin_ != TimePoint{}) timeline_.prepared(name_, begin_);
    }
    Preparing(Preparing const&) = delete;
    Preparing& operator=(Preparing const&) = delete;

   private:
    Timeline& timeline_;
    std::string_view name_;
    TimePoint begin_;
  };
  // A round has ended, which selected operations: they begin in that order.
  void end_round(std::uint64_t number, TimePoint begin, std::size_t pending, std::size_t selected);
  // An operation's turn begins. `submitted`: the beginning of time if that is not known, as of a
  // stand-in. `leader`: the place, among those of its round, of the one that has
  // exchanged for both.
  void begin_run(std::string_view name, TimePoint submitted, std::optional<std::size_t> leader);
  void end_run(bool failed, Traffic const& before, Traffic const& after);
  // Whether what runs is recorded.
  bool runs() const { return running_ != nullptr; }

  // Of the operation that runs.
  void begin(Stage stage) noexcept override;
  void end(Stage stage) noexcept override;

 private:
  struct Row {
    std::uint32_t number;
    TimePoint end{};  // of the last operation that ran
  };
  struct Hash {
    using is_transparent = void;  // NOLINT(readability-identifier-naming): the library's
    std::size_t operator()(std::string_view name) const {
      return std::hash<std::string_view>()(name);
    }
  };
  struct Turn {
    std::uint32_t row;
    TimePoint begin;
  };

  bool is_on() const { return options_.recorder && options_.recorder->recording() != 0; }
  bool follow_recording();
  void prepared(std::string_view name, TimePoint begin);
  Row& row_of(std::string_view name);
  void add(std::uint32_t row, Slice slice, TimePoint begin, TimePoint end,
           std::array<std::uint64_t, 3> figures = {}, bool failed = false);

  TimelineOptions options_;
  int const rank_;
  Clock const& clock_;
  std::uint32_t communicator_ = 0;
  std::uint32_t recording_ = 0;  // that knows the rows
  std::unordered_map<std::string, Row, Hash, std::equal_to<>> rows_;
  Row others_{};  // of names that have no row of their own
  TimePoint round_begin_{}, round_end_{};
  std::vector<Turn> turns_;  // of the operations of that round, as they begin
  Row* running_ = nullptr;
  std::array<TimePoint, 5> stages_{};  // [stage]: when it began
};

}  // namespace sparsecomm
