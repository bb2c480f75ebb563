// Ok-Topk's O(k) sparse allreduce: u = TopK(sum of the ranks' selections). Source: Ok-Topk (Li and
// Hoefler 2022), Algorithm 1.
//
// 1. Partition, every tau steps: the ranks agree on region boundaries, the average of those that
//    split each rank's own selection evenly.
// 2. Split and reduce: rank j receives everyone's part of region j, in rotated order, a window of
//    receives at a time, and sums it.
// 3. Global threshold: one histogram of the sums' magnitudes from every rank names the bin that
//    holds the k-th largest; refined to a single bit pattern where the schedule says exact, the
//    former threshold where it says reused. The counts are the sizes of all shares too.
// 4. Shares are evened out where the largest exceeds balance_factor times the average, then
//    allgathered.
//
// Messages: P-1 + 2P-1 at most in balancing + log P per allgather. Words received: 2k(P-1)/P for
// each of reduce (with even regions), balance (only when needed) and allgather.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_oktopk(AlgorithmOptions const& options);
Cost oktopk_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
