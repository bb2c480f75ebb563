#include "kernels/cuda_library.h"

#include <dlfcn.h>

#include <filesystem>

#include "base/error.h"

namespace sparsecomm {
namespace {

constexpr std::string_view rebuild =
    "install sparsecomm anew with nvcc on PATH (CUDA 12.5 or newer) and a torch with CUDA, or move "
    "the model to the CPU";

}  // namespace

cuda::Library const& open_cuda_library(std::string const& file) {
  require(std::filesystem::exists(file), "sparsecomm was built without CUDA kernels: there is no ",
          file, "; ", rebuild);
  void* const object = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  require(object != nullptr,
          "the CUDA kernels cannot be loaded: ", object == nullptr ? dlerror() : "", "; ", rebuild);
  auto const* const library =
      static_cast<cuda::Library const*>(dlsym(object, cuda::library_symbol));
  require(library != nullptr, file, " does not hold sparsecomm's CUDA kernels; ", rebuild);
  return *library;
}

}  // namespace sparsecomm
