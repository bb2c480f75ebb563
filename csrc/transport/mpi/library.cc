#include "transport/mpi/library.h"

#include "transport/mpi/mpi_transport.h"

namespace sparsecomm {
namespace {

// MPICH and its descendants keep one binary interface; so does Open MPI.
#if defined(MPICH_VERSION)
constexpr std::string_view built_with = "MPICH " MPICH_VERSION;
constexpr std::string_view families[] = {"MPICH", "MVAPICH", "Intel(R) MPI", "CRAY MPICH"};
#elif defined(OMPI_MAJOR_VERSION)
#define SPARSECOMM_TEXT_OF(number) #number
#define SPARSECOMM_TEXT(number) SPARSECOMM_TEXT_OF(number)
constexpr std::string_view built_with =
    "Open MPI " SPARSECOMM_TEXT(OMPI_MAJOR_VERSION) "." SPARSECOMM_TEXT(OMPI_MINOR_VERSION);
constexpr std::string_view families[] = {"Open MPI"};
#else
#error "neither MPICH, or one that is compatible, nor Open MPI"
#endif

std::string loaded_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  return {text, static_cast<std::size_t>(length)};
}

std::unique_ptr<Transport> make(int communicator) {
  return make_mpi_transport(MPI_Comm_f2c(communicator));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) MpiLibrary const sparsecomm_mpi_library;
MpiLibrary const sparsecomm_mpi_library{built_with, families, loaded_version, make};

}  // namespace sparsecomm
