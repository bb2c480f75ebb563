// What "auto" has chosen for problems of a kind, so that a prediction is made once for each.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "collectives/algorithm.h"

namespace sparsecomm {

// One of a few numbers that stand for all, at most 1/15 away. Integers only, so that all ranks get
// the same one.
constexpr std::uint64_t typical_entries(std::uint64_t entries) {
  int const dropped = std::max(0, static_cast<int>(std::bit_width(entries)) - 4);
  std::uint64_t const step = std::uint64_t{1} << dropped;
  return entries / step * step + step / 2;
}

// What a choice depends on beside what stays the same for one operation.
struct ChoiceProblem {
  std::uint64_t extent = 0;
  std::uint64_t most_entries = 0;     // of any rank; typical_entries()
  std::uint64_t average_entries = 0;  // likewise
  std::uint64_t most_blocks = 0;      // likewise
  Reduction reduction = Reduction::sum;
  bool dense_data = true;
  int aggregators = 0;  // that are left

  friend bool operator==(ChoiceProblem const&, ChoiceProblem const&) = default;
};

// Of bounded size: a problem takes the place of another one now and then. What choose() returns
// must depend on the problem alone, since ranks need not remember the same ones.
class ChoiceCache {
 public:
  template <class Choose>
  AlgorithmEntry const& find(ChoiceProblem const& problem, Choose&& choose) {
    auto& slot = slots_[slot_of(problem)];
    if (!slot || slot->problem != problem) slot = {problem, choose()};
    return *slot->algorithm;
  }

  static constexpr std::size_t slots = 64;

 private:
  struct Choice {
    ChoiceProblem problem;
    AlgorithmEntry const* algorithm;
  };

  static std::size_t slot_of(ChoiceProblem const& problem) {
    std::uint64_t hash = 0;
    for (std::uint64_t const part :
         {problem.extent, problem.most_entries, problem.average_entries, problem.most_blocks,
          std::uint64_t{2} * static_cast<std::uint64_t>(problem.reduction) + problem.dense_data,
          static_cast<std::uint64_t>(problem.aggregators)}) {
      hash = (hash ^ part) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash % slots;
  }

  std::array<std::optional<Choice>, slots> slots_;
};

}  // namespace sparsecomm
