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

std::vector<double> ping_pong(int communicator, std::size_t bytes, int rounds) {
  MPI_Comm const ranks = MPI_Comm_f2c(communicator);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(ranks, &rank);
  MPI_Comm_size(ranks, &size);
  require(size == 2, "a ping-pong takes 2 ranks, not ", size);
  std::vector<std::byte> message(bytes);
  auto const count = static_cast<int>(bytes);
  std::vector<double> seconds;
  seconds.reserve(rounds);
  for (int round = 0; round < rounds; ++round) {
    double const start = MPI_Wtime();
    if (rank == 0) MPI_Send(message.data(), count, MPI_BYTE, 1, 0, ranks);
    MPI_Recv(message.data(), count, MPI_BYTE, 1 - rank, 0, ranks, MPI_STATUS_IGNORE);
    if (rank == 1) MPI_Send(message.data(), count, MPI_BYTE, 0, 0, ranks);
    seconds.push_back((MPI_Wtime() - start) / 2);
  }
  return seconds;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) MpiLibrary const sparsecomm_mpi_library;
MpiLibrary const sparsecomm_mpi_library{built_with, families, loaded_version, make, ping_pong};

}  // namespace sparsecomm
