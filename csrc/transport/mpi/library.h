// What the shared object that was compiled against MPI gives to the core, which knows no MPI.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"

namespace sparsecomm {

struct MpiLibrary {
  std::string_view built_with;  // "MPICH 5.0.2"
  // How version strings begin of the libraries that have the binary interface it was built with.
  std::span<const std::string_view> families;
  std::string (*loaded_version)();  // MPI_Get_library_version, of the library it is bound to
  std::unique_ptr<Transport> (*make)(int communicator);  // a handle as of MPI_Comm_c2f
  // See mpi_ping_pong.
  std::vector<double> (*ping_pong)(int communicator, std::size_t bytes, int rounds);
};

// The name under which it is exported, extern "C".
inline constexpr char const* mpi_library_symbol = "sparsecomm_mpi_library";

}  // namespace sparsecomm
