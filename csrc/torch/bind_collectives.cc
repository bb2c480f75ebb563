#include "bindings.h"
#include "collectives.h"
#include "interpreter.h"

namespace py = pybind11;

namespace sparsecomm {
namespace {

// The blocking form and the one that returns a work, of one kind.
template <CollectiveKind K>
at::Tensor run_one(Collectives& self, at::Tensor tensor, std::string_view algorithm,
                   std::string_view op, std::string name, int priority) {
  auto results = self.run(CollectiveRequest::make(K, std::move(tensor), algorithm, op),
                          std::move(name), priority);
  return std::move(results.front());
}

template <CollectiveKind K>
c10::intrusive_ptr<CollectiveWork> start(Collectives& self, at::Tensor tensor,
                                         std::string_view algorithm, std::string_view op,
                                         std::string name, int priority) {
  return self.start(CollectiveRequest::make(K, std::move(tensor), algorithm, op), std::move(name),
                    priority);
}

std::vector<CollectiveRequest> make_requests(std::vector<at::Tensor> tensors,
                                             std::string_view algorithm, std::string_view op) {
  std::vector<CollectiveRequest> requests;
  requests.reserve(tensors.size());
  for (at::Tensor& tensor : tensors) {
    requests.push_back(
        CollectiveRequest::make(CollectiveKind::allreduce, std::move(tensor), algorithm, op));
  }
  return requests;
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
      .def("join", &Collectives::join, Release())
      .def("allreduce", &run_one<Kind::allreduce>, py::arg("tensor"), py::arg("algorithm"),
           py::arg("op"), py::arg("name") = "", py::arg("priority") = 0, Release())
      .def("start_allreduce", &start<Kind::allreduce>, py::arg("tensor"), py::arg("algorithm"),
           py::arg("op"), py::arg("name") = "", py::arg("priority") = 0, Release())
      .def(
          "grouped_allreduce",
          [](Collectives& self, std::vector<at::Tensor> tensors, std::string_view algorithm,
             std::string_view op, std::string name, int priority) {
            return self.run(make_requests(std::move(tensors), algorithm, op), std::move(name),
                            priority);
          },
          py::arg("tensors"), py::arg("algorithm"), py::arg("op"), py::arg("name") = "",
          py::arg("priority") = 0, Release())
      .def(
          "start_grouped_allreduce",
          [](Collectives& self, std::vector<at::Tensor> tensors, std::string_view algorithm,
             std::string_view op, std::string name, int priority) {
            return self.start(make_requests(std::move(tensors), algorithm, op), std::move(name),
                              priority);
          },
          py::arg("tensors"), py::arg("algorithm"), py::arg("op"), py::arg("name") = "",
          py::arg("priority") = 0, Release())
      .def(
          "allgather",
          [](Collectives& self, at::Tensor tensor, std::string name, int priority) {
            return self.run(
                CollectiveRequest::make(Kind::allgather, std::move(tensor), "auto", "sum"),
                std::move(name), priority);
          },
          py::arg("tensor"), py::arg("name") = "", py::arg("priority") = 0, Release())
      .def(
          "start_allgather",
          [](Collectives& self, at::Tensor tensor, std::string name, int priority) {
            return start<Kind::allgather>(self, std::move(tensor), "auto", "sum", std::move(name),
                                          priority);
          },
          py::arg("tensor"), py::arg("name") = "", py::arg("priority") = 0, Release())
      .def(
          "reduce_scatter",
          [](Collectives& self, at::Tensor tensor, std::string_view op, std::string name,
             int priority) {
            return run_one<Kind::reduce_scatter>(self, std::move(tensor), "auto", op,
                                                 std::move(name), priority);
          },
          py::arg("tensor"), py::arg("op"), py::arg("name") = "", py::arg("priority") = 0,
          Release())
      .def(
          "start_reduce_scatter",
          [](Collectives& self, at::Tensor tensor, std::string_view op, std::string name,
             int priority) {
            return start<Kind::reduce_scatter>(self, std::move(tensor), "auto", op, std::move(name),
                                               priority);
          },
          py::arg("tensor"), py::arg("op"), py::arg("name") = "", py::arg("priority") = 0,
          Release());
}

}  // namespace sparsecomm
