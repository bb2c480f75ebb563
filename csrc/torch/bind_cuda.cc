// The CUDA kernels on tensors, on the current stream: what benchmarks time.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "kernels/cuda_library.h"
#include "ops_cuda.h"

namespace py = pybind11;

namespace sparsecomm {
namespace {

template <class T>
std::span<T> entries(at::Tensor const& tensor) {
  return {static_cast<T*>(tensor.data_ptr()), static_cast<std::size_t>(tensor.numel())};
}

// Selects from gradient + residual, or from the gradient alone where the residual is empty. All
// memory is made once, so that a call does no more than to enqueue kernels.
class CudaSelection {
 public:
  CudaSelection(std::string const& file, at::Tensor gradient, at::Tensor residual,
                std::int64_t limit)
      : library_(open_cuda_library(file)),
        gradient_(std::move(gradient)),
        residual_(std::move(residual)),
        limit_(limit) {
    auto const is_dense = [](at::Tensor const& tensor) {
      return tensor.is_cuda() && tensor.is_contiguous() && tensor.scalar_type() == at::kFloat;
    };
    require(is_dense(gradient_) && is_dense(residual_) &&
                (residual_.numel() == 0 || residual_.numel() == gradient_.numel()),
            "gradient and residual must be contiguous CUDA tensors of float32, of one size, or the "
            "residual of none");
    require(limit >= 0 && limit <= gradient_.numel(), "limit = ", limit, " is not in [0, ",
            gradient_.numel(), "]");
    auto const bytes = gradient_.options().dtype(at::kByte);
    auto const size = static_cast<std::size_t>(gradient_.numel());
    indices_ = at::empty({limit}, bytes.dtype(at::kInt));
    values_ = at::empty({limit}, gradient_.options());
    state_ = at::empty({static_cast<std::int64_t>(sizeof(cuda::SelectionState))}, bytes);
    workspace_ =
        at::empty({static_cast<std::int64_t>(std::max(library_.selection_workspace(size),
                                                      library_.threshold_workspace(size, 0)))},
                  bytes);
  }

  void begin(float magnitude) {
    auto const guard = on_device();
    library_.begin(
        cuda::begin_selection(Threshold<float>{magnitude, 0}, static_cast<std::uint64_t>(limit_)),
        state(), stream());
  }
  void exact_threshold(std::int64_t k) {
    auto const guard = on_device();
    begin(0);
    Segment<float> const segment{entries<float>(gradient_), entries<float>(residual_)};
    library_.f32.exact_threshold({&segment, 1}, static_cast<std::uint64_t>(k), state(),
                                 workspace_.data_ptr(), stream());
  }
  void select() {
    auto const guard = on_device();
    library_.f32.select(entries<float>(gradient_).data(), entries<float>(gradient_).size(), 0,
                        state(), packed(), workspace_.data_ptr(), stream());
  }
  void fused_error_feedback() {
    require(residual_.numel() > 0, "this selection has no residual");
    auto const guard = on_device();
    cuda::ErrorFeedbackArguments<float> arguments;
    arguments.gradient = entries<float>(gradient_).data();
    arguments.residual = entries<float>(residual_).data();
    arguments.size = entries<float>(gradient_).size();
    library_.f32.fused_error_feedback(arguments, state(), packed(), workspace_.data_ptr(),
                                      stream());
  }
  // Waits for the device.
  std::uint64_t count() const {
    auto const guard = on_device();
    cuda::SelectionState found;
    library_.runtime.copy(&found, state_.data_ptr(), sizeof(found), stream());
    library_.runtime.synchronize(stream());
    return found.count();
  }
  at::Tensor indices() const { return indices_; }
  at::Tensor values() const { return values_; }

 private:
  c10::DeviceGuard on_device() const { return c10::DeviceGuard(gradient_.device()); }
  cuda::SelectionState* state() { return static_cast<cuda::SelectionState*>(state_.data_ptr()); }
  cuda::Packed<float> packed() {
    return {static_cast<std::uint32_t*>(indices_.data_ptr()), entries<float>(values_).data()};
  }
  cuda::Stream stream() const {
    c10::Device const device = gradient_.device();
    return static_cast<cuda::Stream>(
        c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
  }

  cuda::Library const& library_;
  at::Tensor gradient_, residual_;
  std::int64_t limit_;
  at::Tensor indices_, values_, state_, workspace_;
};

}  // namespace

void bind_cuda(py::module_& module) {
  // Why the CUDA kernels in this file cannot be used here; empty where they can.
  module.def("cuda_problem", [](std::string const& file) -> std::string {
    try {
      return open_cuda_library(file).runtime.device_count() > 0 ? "" : "there is no CUDA device";
    } catch (InvalidArgument const& error) {
      return error.what();
    }
  });
  // Of the operators; see ops_cuda.h.
  module.def("use_cuda_library", &ops::use_cuda_library, py::arg("file"),
             py::arg("emulated") = false);
  py::class_<CudaSelection>(module, "CudaSelection")
      .def(py::init<std::string const&, at::Tensor, at::Tensor, std::int64_t>(), py::arg("file"),
           py::arg("gradient"), py::arg("residual"), py::arg("limit"))
      .def("begin", &CudaSelection::begin, py::arg("magnitude"))
      .def("exact_threshold", &CudaSelection::exact_threshold, py::arg("k"))
      .def("select", &CudaSelection::select)
      .def("fused_error_feedback", &CudaSelection::fused_error_feedback)
      .def("count", &CudaSelection::count)
      .def_property_readonly("indices", &CudaSelection::indices)
      .def_property_readonly("values", &CudaSelection::values);
}

}  // namespace sparsecomm
