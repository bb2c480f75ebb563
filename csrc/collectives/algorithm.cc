#include "collectives/algorithm.h"

#include "collectives/dense.h"
#include "collectives/oktopk.h"
#include "collectives/patterns.h"
#include "collectives/topk_a.h"

namespace sparsecomm {
namespace {

constexpr AlgorithmEntry table[] = {
    {"dense", "every element, reduce-scatter then allgather", "2N(P-1)/P", "Chan et al. 2007",
     false, false, dense_cost, nullptr, nullptr},
    {"topk_a", "allgather of all selections, summed locally", "2k(P-1)", "Ok-Topk Table 1", true,
     false, topk_a_cost, make_topk_a<float>, make_topk_a<double>},
    {"oktopk", "split and reduce, then balance and allgather the k largest sums", "6k(P-1)/P",
     "Ok-Topk Algorithm 1", true, true, oktopk_cost, make_oktopk<float>, make_oktopk<double>},
};

}  // namespace

std::span<const AlgorithmEntry> algorithms() { return table; }

AlgorithmEntry const& find_algorithm(std::string_view name) {
  std::string known;
  for (AlgorithmEntry const& entry : table) {
    if (entry.name == name) return entry;
    known += concat(known.empty() ? "" : ", ", entry.name);
  }
  throw InvalidArgument(concat("algorithm '", name, "' is unknown; choose one of ", known));
}

Cost allgather_cost(int ranks, double frame_bytes) {
  return {static_cast<double>(bruck_rounds(ranks)), (ranks - 1) * frame_bytes};
}

}  // namespace sparsecomm
