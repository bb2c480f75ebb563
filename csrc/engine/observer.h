// Who follows an operation through its stages, so as to show them in a trace.
#pragma once

#include <cstdint>
#include <utility>

#include "base/clock.h"

namespace sparsecomm {

enum class Stage : std::uint8_t {
  whole,     // all that follows; in several parts if an operation waits between them
  agree,     // waits for the other ranks and compares with them; see Proposal
  select,    // finds what is sent
  exchange,  // sends and reduces it
  apply,     // writes the result
};

// Called by the thread that runs the operation; what begins last ends first.
class StageObserver {
 public:
  virtual ~StageObserver() = default;
  virtual void begin(Stage stage) noexcept = 0;
  virtual void end(Stage stage) noexcept = 0;
};

// Lasts as long as the stage, unless that ends before. `observer` may be null.
class ObservedStage {
 public:
  ObservedStage() = default;
  ObservedStage(StageObserver* observer, Stage stage) { begin(observer, stage); }
  ~ObservedStage() { end(); }
  ObservedStage(ObservedStage const&) = delete;
  ObservedStage& operator=(ObservedStage const&) = delete;

  void begin(StageObserver* observer, Stage stage) {
    observer_ = observer;
    stage_ = stage;
    if (observer_ != nullptr) observer_->begin(stage_);
  }
  void end() {
    if (observer_ != nullptr) std::exchange(observer_, nullptr)->end(stage_);
  }

 private:
  StageObserver* observer_ = nullptr;
  Stage stage_ = Stage::whole;
};

// Adds the time that a stage takes to a total, and shows it to both observers; null: to nobody.
class Stopwatch {
 public:
  Stopwatch(StageObserver* observer, StageObserver* other, Stage stage, Clock const& clock,
            Duration& total)
      : observed_(observer, stage),
        observed_too_(other, stage),
        clock_(clock),
        total_(total),
        start_(clock.now()) {}
  ~Stopwatch() { total_ += clock_.now() - start_; }
  Stopwatch(Stopwatch const&) = delete;
  Stopwatch& operator=(Stopwatch const&) = delete;

 private:
  ObservedStage observed_, observed_too_;
  Clock const& clock_;
  Duration& total_;
  TimePoint start_;
};

}  // namespace sparsecomm
