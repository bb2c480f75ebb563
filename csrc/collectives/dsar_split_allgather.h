// Sparse allreduce whose result is dense: each rank reduces an even region of the positions as
// pairs and sends it dense. P-1 + log P messages; up to (2k + N)(P-1)/P words with even regions.
// Source: SparCML sections 5.3.3 and 6.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_dsar_split_allgather(AlgorithmOptions const& options);
Cost dsar_split_allgather_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
