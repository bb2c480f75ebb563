#include <pybind11/functional.h>

#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "benchmark/load.h"
#include "benchmark/policies.h"
#include "bindings.h"
#include "daemon/server.h"
#include "ina/tcp_link.h"
#include "interpreter.h"
#include "python_duration.h"
#include "stall_log.h"

namespace py = pybind11;

namespace sparsecomm {
namespace {

// An aggregator in a thread of this process.
class ServingAggregator {
 public:
  ServingAggregator(AggregatorOptions const& options, Log log)
      : log_(std::move(log)), server_(options, log_), thread_([this] { serve(); }) {}
  ServingAggregator(ServingAggregator const&) = delete;
  ServingAggregator& operator=(ServingAggregator const&) = delete;
  ~ServingAggregator() { end(); }

  std::string const& address() const { return server_.address(); }
  InaCounts counts() {
    InterpreterRelease const release;  // for the thread's log
    return server_.ask([](AggregatorServer& server) { return server.report().counts; }).get();
  }

  // Throws what has ended the server.
  void stop() {
    end();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void serve() noexcept {
    try {
      server_.run();
    } catch (std::exception const& error) {
      error_ = std::current_exception();
      log_(
          {.level = LogLevel::error, .text = concat("the aggregator has stopped: ", error.what())});
    }
  }
  void end() {
    if (!thread_.joinable()) return;
    InterpreterRelease const release;  // for the thread's log
    server_.stop();
    thread_.join();
  }

  Log log_;
  AggregatorServer server_;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace

void bind_benchmark(py::module_& module) {
  py::class_<ServingAggregator, std::unique_ptr<ServingAggregator>>(module, "ServingAggregator")
      .def(py::init([](std::string listen, std::size_t memory, std::string const& policy,
                       std::function<void(std::string const&)> log) {
             AggregatorOptions options;
             options.listen = std::move(listen);
             options.memory = memory;
             options.policy = &policy_named(policy);
             return std::make_unique<ServingAggregator>(
                 options, [write = log_of_python(std::move(log))](LogEntry const& entry) {
                   write(entry.text);
                 });
           }),
           py::kw_only(), py::arg("listen"), py::arg("memory"), py::arg("policy"), py::arg("log"))
      .def_property_readonly("address",
                             [](ServingAggregator const& self) { return self.address(); })
      .def_property_readonly("sent_bytes",
                             [](ServingAggregator& self) { return self.counts().sent_bytes; })
      .def_property_readonly("received_bytes",
                             [](ServingAggregator& self) { return self.counts().received_bytes; })
      .def("stop", &ServingAggregator::stop);
  module.def(
      "under_policy",
      [](AggregatorAddresses addresses, std::string const& policy) {
        addresses.policy = &policy_named(policy);
        return addresses;
      },
      py::arg("addresses"), py::arg("policy"));
  module.def(
      "load_aggregators",
      [](AggregatorAddresses const& addresses, int jobs, int workers, std::uint64_t elements,
         double zero, PythonDuration time) {
        LoadOptions const options{.jobs = jobs,
                                  .workers = workers,
                                  .elements = elements,
                                  .zero = zero,
                                  .time = time.value};
        std::vector<JobLoad> loads;
        {
          InterpreterRelease const release;
          loads = load_aggregators(addresses, options);
        }
        py::list found;
        for (JobLoad const& load : loads) {
          found.append(py::make_tuple(name(load.job), load.reductions, seconds(load.time)));
        }
        return found;
      },
      py::arg("addresses"), py::kw_only(), py::arg("jobs"), py::arg("workers"), py::arg("elements"),
      py::arg("zero"), py::arg("time"));
  module.def("aggregation_policies", [] {
    py::list names;
    for (PolicyEntry const& entry : policies()) names.append(entry.name);
    return names;
  });
}

}  // namespace sparsecomm
