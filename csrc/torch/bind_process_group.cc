#include <pybind11/functional.h>

#include "bindings.h"
#include "interpreter.h"
#include "process_group.h"
#include "python_duration.h"
#include "stall_log.h"

namespace py = pybind11;

namespace sparsecomm {

void bind_process_group(py::module_& module) {
  py::class_<OpenCommunicators, std::shared_ptr<OpenCommunicators>>(module, "OpenCommunicators")
      .def(py::init<>())
      .def("close", &OpenCommunicators::close);
  py::class_<ProcessGroup, c10d::Backend, c10::intrusive_ptr<ProcessGroup>>(module, "ProcessGroup")
      .def(py::init([](ProcessGroup::BackendPtr gloo,
                       std::optional<std::function<ProcessGroup::BackendPtr()>> make_nccl,
                       std::function<ProcessGroup::OptionsPtr()> make_gloo_options,
                       ProcessGroup::StorePtr store, PythonDuration timeout,
                       ConnectOptions const& connect, AggregatorAddresses const& aggregators,
                       std::uint32_t block_bytes, std::function<void(std::string const&)> warn,
                       std::shared_ptr<OpenCommunicators> open,
                       std::optional<PythonDuration> engine_timeout) {
             return c10::make_intrusive<ProcessGroup>(ProcessGroup::Parts{
                 std::move(gloo), std::move(make_nccl).value_or(nullptr),
                 std::move(make_gloo_options), std::move(store), to_milliseconds(timeout.value),
                 connect, aggregators, block_bytes,
                 engine_timeout ? std::optional(to_milliseconds(engine_timeout->value))
                                : std::nullopt,
                 log_of_python(std::move(warn)), std::move(open)});
           }),
           py::arg("gloo"), py::arg("make_nccl"), py::arg("make_gloo_options"), py::arg("store"),
           py::arg("timeout"), py::arg("connect"), py::arg("aggregators"), py::arg("block_bytes"),
           py::arg("warn"), py::arg("open"), py::arg("engine_timeout"))
      .def_property_readonly("aggregators", &ProcessGroup::aggregators)
      .def_property_readonly("block_bytes", &ProcessGroup::block_bytes)
      // Whoever makes it holds the group's lock, and waits for the interpreter.
      .def_property_readonly(
          "communicator",
          py::cpp_function(&ProcessGroup::communicator, py::call_guard<InterpreterRelease>()));
}

}  // namespace sparsecomm
