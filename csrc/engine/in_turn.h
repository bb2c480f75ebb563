// The median times of several tasks that are run in turn.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

namespace sparsecomm {

inline double median(std::vector<double>& values) {
  auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

// Seconds by `now` that each task takes: the median of three rounds, or of as many as there are
// until `late`, but of one. In every round each task is run once, so that a task finds the cache as
// the others have left it, not full of what it has touched in the round before.
template <class Now, class Late, class... Task>
std::array<double, sizeof...(Task)> times_in_turn(Now&& now, Late&& late, Task&&... tasks) {
  std::array<std::vector<double>, sizeof...(Task)> rounds;
  do {
    std::size_t i = 0;
    auto const run = [&](auto& task) {
      double const before = now();
      task();
      rounds[i++].push_back(now() - before);
    };
    (run(tasks), ...);
  } while (rounds[0].size() < 3 && !late());
  std::array<double, sizeof...(Task)> medians;
  std::ranges::transform(rounds, medians.begin(), median);
  return medians;
}

}  // namespace sparsecomm
