// Sparse allreduce for larger data: each rank reduces an even region of the positions, then an
// allgather of the regions, each in the smaller form. P-1 + log P messages; 2 (2k)(P-1)/P words
// where the ranks share their positions, up to 2kP where they share none. Source: SparCML
// section 5.3.2.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_ssar_split_allgather(AlgorithmOptions const& options);
Cost ssar_split_allgather_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
