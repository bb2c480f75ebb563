#include "bindings.h"
#include "collectives.h"
#include "interpreter.h"

namespace py = pybind11;

namespace sparsecomm {
namespace {

// The blocking form and the one that returns a work, of one kind.
template <CollectiveKind K>
at::Tensor run_one(Collectives& self, at::Tensor tensor, std::string_view algorithm,
                   std::string_view op) {
  return std::move(self.run(CollectiveRequest::make(K, std::move(tensor), algorithm, op)).front());
}

template <CollectiveKind K>
c10::intrusive_ptr<CollectiveWork> start(Collectives& self, at::Tensor tensor,
                                         std::string_view algorithm, std::string_view op) {
  return self.start(CollectiveRequest::make(K, std::move(tensor), algorithm, op));
}

}  // namespace

void bind_collectives(py::module_& module) {
  module.def("require_block_bytes", &require_block_bytes, py::arg("block_bytes"));
  using Kind = CollectiveKind;
  using Release = py::call_guard<InterpreterRelease>;
  py::class_<CollectiveWork, c10d::Work, c10::intrusive_ptr<CollectiveWork>>(module,
                                                                             "CollectiveWork")
      .def("result",
           [](CollectiveWork& self) -> py::object {
             auto const value = [&] {
               InterpreterRelease const release;
               return self.wait_for_result();
             }();
             return value.isTensor() ? py::cast(value.toTensor())
                                     : py::cast(value.toTensorVector());
           })
      .def("ended", &CollectiveWork::ended)
      .def("cancel", &CollectiveWork::cancel);

  py::class_<Collectives>(module, "Collectives")
      .def(py::init(
               [](std::shared_ptr<Communicator> const& communicator, std::uint32_t block_bytes) {
                 AlgorithmOptions options;
                 options.block_bytes = block_bytes;
                 return Collectives(communicator, options);
               }),
           py::arg("communicator"), py::arg("block_bytes") = AlgorithmOptions{}.block_bytes)
      .def("allreduce", &run_one<Kind::allreduce>, Release())
      .def("start_allreduce", &start<Kind::allreduce>, Release())
      .def(
          "allgather",
          [](Collectives& self, at::Tensor tensor) {
            return self.run(
                CollectiveRequest::make(Kind::allgather, std::move(tensor), "auto", "sum"));
          },
          Release())
      .def(
          "start_allgather",
          [](Collectives& self, at::Tensor tensor) {
            return start<Kind::allgather>(self, std::move(tensor), "auto", "sum");
          },
          Release())
      .def(
          "reduce_scatter",
          [](Collectives& self, at::Tensor tensor, std::string_view op) {
            return run_one<Kind::reduce_scatter>(self, std::move(tensor), "auto", op);
          },
          Release())
      .def(
          "start_reduce_scatter",
          [](Collectives& self, at::Tensor tensor, std::string_view op) {
            return start<Kind::reduce_scatter>(self, std::move(tensor), "auto", op);
          },
          Release());
}

}  // namespace sparsecomm
