#include <pybind11/stl.h>

#include "bindings.h"
#include "distributed_error.h"
#include "engine/gradient_exchange.h"
#include "engine/link_model.h"
#include "planner_dict.h"

namespace py = pybind11;

namespace sparsecomm {
namespace {

// Figures that a caller gives; unlike saved ones they must be complete.
Figures figures_from(std::map<std::string, double> const& named) {
  for (std::string_view const name : Figures::names) {
    require(named.contains(std::string(name)), "the figures lack '", name, "'");
  }
  return Figures::from_named(named);
}

std::map<std::string, double> to_map(Figures const& figures) {
  std::map<std::string, double> named;
  auto const values = figures.values();
  for (std::size_t i = 0; i < values.size(); ++i) named.emplace(Figures::names[i], values[i]);
  return named;
}

Workload make_workload(int ranks, std::int64_t extent, std::int64_t k, std::int64_t union_nnz,
                       std::size_t element_bytes, std::size_t value_bytes, bool selects,
                       ExchangeOptions const& options, bool native_allreduce, int aggregators,
                       bool commits, bool has_moment) {
  require(ranks >= 1, "ranks = ", ranks, " is below 1");
  require(aggregators >= 0, "aggregators = ", aggregators, " is below 0");
  require(extent >= 1 && extent < UINT32_MAX, "numel = ", extent, " is not from 1 to 2^32 - 2");
  require(k >= 1 && k <= extent, "k = ", k, " is not from 1 to numel = ", extent);
  require(union_nnz == 0 || (union_nnz >= k && union_nnz <= extent && union_nnz / ranks <= k),
          "a union of ", union_nnz, " entries is not between k = ", k,
          " and the lesser of numel = ", extent, " and ", ranks, " times k");
  Workload workload;
  workload.ranks = ranks;
  workload.extent = static_cast<std::uint64_t>(extent);
  workload.k = static_cast<std::uint64_t>(k);
  workload.union_nnz = static_cast<std::uint64_t>(union_nnz);
  workload.element_bytes = element_bytes;
  workload.value_bytes = value_bytes;
  workload.selects = selects;
  workload.native_allreduce = native_allreduce;
  workload.aggregators = aggregators;
  workload.commits = commits;
  workload.has_moment = has_moment;
  workload.options = options.collective;
  workload.options.schedule = options.schedule;
  return workload;
}

py::list predictions(std::map<std::string, double> const& figures, Workload const& workload) {
  py::list rows;
  auto const all = [](AlgorithmEntry const&, Workload const&) { return true; };
  for (Prediction const& prediction : rank_algorithms(workload, figures_from(figures), all)) {
    py::dict row;
    row["algorithm"] = prediction.algorithm->name;
    row["candidate"] = is_candidate(*prediction.algorithm, workload);
    row["index_codec"] = prediction.index_codec == nullptr ? "dense" : prediction.index_codec->name;
    row["value_codec"] = prediction.value_codec->name;
    row["seconds"] = prediction.total();
    row["select"] = prediction.select;
    row["latency"] = prediction.latency;
    row["transfer"] = prediction.transfer;
    row["compute"] = prediction.compute;
    row["apply"] = prediction.apply;
    row["received_bytes"] = prediction.bytes;
    row["messages"] = prediction.messages;
    rows.append(row);
  }
  return rows;
}

// A plan by itself, for simulations: what it observes is what it is told.
class SimulatedPlan {
 public:
  SimulatedPlan(std::map<std::string, double> const& figures, Workload const& workload)
      : workload_(workload) {
    plan_.begin(figures_from(figures), workload, 0);
  }
  std::string_view algorithm() const { return plan_.algorithm()->name; }
  bool settled() const { return plan_.settled(step_); }
  // The step took `seconds` on the slowest rank and had a result of `result_nnz` entries.
  void step(double seconds, std::uint64_t result_nnz) {
    require(seconds > 0, "a step of ", seconds, " s");
    plan_.observe(former_, 0, workload_.k, step_);
    plan_.conclude(workload_, result_nnz, true, step_++);
    former_ = seconds;
  }

 private:
  Workload workload_;
  Plan plan_;
  double former_ = 0;
  std::uint64_t step_ = 0;
};

}  // namespace

py::dict to_dict(PlanState const& state) {
  py::dict saved;
  saved["figures"] = state.figures ? py::cast(to_map(*state.figures)) : py::none();
  auto const name = [](AlgorithmEntry const* entry) {
    return entry == nullptr ? std::string_view() : entry->name;
  };
  saved["algorithm"] = name(state.algorithm);
  saved["steps_with"] = state.steps_with;
  saved["union_ratio"] = state.union_ratio;
  saved["realised"] = state.realised;
  saved["noise"] = state.noise;
  saved["observations_before"] = state.observations_before;
  py::list experience;
  for (Experience const& one : state.experience) {
    experience.append(
        py::dict(py::arg("algorithm") = name(one.algorithm), py::arg("correction") = one.correction,
                 py::arg("observations") = one.observations, py::arg("last_step") = one.last_step));
  }
  saved["experience"] = experience;
  return saved;
}

PlanState plan_from_dict(py::handle const& saved) {
  PlanState state;
  auto const entry = [](py::handle const& name) -> AlgorithmEntry const* {
    auto const text = name.cast<std::string>();
    return text.empty() ? nullptr : &find_algorithm(text);
  };
  if (!saved["figures"].is_none()) {
    try {
      state.figures = Figures::from_named(saved["figures"].cast<std::map<std::string, double>>());
    } catch (InvalidArgument const& error) {
      throw InvalidArgument(
          concat(error.what(), "; load the state with the release of sparsecomm that saved it"));
    }
  }
  state.algorithm = entry(saved["algorithm"]);
  state.steps_with = saved["steps_with"].cast<std::uint64_t>();
  state.union_ratio = saved["union_ratio"].cast<double>();
  state.realised = saved["realised"].cast<double>();
  // Checkpoints of earlier versions lack these.
  if (saved.contains("noise")) state.noise = saved["noise"].cast<double>();
  if (saved.contains("observations_before")) {
    state.observations_before = saved["observations_before"].cast<std::uint64_t>();
  }
  for (py::handle const item : saved["experience"]) {
    state.experience.push_back({entry(item["algorithm"]), item["correction"].cast<double>(),
                                item["observations"].cast<std::uint64_t>(),
                                item["last_step"].cast<std::uint64_t>()});
  }
  return state;
}

std::map<std::string, double> figures_of(Communicator& communicator) {
  auto const calibration = std::make_shared<Calibration>(communicator);
  try {
    communicator.run(calibration);
  } catch (...) {
    std::rethrow_exception(as_distributed_error(std::current_exception()));
  }
  return to_map(calibration->figures());
}

void bind_planner(py::module_& module) {
  py::class_<Workload>(module, "Workload")
      .def(py::init(&make_workload), py::kw_only(), py::arg("ranks"), py::arg("numel"),
           py::arg("k"), py::arg("union_nnz"), py::arg("element_bytes"), py::arg("value_bytes"),
           py::arg("selects"), py::arg("options"), py::arg("native_allreduce") = false,
           py::arg("aggregators") = 0, py::arg("commits") = true, py::arg("has_moment") = false);
  py::class_<SimulatedPlan>(module, "SimulatedPlan")
      .def(py::init<std::map<std::string, double> const&, Workload const&>(), py::arg("figures"),
           py::arg("workload"))
      .def_property_readonly("algorithm", &SimulatedPlan::algorithm)
      .def_property_readonly("settled", &SimulatedPlan::settled)
      .def("step", &SimulatedPlan::step, py::arg("seconds"), py::arg("result_nnz"));
  module.def("predictions", &predictions, py::arg("figures"), py::arg("workload"));
  module.def("entries_at", &entries_at, py::arg("density"), py::arg("numel"));
  module.def("expected_union", &expected_union, py::arg("numel"), py::arg("k"), py::arg("ranks"));
  module.def(
      "measure_rates", [] { return to_map({.link = {}, .rates = measure_rates()}); },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace sparsecomm
