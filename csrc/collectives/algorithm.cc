#include "collectives/algorithm.h"

#include <algorithm>
#include <cmath>

#include "collectives/dense.h"
#include "collectives/dsar_split_allgather.h"
#include "collectives/gtopk.h"
#include "collectives/oktopk.h"
#include "collectives/patterns.h"
#include "collectives/sparse_ring.h"
#include "collectives/ssar_recursive_double.h"
#include "collectives/ssar_split_allgather.h"
#include "collectives/topk_a.h"
#include "collectives/topk_dsa.h"

namespace sparsecomm {
namespace {

constexpr AlgorithmEntry table[] = {
    {"dense", "every element, reduce-scatter then allgather", "2N(P-1)/P", "Chan et al. 2007",
     false, false, dense_pairwise_cost, nullptr, nullptr, nullptr, nullptr, &dense_pairwise},
    {"dense_ring", "every element, reduce-scatter and allgather around a ring", "2N(P-1)/P",
     "Patarasuk and Yuan 2009", false, false, dense_ring_cost, nullptr, nullptr, nullptr, nullptr,
     &dense_ring},
    {"dense_rabenseifner", "every element, recursive halving then doubling", "2N(P-1)/P",
     "Rabenseifner 2004", false, false, dense_rabenseifner_cost, nullptr, nullptr, nullptr, nullptr,
     &dense_rabenseifner},
    {"dense_overlap", "every element, a chunk reduced while the former one is gathered",
     "2N(P-1)/P", "Ok-Topk Table 1", false, false, dense_overlap_cost, nullptr, nullptr, nullptr,
     nullptr, &dense_overlap},
    {"dense_inner", "every element, by the transport's own allreduce: gloo's, over c10d",
     "2N(P-1)/P", "Patarasuk and Yuan 2009", false, false, dense_inner_cost, nullptr, nullptr,
     nullptr, nullptr, &dense_inner, std::nullopt, false, true},
    {"topk_a", "allgather of all selections, summed locally", "2k(P-1)", "Ok-Topk Table 1", true,
     false, topk_a_cost, make_topk_a, make_topk_a, make_topk_a, make_topk_a, nullptr, std::nullopt,
     true},
    {"ssar_recursive_double", "exchange of all reduced so far with ranks 1, 2, 4, ... away",
     "2k log P to 2k(P-1)", "SparCML section 5.3.1", true, false, ssar_recursive_double_cost,
     make_ssar_recursive_double, make_ssar_recursive_double, make_ssar_recursive_double,
     make_ssar_recursive_double},
    {"ssar_split_allgather",
     "sparse reduce-scatter by regions, then allgather of each in the smaller form",
     "4k(P-1)/P to 2kP", "SparCML section 5.3.2", true, false, ssar_split_allgather_cost,
     make_ssar_split_allgather, make_ssar_split_allgather, make_ssar_split_allgather,
     make_ssar_split_allgather},
    {"dsar_split_allgather", "sparse reduce-scatter by regions, then dense allgather",
     "(2k + N)(P-1)/P", "SparCML sections 5.3.3 and 6", true, false, dsar_split_allgather_cost,
     make_dsar_split_allgather, make_dsar_split_allgather, make_dsar_split_allgather,
     make_dsar_split_allgather},
    {"sparse_ring", "sparse reduce-scatter and allgather around a ring", "4k(P-1)/P to 3k(P-1)",
     "SparCML section 8.1", true, false, sparse_ring_cost, make_sparse_ring, make_sparse_ring,
     make_sparse_ring, make_sparse_ring},
    {"topk_dsa", "as ssar_split_allgather, and all regions turn dense together",
     "4k(P-1)/P to (2k + N)(P-1)/P", "Ok-Topk Table 1", true, false, topk_dsa_cost, make_topk_dsa,
     make_topk_dsa, make_topk_dsa, make_topk_dsa},
    {"gaussian_k", "topk_a of selections by a threshold of the normal distribution", "2k(P-1)",
     "Shi et al. 2019, Ok-Topk Table 1", true, false, topk_a_cost, make_topk_a, make_topk_a,
     nullptr, nullptr, nullptr, ThresholdSource::gaussian, true},
    {"gtopk", "summed up a tree, cut to the k largest at each rank, and sent down", "2k log2 P",
     "Shi et al. 2019, Ok-Topk Table 1", true, true, gtopk_cost, make_gtopk, make_gtopk, nullptr,
     nullptr},
    {"oktopk", "split and reduce, then balance and allgather the k largest sums", "6k(P-1)/P",
     "Ok-Topk Algorithm 1", true, true, oktopk_cost, make_oktopk, make_oktopk, nullptr, nullptr,
     nullptr, std::nullopt, true},
};

}  // namespace

std::span<const AlgorithmEntry> algorithms() { return table; }

std::string problem(AlgorithmEntry const& entry, Transport const& transport) {
  if (!entry.inner || transport.reduces() || transport.size() == 1) return {};
  return concat("algorithm '", entry.name, "' is the allreduce of the transport's engine, and ",
                transport.name(),
                R"( has none; use transport "c10d", or the algorithm "dense", which needs none)");
}

AlgorithmEntry const& find_algorithm(std::string_view name) {
  std::string known;
  for (AlgorithmEntry const& entry : table) {
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
