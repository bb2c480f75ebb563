#include "transport/transports.h"

#include <array>

namespace sparsecomm {
namespace {

std::string no_problem(TransportLibraries const& /*libraries*/) { return {}; }
std::string problem_of_ucx(TransportLibraries const& libraries) {
  return ucx_problem(libraries.ucx);
}
std::string problem_of_mpi(TransportLibraries const& libraries) {
  return mpi_problem(libraries.mpi);
}

constexpr std::array table{
    TransportEntry{"inproc", "ranks as threads of one process, for tests", false, false, true,
                   no_problem},
    TransportEntry{"ucx", "UCX: shared memory in a host, TCP or RDMA between hosts", true, true,
                   true, problem_of_ucx},
    TransportEntry{"c10d", "point-to-point messages of a torch process group (gloo)", true, true,
                   false, no_problem},
    TransportEntry{"mpi", "the ranks of an MPI communicator, without a process group", false, false,
                   true, problem_of_mpi},
};

}  // namespace

std::span<const TransportEntry> transports() { return table; }

TransportEntry const& find_transport(std::string_view name) {
  std::string names;
  for (TransportEntry const& entry : table) {
    if (entry.name == name) return entry;
    names += concat(names.empty() ? "" : ", ", entry.name);
  }
  throw InvalidArgument(concat("transport '", name, "' is unknown; choose one of ", names));
}

}  // namespace sparsecomm
