// Sparse allreduce by allgather: every rank receives every selection and sums them itself, in rank
// order, so that all get the same bits. log P messages, 2k(P-1) words. Source: Ok-Topk Table 1
// (TopkA); SparCML section 8.1.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_topk_a(AlgorithmOptions const& options);
Cost topk_a_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
