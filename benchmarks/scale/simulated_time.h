// Time on the network's clock, which all simulated ranks read alike.
#pragma once

#include <mpi.h>

#include <utility>

namespace sparsecomm {

// Seconds that ranks take for what they do together: from when the last one begins, since a barrier
// lets some go before others, until the last one ends. Collective.
template <class Body>
double time_together(MPI_Comm ranks, Body&& body) {
  MPI_Barrier(ranks);
  double times[2] = {MPI_Wtime(), 0};
  std::forward<Body>(body)();
  times[1] = MPI_Wtime();
  MPI_Allreduce(MPI_IN_PLACE, times, 2, MPI_DOUBLE, MPI_MAX, ranks);
  return times[1] - times[0];
}

}  // namespace sparsecomm
