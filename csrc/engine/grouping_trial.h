// Whether a model's parameters are exchanged as one group or bucket by bucket: both are tried, and
// what takes less time is kept. Everything handed to it, but for times, must be the same on all
// ranks.
//
// 1. With one group, until `steps` steps have been observed whose algorithms are not on trial, or
//    `most` steps of any kind. If a step has a single bucket then, that is the decision.
// 2. The same with a group for each bucket.
// 3. Ranks agree on what each of the two took, and keep the group unless buckets gain `least_gain`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace sparsecomm {

enum class Grouping : std::uint8_t { model, buckets };

// Seconds of a step, the median of those observed, from when its first bucket has come until all
// groups are done: where an exchange slows the backward pass down, that counts too. 0: not known.
struct GroupingTimes {
  float model = 0, buckets = 0;

  // A payload of all ranks. Others wait for a rank that is late, whose time is the least, and the
  // step's.
  bool merge(GroupingTimes const& other);
};

struct GroupingTrialOptions {
  std::size_t steps = 10;
  std::size_t most = 64;
  // Of a step. Less is noise, and one group selects the largest entries of all.
  double least_gain = 0.02;
};

class GroupingTrial {
 public:
  explicit GroupingTrial(GroupingTrialOptions options = {}) : options_(options) {}

  Grouping grouping() const { return grouping_; }  // of the next step
  bool decided() const { return decided_; }
  // True when times are to be agreed on, with decide(), before anything else.
  bool is_over() const { return over_; }
  // Of this rank, until a decision; then those it rests on, zeros if nothing was tried.
  GroupingTimes const& times() const { return times_; }

  // After each step until a decision. `settled`: its algorithms are not on trial. `seconds`: none
  // on a rank that has brought no gradients of its own.
  void observe(std::size_t buckets, bool settled, std::optional<double> seconds);
  void decide(GroupingTimes const& agreed);
  // Begins anew, unless there is a decision.
  void restart();

 private:
  GroupingTrialOptions options_;
  Grouping grouping_ = Grouping::model;
  bool decided_ = false;
  bool over_ = false;
  GroupingTimes times_;
  std::size_t seen_ = 0, settled_ = 0;  // steps with this grouping
  std::vector<double> seconds_;         // of those that are settled, of all if none is
};

}  // namespace sparsecomm
