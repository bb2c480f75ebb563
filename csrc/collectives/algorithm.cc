#include "collectives/algorithm.h"

#include <algorithm>
#include <cmath>

#include "collectives/entries.h"
#include "collectives/patterns.h"

namespace sparsecomm {

std::span<const AlgorithmEntry> algorithms() {
  static AlgorithmEntry const table[] = {
      dense,
      dense_ring,
      dense_rabenseifner,
      dense_overlap,
      dense_inner,
      topk_a,
      ssar_recursive_double,
      ssar_split_allgather,
      dsar_split_allgather,
      sparse_ring,
      topk_dsa,
      gaussian_k,
      gtopk,
      oktopk,
      ina,
      ina_sparse,
  };
  return table;
}

AlgorithmEntry const& find_algorithm(std::string_view name) {
  std::string known;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (entry.name == name) return entry;
    known += concat(known.empty() ? "" : ", ", entry.name);
  }
  throw InvalidArgument(concat("algorithm '", name, "' is unknown; choose one of ", known));
}

Cost allgather_cost(int ranks, double frame_bytes) {
  auto const rounds = static_cast<double>(bruck_rounds(ranks));
  return {.rounds = rounds, .messages = rounds, .bytes = (ranks - 1) * frame_bytes};
}

// Between one rank's k entries and the whole union as random positions of a common support would
// fill it: the support's size follows from the union.
double CostShape::merged(int count) const {
  double const most = std::min(static_cast<double>(extent), static_cast<double>(k) * count);
  double const whole =
      std::min(static_cast<double>(extent), static_cast<double>(k) * static_cast<double>(ranks));
  if (union_nnz == 0 || static_cast<double>(union_nnz) >= whole) return most;
  auto const all = static_cast<double>(union_nnz);
  if (ranks == 1 || all <= static_cast<double>(k)) return std::min(most, static_cast<double>(k));
  double low = all;
  double high = static_cast<double>(extent);
  auto const filled = [&](double support, int n) {
    return -support * std::expm1(n * std::log1p(-static_cast<double>(k) / support));
  };
  for (int round = 0; round < 64; ++round) {
    double const middle = (low + high) / 2;
    (filled(middle, ranks) < all ? low : high) = middle;
  }
  return std::min(most, filled(low, count));
}

}  // namespace sparsecomm
