#include "engine/choose.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace sparsecomm {
namespace {

constexpr double seconds_per_round = 20e-6;
constexpr double seconds_per_byte = 1e-9;
constexpr double seconds_per_entry = 2e-9;

// Entries of the reduction if positions were random, at least one.
std::uint64_t expected_union(ReductionShape const& shape) {
  auto const extent = static_cast<double>(shape.extent);
  double const share = static_cast<double>(shape.total_entries) / shape.ranks / extent;
  if (!(share < 1)) return std::max<std::uint64_t>(shape.extent, 1);
  double const filled = -extent * std::expm1(shape.ranks * std::log1p(-share));
  return std::max<std::uint64_t>(std::llround(filled), 1);
}

double seconds(AlgorithmEntry const& entry, ReductionShape const& shape) {
  bool const widened = entry.sparse || !entry.dense->rounds_once;
  std::size_t const value_bytes = std::max(size_of(shape.dtype), widened ? sizeof(float) : 0);
  CostShape cost_shape{.ranks = shape.ranks,
                       .extent = shape.extent,
                       .k = entry.sparse ? shape.most_entries : shape.extent,
                       .value_bytes = static_cast<double>(value_bytes),
                       .union_nnz = expected_union(shape)};
  Cost const cost = entry.cost(cost_shape, {});
  return cost.rounds * seconds_per_round + cost.bytes * seconds_per_byte +
         (cost.entries + cost.dense_entries) * seconds_per_entry;
}

}  // namespace

bool can_reduce(AlgorithmEntry const& entry) { return !entry.sparse || entry.lossless(); }

AlgorithmEntry const* find_reducing(std::string_view name) {
  if (name == "auto") return nullptr;
  std::string able = "auto";
  bool known = false;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (can_reduce(entry)) able += concat(", ", entry.name);
    if (entry.name != name) continue;
    if (can_reduce(entry)) return &entry;
    known = true;
  }
  throw InvalidArgument(concat("algorithm '", name, known ? "' is not exact" : "' is unknown",
                               "; choose one of ", able));
}

AlgorithmEntry const& choose(ReductionShape const& shape) {
  AlgorithmEntry const* best = nullptr;
  double least = 0;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (!can_reduce(entry)) continue;
    double const time = seconds(entry, shape);
    if (best == nullptr || time < least) {
      best = &entry;
      least = time;
    }
  }
  return *best;  // there is always a lossless entry
}

}  // namespace sparsecomm
