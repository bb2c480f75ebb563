// Sparse allreduce by recursive doubling: in round t ranks 2^t apart exchange all they have reduced
// so far. log P messages for powers of two, log P + 2 rounds otherwise; 2k log P words where the
// ranks share their positions, 2k(P-1) where they share none, and never much more than N log P, as
// what is denser than delta travels dense. Source: SparCML section 5.3.1.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_ssar_recursive_double(AlgorithmOptions const& options);
Cost ssar_recursive_double_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
