// gTop-k: selections are summed up a binomial tree, cut to the k largest at every rank on the way,
// and the root's result is sent down the same tree. Any P: a rank r > 0 reports to r without its
// lowest set bit. Source: Shi et al. 2019, Ok-Topk Table 1.
//
// What a rank cuts it returns as rejected, so nothing is lost, as it is where only the selections
// that missed the result are kept. 2 ceil(log2 P) rounds of 2k words; the result is k entries, but
// not those of TopK(sum): a sum that is small in every subtree is cut before its parts meet.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_gtopk(AlgorithmOptions const& options);
Cost gtopk_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
