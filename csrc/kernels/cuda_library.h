// The CUDA kernels, whose code lies in a shared object of its own: who has no GPU needs no CUDA.
#pragma once

#include <string>

#include "kernels/cuda/library.h"

namespace sparsecomm {

// Opens the shared object `file`; it stays open. Throws InvalidArgument, saying what to do, where
// it is not there or cannot be loaded.
cuda::Library const& open_cuda_library(std::string const& file);

}  // namespace sparsecomm
