#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstring>

#include "bindings.h"
#include "connect.h"
#include "engine/timeline_file.h"
#include "ina/socket.h"
#include "ina/tcp_link.h"
#include "python_duration.h"
#include "signal_check.h"
#include "stall_log.h"
#include "store_rendezvous.h"
#include "transport/fault.h"
#include "transport/ping_pong.h"
#include "transport_holder.h"

namespace py = pybind11;

namespace sparsecomm {
namespace {

UcxOptions make_ucx_options(std::string library, std::vector<std::string> alternatives,
                            std::vector<std::pair<std::string, std::string>> settings,
                            std::vector<std::string> reserved,
                            std::optional<PythonDuration> connect_timeout) {
  UcxOptions options;
  options.library = std::move(library);
  options.alternatives = std::move(alternatives);
  options.settings = std::move(settings);
  options.reserved = std::move(reserved);
  if (connect_timeout) options.connect_timeout = connect_timeout->value;
  return options;
}

// What it raises becomes an AddressError.
Prover prover_of_python(std::function<py::bytes(py::bytes)> prove) {
  return [kept = drop_with_interpreter(std::move(prove))](std::span<const std::byte> message) {
    Proof proof{};
    std::string problem = "Python is ending";
    with_interpreter([&] {
      try {
        auto const bytes = reinterpret_cast<char const*>(message.data());
        std::string const made = (*kept)(py::bytes(bytes, message.size()));
        problem = made.size() == proof.size()
                      ? ""
                      : concat("a proof of ", made.size(), " bytes, must have ", proof.size());
        if (problem.empty()) std::memcpy(proof.data(), made.data(), proof.size());
      } catch (py::error_already_set const& error) {
        problem = error.what();
      }
    });
    require<AddressError>(problem.empty(), "its token cannot be shown: ", problem);
    return proof;
  };
}

AggregatorAddresses make_aggregator_addresses(
    std::vector<std::string> addresses, std::string const& transport, UcxOptions const& ucx,
    std::function<void(std::string const&)> log,
    std::optional<std::function<py::bytes(py::bytes)>> prove) {
  AggregatorAddresses given;
  if (prove) given.prove = prover_of_python(std::move(*prove));
  given.log = log_of_python(std::move(log));
  given.addresses = std::move(addresses);
  given.messages = {.transport = message_transport_named(transport, "aggregator_transport"),
                    .ucx = ucx};
  if (!given.addresses.empty()) require_addresses(given.addresses);
  return given;
}

ConnectOptions make_connect_options(std::string transport, UcxOptions const& ucx, std::string mpi,
                                    PythonDuration timeout, std::string call,
                                    std::optional<PythonDuration> stall_limit,
                                    std::function<void(std::string const&)> log_stall,
                                    TimelineOptions timeline, std::string agreed) {
  ConnectOptions options;
  options.agreed = std::move(agreed);
  options.timeline = std::move(timeline);
  options.transport = std::move(transport);
  options.libraries.ucx = ucx;
  options.libraries.mpi = std::move(mpi);
  options.timeout = timeout.value;
  options.call = std::move(call);
  options.stall = make_stall_options(stall_limit, std::move(log_stall));
  return options;
}

// Lets signals end the wait for other ranks, where this is the main thread.
std::function<void()> check_signals() {
  return [signals = std::make_shared<SignalCheck>()] {
    if (Interrupt* const interrupt = signals->here()) interrupt->poll(steady_clock().now());
  };
}

py::list describe(TransportLibraries const& libraries) {
  py::list rows;
  for (TransportEntry const& entry : transports()) {
    py::dict row;
    row["name"] = entry.name;
    row["description"] = entry.description;
    row["connects_processes"] = entry.connects_processes;
    row["automatic"] = entry.automatic;
    row["exact_sizes"] = entry.exact_sizes;
    row["problem"] = entry.problem(libraries);
    rows.append(row);
  }
  return rows;
}

// One-way seconds of `rounds` messages of `bytes` there and back between ranks 0 and 1.
std::vector<double> ping_pong(TransportHolder& holder, std::size_t bytes, int rounds,
                              Duration timeout) {
  Transport& transport = holder.use();
  require(transport.size() == 2, "a ping-pong takes 2 ranks, not ", transport.size());
  int const peer = 1 - transport.rank();
  std::vector<std::byte> outgoing(bytes), incoming(bytes);
  Deadline const deadline(steady_clock(), timeout);
  auto const send = [&] {
    Request request = transport.isend(peer, 1, outgoing);
    transport.wait(request, deadline);
  };
  auto const receive = [&] {
    Request request = transport.irecv(peer, 1, incoming);
    transport.wait(request, deadline);
  };
  try {
    return time_ping_pong(transport.rank() == 0, rounds, send, receive);
  } catch (...) {
    transport.abort();  // before the buffers go that it may still write into
    throw;
  }
}

}  // namespace

void bind_transport(py::module_& module) {
  py::register_exception<TransportUnavailable>(module, "TransportError", PyExc_RuntimeError);

  py::class_<UcxOptions>(module, "UcxOptions")
      .def(py::init(&make_ucx_options), py::kw_only(), py::arg("library"), py::arg("alternatives"),
           py::arg("settings"), py::arg("reserved"), py::arg("connect_timeout") = py::none())
      .def_readonly("library", &UcxOptions::library)
      .def_readonly("alternatives", &UcxOptions::alternatives)
      .def_readonly("settings", &UcxOptions::settings)
      .def_readonly("reserved", &UcxOptions::reserved);
  py::class_<AggregatorAddresses>(module, "AggregatorAddresses")
      .def(py::init(&make_aggregator_addresses), py::kw_only(), py::arg("addresses"),
           py::arg("transport"), py::arg("ucx"), py::arg("log"), py::arg("prove") = py::none())
      .def_readonly("addresses", &AggregatorAddresses::addresses);
  py::class_<TimelineFile, std::shared_ptr<TimelineFile>>(module, "TimelineFile")
      .def(py::init<>())
      .def("start", &TimelineFile::start, py::arg("path"), py::arg("rank"),
           py::call_guard<py::gil_scoped_release>())
      .def("stop", &TimelineFile::stop, py::call_guard<py::gil_scoped_release>());
  py::class_<TimelineOptions>(module, "TimelineOptions")
      .def(py::init<>())
      .def(py::init([](std::shared_ptr<TimelineFile> recorder, std::string title,
                       std::vector<int> ranks, int number) {
             return TimelineOptions{std::move(recorder),
                                    {std::move(title), std::move(ranks), number}};
           }),
           py::arg("recorder"), py::arg("title"), py::arg("ranks"), py::arg("number"));
  py::class_<ConnectOptions>(module, "ConnectOptions")
      .def(py::init(&make_connect_options), py::kw_only(), py::arg("transport"), py::arg("ucx"),
           py::arg("mpi"), py::arg("timeout"), py::arg("call"), py::arg("stall_limit"),
           py::arg("log_stall"), py::arg("timeline") = TimelineOptions{}, py::arg("agreed") = "")
      .def_readonly("transport", &ConnectOptions::transport)
      .def_property_readonly("ucx", [](ConnectOptions const& self) { return self.libraries.ucx; });

  py::enum_<FaultKind>(module, "FaultKind")
      .value("die", FaultKind::die)
      .value("delay", FaultKind::delay)
      .value("truncate", FaultKind::truncate)
      .value("corrupt", FaultKind::corrupt);
  py::enum_<Woken>(module, "Woken")
      .value("rung", Woken::rung)
      .value("woken", Woken::woken)
      .value("late", Woken::late);
  py::class_<TransportHolder>(module, "Transport")
      .def_property_readonly("name", [](TransportHolder const& self) { return self.get().name(); })
      .def(
          "ping_pong",
          [](TransportHolder& self, std::size_t bytes, int rounds, PythonDuration timeout) {
            return ping_pong(self, bytes, rounds, timeout.value);
          },
          py::arg("bytes"), py::arg("rounds"), py::arg("timeout"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "ring",
          [](TransportHolder& self, int peer, std::uint32_t number) {
            self.use().ring(peer, number);
          },
          py::arg("peer"), py::arg("number"), py::call_guard<py::gil_scoped_release>())
      .def(
          "idle",
          [](TransportHolder& self, std::uint32_t heard, PythonDuration timeout) {
            return self.use().idle(heard, Deadline(steady_clock(), timeout.value));
          },
          py::arg("heard"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("wake", [](TransportHolder& self) { self.use().wake(); })
      .def(
          "with_fault",
          [](TransportHolder& self, FaultKind kind, std::uint64_t message) {
            return TransportHolder(make_faulty(self.take(), {kind, message}), self.timeline());
          },
          py::arg("kind"), py::arg("message"));

  module.def(
      "connect",
      [](int rank, int size, c10::intrusive_ptr<c10d::Store> store,
         decltype(ConnectPlace::make_gloo) make_gloo, std::function<void(std::string const&)> warn,
         ConnectOptions const& options) {
        ConnectPlace const place{rank, size, std::move(store), std::move(make_gloo),
                                 std::move(warn)};
        return TransportHolder(connect(place, options, check_signals()), options.timeline);
      },
      py::arg("rank"), py::arg("size"), py::arg("store"), py::arg("make_gloo"), py::arg("warn"),
      py::arg("options"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "mpi_transport",
      [](std::string const& library, std::string const& version, int communicator,
         TimelineOptions const& timeline) {
        return TransportHolder(open_mpi_transport(library, version, communicator), timeline);
      },
      py::arg("library"), py::arg("version"), py::arg("communicator"),
      py::arg("timeline") = TimelineOptions{}, py::call_guard<py::gil_scoped_release>());
  module.def("mpi_ping_pong", &mpi_ping_pong, py::arg("library"), py::arg("version"),
             py::arg("communicator"), py::arg("bytes"), py::arg("rounds"),
             py::call_guard<py::gil_scoped_release>());
  module.def(
      "ucx_ping_pong",
      [](int rank, c10::intrusive_ptr<c10d::Store> store, ConnectOptions const& options,
         std::size_t bytes, int rounds) {
        auto const meeting = meet_in_store(rank, 2, std::move(store), "ping-pong",
                                           {options.timeout, check_signals()});
        return ucx_ping_pong(rank, *meeting.rendezvous, options.libraries.ucx, bytes, rounds);
      },
      py::arg("rank"), py::arg("store"), py::arg("options"), py::arg("bytes"), py::arg("rounds"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "transports", [](ConnectOptions const& options) { return describe(options.libraries); },
      py::arg("options"));
  module.def(
      "ucx_version",
      [](ConnectOptions const& options) { return ucx_version(options.libraries.ucx); },
      py::arg("options"));
}

}  // namespace sparsecomm
