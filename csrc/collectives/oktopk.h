// Ok-Topk's O(k) sparse allreduce: u = TopK(sum of the ranks' selections). Source: Ok-Topk (Li and
// Hoefler 2022), Algorithm 1.
//
// 1. Regions, every tau steps and whenever the sizes of step 2 demand it: those that hold even
//    shares of all ranks' selections together, found from histograms of their positions
//    (collectives/regions.h).
// 2. Sizes: the largest selection, and the most that each rank has for any other, by a census
//    (collectives/figures.h). Where the regions no longer fit, so that a rank might receive more
//    than (2 - 3/P) times the largest selection in step 3, they are found anew. Up to three ranks
//    then gather all selections instead, and each sums them and takes the k largest for itself,
//    which ends the call.
// 3. Split and reduce: rank j receives everyone's part of region j, in rotated order, a window of
//    receives at a time, and sums it.
// 4. Global threshold: a census of the histograms of the sums' magnitudes names the bin that holds
//    the k-th largest; refined to a single bit pattern where the schedule says exact, the former
//    threshold where it says reused. Each rank then says how many it has above and in that bin,
//    which makes the sizes of all shares.
// 5. Shares are evened out where the largest exceeds balance_factor times the average, then
//    allgathered.
//
// Words received: at most 6k(P-1)/P whatever is selected where, plus frame headers, the sizes, the
// histograms and, where they are found, the regions: in step 3 (2 - 3/P) k pairs, or where the
// regions are new (for P > 3) k + k/6 + 2P, which is no more for k > 24P; in step 5 k pairs. k
// stands for the largest of k and the selections; where the schedule says reused the result may
// have more than k entries, and the words of step 5 are those. 2k(P-1)/P in step 5 alone is the
// least there can be (section 3.2): so it is where each rank selects in its own region only.
// Messages: P-1, at most 2P-1 in balancing, and ceil(log2 P) for each allgather and census.
// With P grow the headers of the split and of the last allgather, 2(P-1), and two words per rank in
// step 4; regions take O(P) words where they are found.
#pragma once

#include "collectives/algorithm.h"

namespace sparsecomm {

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_oktopk(AlgorithmOptions const& options);
Cost oktopk_cost(CostShape const& shape, AlgorithmOptions const& options);

}  // namespace sparsecomm
