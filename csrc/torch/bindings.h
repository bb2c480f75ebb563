// What module.cc puts together: each file binds its own part of sparsecomm._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace sparsecomm {

void bind_engine(pybind11::module_& module);  // options, Communicator, Exchange, build information
void bind_transport(pybind11::module_& module);      // ConnectOptions, connect, the table
void bind_codecs(pybind11::module_& module);         // the wire codecs on tensors
void bind_kernels(pybind11::module_& module);        // the kernels on tensors
void bind_collectives(pybind11::module_& module);    // Collectives, CollectiveWork
void bind_planner(pybind11::module_& module);        // predictions, figures
void bind_cuda(pybind11::module_& module);           // the CUDA kernels on tensors
void bind_hooks(pybind11::module_& module);          // HookState, register_hook
void bind_benchmark(pybind11::module_& module);      // aggregators to measure with
void bind_process_group(pybind11::module_& module);  // the backend "sparsecomm"

}  // namespace sparsecomm
