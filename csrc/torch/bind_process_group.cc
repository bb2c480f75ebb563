#include <pybind11/chrono.h>
#include <pybind11/functional.h>

#include "bindings.h"
#include "process_group.h"

namespace py = pybind11;

namespace sparsecomm {

void bind_process_group(py::module_& module) {
  py::class_<ProcessGroup, c10d::Backend, c10::intrusive_ptr<ProcessGroup>>(module, "ProcessGroup")
      .def(
          py::init([](ProcessGroup::BackendPtr gloo,
                      std::optional<std::function<ProcessGroup::BackendPtr()>> make_nccl,
                      std::function<ProcessGroup::OptionsPtr()> make_gloo_options,
                      ProcessGroup::StorePtr store, std::chrono::milliseconds timeout,
                      ConnectOptions const& connect, std::function<void(std::string const&)> warn) {
            return c10::make_intrusive<ProcessGroup>(ProcessGroup::Parts{
                std::move(gloo), std::move(make_nccl).value_or(nullptr),
                std::move(make_gloo_options), std::move(store), timeout, connect, std::move(warn)});
          }),
          py::arg("gloo"), py::arg("make_nccl"), py::arg("make_gloo_options"), py::arg("store"),
          py::arg("timeout"), py::arg("connect"), py::arg("warn"));
}

}  // namespace sparsecomm
