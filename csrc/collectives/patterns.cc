#include "collectives/patterns.h"

#include <numeric>

namespace sparsecomm {

std::vector<Transfer> plan_balance(std::span<const std::uint64_t> counts) {
  std::uint64_t const total = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  std::vector<Transfer> transfers;
  std::uint64_t held = 0;  // entries of the ranks before `source`
  int destination = 0;
  for (int source = 0; source < static_cast<int>(counts.size()); ++source) {
    std::uint64_t position = held;
    held += counts[source];
    while (position < held) {
      std::uint64_t const share_end = even_split(total, counts.size(), destination + 1);
      if (position == share_end) {
        ++destination;
        continue;
      }
      std::uint64_t const count = std::min(share_end, held) - position;
      transfers.push_back({source, destination, position - (held - counts[source]), count});
      position += count;
    }
  }
  return transfers;
}

bool needs_balance(std::span<const std::uint64_t> counts, double factor) {
  std::uint64_t const total = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  std::uint64_t const largest = *std::max_element(counts.begin(), counts.end());
  return static_cast<double>(largest) * static_cast<double>(counts.size()) >
         factor * static_cast<double>(total);
}

}  // namespace sparsecomm
