// The transport over MPI, whose code lies in a shared object of its own: MPI's binary interface
// differs between implementations, and which one is loaded is decided when the program runs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace sparsecomm {

// Opens the shared object `file` and makes a transport of `communicator`, a handle as of
// MPI_Comm_c2f; collective over it. `version` is what MPI_Get_library_version says in the caller.
// Throws InvalidArgument where the object cannot be loaded or belongs to another MPI, and as
// make_mpi_transport (transport/mpi/mpi_transport.h) does.
std::unique_ptr<Transport> open_mpi_transport(std::string const& file, std::string const& version,
                                              int communicator);

// What benchmarks compare the transport with: one-way seconds of `rounds` messages there and back
// between the two ranks of the communicator, by MPI's own blocking calls.
std::vector<double> mpi_ping_pong(std::string const& file, std::string const& version,
                                  int communicator, std::size_t bytes, int rounds);

// Why there is no such object, and what to do; empty where it is there.
std::string mpi_problem(std::string const& file);

}  // namespace sparsecomm
