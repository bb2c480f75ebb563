// Point-to-point messages of MPI, over a communicator of the transport's own.
//
// MPI is called by whoever calls the transport, and by abort() and post_failure() of another
// thread: MPI_THREAD_SERIALIZED is enough where nobody else calls MPI while an operation runs; with
// MPI_THREAD_MULTIPLE everybody may.
#pragma once

#include <mpi.h>

#include <limits>
#include <memory>

#include "transport/transport.h"

namespace sparsecomm {

struct MpiOptions {
  // Waits by testing, so that a deadline can end it. Off: MPI_Wait, without deadlines, for
  // simulators, where a test costs simulated time. Then one thread calls MPI, at any thread level.
  bool poll = true;
  // The most bytes that one count of MPI's expresses; longer messages travel as a derived type.
  std::size_t max_count = std::numeric_limits<int>::max();
};

// Collective over `parent`, which is duplicated and may be freed. Throws InvalidArgument where MPI
// has not been initialised, or with less than MPI_THREAD_SERIALIZED, and where `parent` is no
// intracommunicator.
//
// What MPI can tell of a lost peer is little: a broken connection is PeerLost where the
// implementation reports it; a peer that is gone or stopped without that is named when the deadline
// passes. Failure reports travel as messages of the same communicator; a report that arrives ends
// the wait for anybody at once. After abort() MPI may still hold on to memory of messages that were
// on their way: receives are cancelled, which MPI may refuse for one whose data is already
// arriving.
std::unique_ptr<Transport> make_mpi_transport(MPI_Comm parent, MpiOptions const& options = {});

}  // namespace sparsecomm
