#include "transport/mpi.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>

#include "transport/mpi/library.h"

namespace sparsecomm {
namespace {

constexpr std::string_view rebuild =
    "install sparsecomm anew while the mpicxx of the MPI that the program runs with comes first on "
    "PATH";

// A version string has a line for each of the library's settings.
std::string_view first_line(std::string_view text) { return text.substr(0, text.find('\n')); }

MpiLibrary const& open_library(std::string const& file, std::string const& version) {
  // Never closed: transports and MPI itself keep pointers into it.
  void* const object = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  require(object != nullptr,
          "the MPI transport cannot be loaded: ", object == nullptr ? dlerror() : "",
          "; the MPI of this program is ", first_line(version), "; ", rebuild);
  auto const* const library = static_cast<MpiLibrary const*>(dlsym(object, mpi_library_symbol));
  require(library != nullptr, file, " is not sparsecomm's MPI transport; ", rebuild);
  bool const related = std::ranges::any_of(
      library->families, [&](std::string_view family) { return version.starts_with(family); });
  require(related, "the MPI transport was built with ", library->built_with,
          ", but the MPI of this program is ", first_line(version), "; ", rebuild);
  std::string const bound = library->loaded_version();
  require(bound == version, "the MPI transport was bound to ", first_line(bound),
          ", but the MPI of this program is ", first_line(version), "; ", rebuild);
  return *library;
}

}  // namespace

std::unique_ptr<Transport> open_mpi_transport(std::string const& file, std::string const& version,
                                              int communicator) {
  return open_library(file, version).make(communicator);
}

std::vector<double> mpi_ping_pong(std::string const& file, std::string const& version,
                                  int communicator, std::size_t bytes, int rounds) {
  return open_library(file, version).ping_pong(communicator, bytes, rounds);
}

std::string mpi_problem(std::string const& file) {
  if (std::filesystem::exists(file)) return {};
  return concat("it was built without MPI; ", rebuild);
}

}  // namespace sparsecomm
