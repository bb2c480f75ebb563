#include "ops_cuda.h"

#include "kernels/cuda_library.h"
#include "side_stream.h"

namespace sparsecomm::ops {
namespace {

struct Kernels {
  std::string file;
  bool emulated = false;
  cuda::Library const* library = nullptr;
};
Kernels kernels;

cuda::Library const& cuda_library() {
  TORCH_CHECK_NOT_IMPLEMENTED(!kernels.file.empty(),
                              "sparsecomm's CUDA kernels are not set up; import sparsecomm");
  try {
    if (kernels.library == nullptr) kernels.library = &open_cuda_library(kernels.file);
  } catch (InvalidArgument const& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, error.what());
  }
  return *kernels.library;
}

}  // namespace

void use_cuda_library(std::string file, bool emulated) {
  kernels = {std::move(file), emulated, nullptr};
}

bool on_device(at::Tensor const& tensor) {
  return tensor.is_cuda() || (kernels.emulated && tensor.is_cpu());
}

DeviceCall::DeviceCall(at::Tensor const& like)
    : guard_(like.device()),
      options_(at::TensorOptions().device(like.device())),
      queue_(queue_on(current_stream(like.device()), cuda_library())),
      on_(queue_) {}

}  // namespace sparsecomm::ops
