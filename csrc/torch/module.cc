#include <pybind11/pybind11.h>

#include "base/error.h"
#include "bindings.h"

namespace {

// Arguments are the caller's mistake in any language; everything else is an error of the run.
void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (sparsecomm::InvalidArgument const& invalid) {
    pybind11::set_error(PyExc_ValueError, invalid.what());
  } catch (sparsecomm::Cancelled const& cancelled) {
    pybind11::set_error(pybind11::module_::import("sparsecomm._C").attr("CancelledError"),
                        cancelled.what());
  }
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  // Torch's own types (Backend, Work, GradBucket, Store) must be bound before ours refer to them.
  pybind11::module_::import("torch.distributed");
  pybind11::register_local_exception_translator(translate);
  sparsecomm::bind_transport(module);
  // Not by pybind11's exception type: that would keep the class in a global.
  module.attr("CancelledError") =
      pybind11::reinterpret_steal<pybind11::object>(PyErr_NewExceptionWithDoc(
          "sparsecomm.CancelledError",
          "A collective that a rank cancelled before it began; raised on every rank.",
          PyExc_RuntimeError, nullptr));
  sparsecomm::bind_engine(module);
  sparsecomm::bind_codecs(module);
  sparsecomm::bind_kernels(module);
  sparsecomm::bind_collectives(module);
  sparsecomm::bind_planner(module);
  sparsecomm::bind_cuda(module);
  sparsecomm::bind_hooks(module);
  sparsecomm::bind_process_group(module);
  sparsecomm::bind_benchmark(module);
}
