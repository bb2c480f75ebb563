// The table of transports: tests, benches and the command line iterate it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "transport/mpi.h"
#include "transport/ucx.h"

namespace sparsecomm {

// Where the libraries that are opened at run time are looked for.
struct TransportLibraries {
  UcxOptions ucx;
  std::string mpi;  // the shared object that was compiled against MPI
};

struct TransportEntry {
  std::string_view name;
  std::string_view description;
  bool connects_processes;  // of a torch process group, by connect()
  bool automatic;           // "auto" takes the first of these that works on all ranks
  bool exact_sizes;         // Transport::wait() returns what arrived, not what had room
  // Why it cannot be used here, and what to do; empty where it can.
  std::string (*problem)(TransportLibraries const& libraries);
};

std::span<const TransportEntry> transports();
// Throws InvalidArgument, naming those that there are, where there is none of that name.
TransportEntry const& find_transport(std::string_view name);

}  // namespace sparsecomm
