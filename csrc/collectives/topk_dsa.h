// Dynamic sparse allreduce as Ok-Topk compares itself with. What differs from ssar_split_allgather:
// between the halves the ranks tell each other how many entries their regions have, so that all
// switch to a dense allgather together, by the exact size of the result and not by a bound.
// P-1 + 2 log P messages; 4k(P-1)/P to (2k+N)(P-1)/P words. Source: Ok-Topk Table 1; SparCML
// section 5.3.3.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_topk_dsa(AlgorithmOptions const& options);
Cost topk_dsa_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
