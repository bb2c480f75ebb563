#include "collectives/regions.h"

#include <algorithm>
#include <cmath>

#include "collectives/entries.h"
#include "collectives/patterns.h"

namespace sparsecomm {
namespace {

constexpr std::uint64_t bins_per_region = 16;
constexpr std::uint64_t tolerance = 12;  // parts of a region

}  // namespace

std::uint64_t RegionSearch::Interval::bins(std::uint64_t wanted) const {
  return std::min(wanted, last - first);
}
std::uint64_t RegionSearch::Interval::edge(std::uint64_t bin, std::uint64_t bins) const {
  return first + even_split(last - first, bins, bin);
}

RegionSearch::RegionSearch() : sum_(dense_rabenseifner.dense->make<std::int64_t>({}, {})) {}

// Sums every rank's counts of `bins` bins in each of divided_.
void RegionSearch::count(Channel& channel, std::span<const std::uint32_t> indices,
                         std::uint64_t bins) {
  counts_.clear();
  for (Interval const& interval : divided_) {
    std::uint64_t const number = interval.bins(bins);
    auto begin = std::ranges::lower_bound(indices, interval.first);
    for (std::uint64_t bin = 0; bin < number; ++bin) {
      auto const end = std::lower_bound(begin, indices.end(), interval.edge(bin + 1, number));
      counts_.push_back(end - begin);
      begin = end;
    }
  }
  sum_->run(channel, counts_, Reduction::sum, 1);
  sum_->write(counts_);
}

void RegionSearch::run(Channel& channel, std::span<const std::uint32_t> indices,
                       std::uint64_t extent, std::span<std::uint32_t> boundaries) {
  std::uint64_t const regions = boundaries.size() + 1;
  divided_.assign(1, {0, extent, 0, 0});
  count(channel, indices, bins_per_region * regions);
  std::uint64_t total = 0;
  for (std::int64_t const in_bin : counts_) total += static_cast<std::uint64_t>(in_bin);
  if (total == 0) {
    for (std::uint64_t region = 1; region < regions; ++region) {
      boundaries[region - 1] = static_cast<std::uint32_t>(even_split(extent, regions, region));
    }
    return;
  }

  std::uint64_t const enough = total / (tolerance * regions);
  auto const settled = [&](Interval const& interval) {
    return interval.inside <= enough || interval.last - interval.first <= 1;
  };
  found_.assign(boundaries.size(), {0, extent, 0, total});
  for (std::uint64_t bins = bins_per_region * regions;; bins = bins_per_region) {
    // Boundaries and the intervals that were divided are both in order.
    auto whole = divided_.begin();
    auto counts = counts_.begin();
    std::uint64_t bin = 0;
    std::uint64_t before = whole->before;
    for (std::uint64_t region = 1; region < regions; ++region) {
      Interval& found = found_[region - 1];
      if (settled(found)) continue;
      while (whole->first != found.first) {
        counts += static_cast<std::ptrdiff_t>(whole->bins(bins));
        before = (++whole)->before;
        bin = 0;
      }
      std::uint64_t const number = whole->bins(bins);
      std::uint64_t const target = even_split(total, regions, region);
      auto const inside = [&] {
        return static_cast<std::uint64_t>(counts[static_cast<std::ptrdiff_t>(bin)]);
      };
      while (before + inside() < target && bin + 1 < number) {
        before += inside();
        ++bin;
      }
      found = {whole->edge(bin, number), whole->edge(bin + 1, number), before, inside()};
    }
    divided_.clear();
    for (Interval const& found : found_) {
      if (settled(found)) continue;
      if (divided_.empty() || divided_.back().first != found.first) divided_.push_back(found);
    }
    if (divided_.empty()) break;
    count(channel, indices, bins_per_region);
  }

  for (std::uint64_t region = 1; region < regions; ++region) {
    // As if the entries were spread evenly over what is left.
    Interval const& found = found_[region - 1];
    auto const missing =
        static_cast<double>(even_split(total, regions, region)) - static_cast<double>(found.before);
    double const share =
        found.inside == 0 ? 0.0 : std::clamp(missing / static_cast<double>(found.inside), 0.0, 1.0);
    boundaries[region - 1] = static_cast<std::uint32_t>(
        found.first + std::llround(share * static_cast<double>(found.last - found.first)));
  }
}

Cost regions_cost(int ranks, std::uint64_t extent) {
  if (ranks == 1) return {};
  auto const regions = static_cast<std::uint64_t>(ranks);
  auto const sum = [&](std::uint64_t bins) {
    return dense_rabenseifner.cost({.ranks = ranks, .extent = bins, .value_bytes = 8}, {});
  };
  auto const parts = [](std::uint64_t width, std::uint64_t bins) {
    return (width + bins - 1) / bins;
  };
  std::uint64_t width = std::clamp<std::uint64_t>(extent, 1, bins_per_region * regions);
  Cost cost = sum(width);
  // Every boundary in an interval of its own, each as wide as they can be.
  for (width = parts(extent, width); width > 1;) {
    std::uint64_t const bins = std::min(width, bins_per_region);
    cost = cost + sum(bins * (regions - 1));
    width = parts(width, bins);
  }
  cost.exact = false;
  return cost;
}

}  // namespace sparsecomm
