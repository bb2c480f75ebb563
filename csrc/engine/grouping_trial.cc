#include "engine/grouping_trial.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace sparsecomm {
namespace {

float median(std::vector<double> seconds) {
  if (seconds.empty()) return 0;
  auto const middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::ranges::nth_element(seconds, middle);
  return static_cast<float>(*middle);
}

void merge_time(float& into, float other) {
  require<MalformedFrame>(std::isfinite(other) && other >= 0, "a step of ", other, " s");
  if (into == 0 || (other > 0 && other < into)) into = other;
}

}  // namespace

bool GroupingTimes::merge(GroupingTimes const& other) {
  merge_time(model, other.model);
  merge_time(buckets, other.buckets);
  return true;
}

void GroupingTrial::observe(std::size_t buckets, bool settled, std::optional<double> seconds) {
  if (decided_ || over_) return;
  ++seen_;
  if (settled && ++settled_ == 1) seconds_.clear();
  if (seconds && (settled || settled_ == 0)) seconds_.push_back(*seconds);
  if (settled_ < options_.steps && seen_ < options_.most) return;
  float const typical = median(std::exchange(seconds_, {}));
  seen_ = settled_ = 0;
  if (grouping_ == Grouping::buckets) {
    times_.buckets = typical;
    over_ = true;
  } else if (buckets <= 1) {
    decided_ = true;
  } else {
    times_.model = typical;
    grouping_ = Grouping::buckets;
  }
}

void GroupingTrial::decide(GroupingTimes const& agreed) {
  times_ = agreed;
  bool const gains = static_cast<double>(agreed.buckets) <
                     (1 - options_.least_gain) * static_cast<double>(agreed.model);
  grouping_ = agreed.buckets > 0 && gains ? Grouping::buckets : Grouping::model;
  decided_ = true;
  over_ = false;
}

void GroupingTrial::restart() {
  if (!decided_) *this = GroupingTrial(options_);
}

}  // namespace sparsecomm
