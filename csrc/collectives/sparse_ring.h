// Sparse allreduce around a ring: each region's partial result passes all ranks, then each region's
// result does. 2(P-1) messages, to one neighbour and from another; the partial results grow with
// fill-in, from 4k(P-1)/P words where the ranks share their positions to 3k(P-1) spread evenly
// where they share none. Source: SparCML section 8.1; Patarasuk and Yuan 2009.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_sparse_ring(AlgorithmOptions const& options);
Cost sparse_ring_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
