#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "distributed_error.h"
#include "engine/selection_exchange.h"
#include "engine/sparse_collectives.h"
#include "interpreter.h"
#include "parameter_group.h"
#include "planner_dict.h"
#include "python_duration.h"
#include "stall_log.h"
#include "torch_executor.h"
#include "transport_holder.h"

namespace py = pybind11;

namespace sparsecomm {
namespace {

std::shared_ptr<Communicator> make_communicator(std::unique_ptr<Transport> transport,
                                                CommunicatorOptions const& options) {
  // What still runs is broken off, and its completion may want the interpreter.
  return {new Communicator(std::move(transport), options), [](Communicator const* communicator) {
            run_off_own_threads(communicator->on_own_thread(),
                                [communicator] { delete communicator; });
          }};
}

// A communicator of its own and an exchange of one tensor at a time: what benchmarks and tests
// drive.
class Exchange {
 public:
  Exchange(std::shared_ptr<Communicator> communicator, std::int64_t numel, at::ScalarType dtype,
           ExchangeOptions const& options)
      : communicator_(std::move(communicator)),
        group_(ParameterGroup::make("exchange", {}, dtype, {{"tensor", 0, checked(numel)}}, options,
                                    *communicator_, true)) {}

  // Replaces the gradient by the average over ranks. Blocks. `ends_step`: where it
  // is false on some rank, its batch goes on.
  void run(at::Tensor const& gradient, bool ends_step) {
    require(gradient.is_contiguous() && gradient.device().is_cpu() &&
                gradient.scalar_type() == group_->dtype() &&
                gradient.numel() == group_->residual().numel(),
            "the gradient must be a contiguous CPU tensor of ", group_->residual().numel(),
            " elements of ", at::toString(group_->dtype()), ", not ", gradient.numel(), " of ",
            at::toString(gradient.scalar_type()), " on ", gradient.device().str());
    group_->arrive(group_->members().front(), gradient.data_ptr());
    try {
      group_->run(ends_step ? batch_of_one : open_batch);
    } catch (...) {
      std::rethrow_exception(as_distributed_error(std::current_exception()));
    }
  }

  at::Tensor residual() const { return group_->residual(); }
  ExchangeStats const& stats() const { return group_->stats(); }
  ExchangeState const& state() const { return group_->state(); }
  std::string_view algorithm() const { return group_->algorithm(); }
  bool settled() const { return group_->settled(); }

 private:
  static std::size_t checked(std::int64_t numel) {
    require(numel >= 0, "numel = ", numel, " is negative");
    return static_cast<std::size_t>(numel);
  }

  std::shared_ptr<Communicator> communicator_;
  std::unique_ptr<ParameterGroup> group_;
};

// Measures an exchange alone.
class Selection {
 public:
  Selection(std::shared_ptr<Communicator> communicator, std::int64_t numel, std::int64_t k,
            ExchangeOptions const& options)
      : communicator_(std::move(communicator)) {
    require(numel >= 0 && k >= 1, "numel = ", numel, " and k = ", k, " must be at least 0 and 1");
    AlgorithmOptions collective = options.collective;
    collective.schedule = options.schedule;
    exchange_ = std::make_shared<SelectionExchange<float>>(
        find_algorithm(options.algorithm), static_cast<std::uint64_t>(numel),
        static_cast<std::uint64_t>(k), collective, communicator_->services());
  }

  // Blocks; returns the result's number of entries.
  std::uint64_t run(at::Tensor const& indices, at::Tensor const& values);

 private:
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<SelectionExchange<float>> exchange_;
};

std::uint64_t Selection::run(at::Tensor const& indices, at::Tensor const& values) {
  for (at::Tensor const& tensor : {indices, values}) {
    require(tensor.is_contiguous() && tensor.device().is_cpu() &&
                tensor.numel() == indices.numel() && tensor.dim() == 1,
            "indices and values must be contiguous CPU vectors of the same length, not ",
            indices.sizes(), " and ", values.sizes());
  }
  require(indices.scalar_type() == at::kInt && values.scalar_type() == at::kFloat,
          "indices must be int32 and values float32, not ", at::toString(indices.scalar_type()),
          " and ", at::toString(values.scalar_type()));
  auto const nnz = static_cast<std::size_t>(indices.numel());
  exchange_->bind({{reinterpret_cast<std::uint32_t const*>(indices.const_data_ptr<int>()), nnz},
                   {values.const_data_ptr<float>(), nnz}});
  try {
    communicator_->run(exchange_);
  } catch (...) {
    std::rethrow_exception(as_distributed_error(std::current_exception()));
  }
  return exchange_->result_nnz();
}

py::dict stats_of(ExchangeStats const& stats) {
  py::dict result;
  result["steps"] = stats.steps;
  result["selected"] = stats.selected;
  result["result_nnz"] = stats.result_nnz;
  result["numel"] = stats.numel;
  result["select_seconds"] = seconds(stats.select);
  result["exchange_seconds"] = seconds(stats.exchange);
  result["apply_seconds"] = seconds(stats.apply);
  return result;
}

py::dict counters_of(Counters const& counters) {
  py::dict result;
  result["sent_bytes"] = Counters::total(counters.sent_bytes);
  result["received_bytes"] = Counters::total(counters.received_bytes);
  result["messages"] = Counters::total(counters.sent_messages);
  return result;
}

ExchangeOptions make_exchange_options(
    std::string algorithm, double density, std::string const& between,
    std::uint64_t threshold_period, std::uint64_t partition_period, double balance_factor,
    std::string const& index_codec, bool average, std::string const& value_codec,
    std::string const& dense_codec, std::uint64_t seed, std::uint64_t overlap_chunk,
    std::size_t bucket, double momentum, bool mask_momentum, double first_moment, bool nesterov,
    std::uint64_t dense_steps, std::uint64_t warmup_steps, std::vector<double> warmup_densities,
    std::uint32_t block_bytes, std::size_t block, std::string groups, bool shares_density) {
  ExchangeOptions options;
  options.groups = std::move(groups);
  options.shares_density = shares_density;
  options.algorithm = std::move(algorithm);
  options.density = density;
  options.schedule = {find_threshold_source(between), threshold_period};
  options.collective.partition_period = partition_period;
  options.collective.balance_factor = balance_factor;
  options.collective.frame.index_codec = index_codec_named(index_codec);
  options.collective.frame.value_codec = value_codec_named(value_codec);
  options.collective.dense_codec = value_codec_named(dense_codec);
  options.collective.seed = seed;
  options.collective.overlap_chunk = overlap_chunk;
  options.collective.block_bytes = block_bytes;
  options.average = average;
  options.rule = {.bucket = bucket,
                  .block = block,
                  .velocity = {.momentum = momentum, .nesterov = nesterov},
                  .mask_momentum = mask_momentum,
                  .first_moment = first_moment};
  options.warmup = {dense_steps, warmup_steps, std::move(warmup_densities)};
  validate(options);
  return options;
}

py::list describe_algorithms() {
  py::list rows;
  for (AlgorithmEntry const& entry : algorithms()) {
    py::dict row;
    row["name"] = entry.name;
    row["description"] = entry.description;
    row["words"] = entry.words;
    row["source"] = entry.source;
    row["sparse"] = entry.sparse;
    row["top_k_result"] = entry.top_k_result;
    row["exact"] = can_reduce(entry);
    row["rounds"] = entry.rounds;
    row["needs"] = name(entry.needs);
    rows.append(row);
  }
  return rows;
}

// Upper bounds for one rank and one exchange, which ends a step: messages sent, bytes received.
std::pair<double, double> cost_of(std::string const& algorithm, int ranks, std::uint64_t extent,
                                  std::uint64_t k, double value_bytes) {
  AlgorithmEntry const& entry = find_algorithm(algorithm);
  Cost const cost = operation_cost(entry, {ranks, extent, entry.sparse ? k : extent, value_bytes},
                                   {}, sizeof(StepPayload), true);
  return {cost.messages, cost.received_bytes()};
}

py::dict build_info() {
  py::dict info;
  py::list codecs;
  for (IndexCodecEntry const& entry : index_codecs()) codecs.append(entry.name);
  py::list value_codec_names;
  for (ValueCodecEntry const& entry : value_codecs()) value_codec_names.append(entry.name);
  py::list targets;
  for (auto const& table : kernel_tables<float>()) targets.append(table.target);
  py::list names;
  for (AlgorithmEntry const& entry : algorithms()) names.append(entry.name);
  info["compiler"] = __VERSION__;
  info["simd_targets"] = targets;
  info["simd_target"] = kernels<float>().target;
  info["index_codecs"] = codecs;
  info["value_codecs"] = value_codec_names;
  info["algorithms"] = names;
  return info;
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<ExchangeOptions>(module, "ExchangeOptions")
      .def(py::init(&make_exchange_options), py::kw_only(), py::arg("algorithm"),
           py::arg("density"), py::arg("between"), py::arg("threshold_period"),
           py::arg("partition_period"), py::arg("balance_factor"), py::arg("index_codec"),
           py::arg("average"), py::arg("value_codec") = "raw", py::arg("dense_codec") = "raw",
           py::arg("seed") = 0, py::arg("overlap_chunk") = AlgorithmOptions{}.overlap_chunk,
           py::arg("bucket") = 0, py::arg("momentum") = 0.0, py::arg("mask_momentum") = true,
           py::arg("first_moment") = 0.0, py::arg("nesterov") = false, py::arg("dense_steps") = 0,
           py::arg("warmup_steps") = 1, py::arg("warmup_densities") = std::vector<double>{},
           py::arg("block_bytes") = AlgorithmOptions{}.block_bytes, py::arg("block") = 0,
           py::arg("groups") = "", py::arg("shares_density") = false);

  std::size_t const default_fusion_bytes = CommunicatorOptions{}.fusion_bytes;
  module.attr("FUSION_BYTES") = default_fusion_bytes;
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def(py::init([](TransportHolder& transport, PythonDuration timeout, std::int64_t threads,
                       std::optional<PythonDuration> stall_limit,
                       std::function<void(std::string const&)> log_stall,
                       AggregatorAddresses const& aggregators, std::size_t fusion_bytes) {
             CommunicatorOptions options;
             options.fusion_bytes = fusion_bytes;
             options.timeout = timeout.value;
             options.aggregator_addresses = aggregators;
             options.stall = make_stall_options(stall_limit, std::move(log_stall));
             options.executor = make_executor(threads);
             options.timeline = transport.timeline();
             return make_communicator(transport.take(), options);
           }),
           py::arg("transport"), py::arg("timeout"), py::arg("threads") = 1,
           py::arg("stall_limit") = py::none(), py::arg("log_stall") = py::none(),
           py::arg("aggregators") = AggregatorAddresses{},
           py::arg("fusion_bytes") = default_fusion_bytes)
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("transport", &Communicator::transport_name)
      .def("services",
           [](Communicator const& self) {
             py::list names;
             Services const services = self.services();
             if (services.native != nullptr) names.append(name(Needs::native_allreduce));
             if (services.aggregators != nullptr) names.append(name(Needs::aggregators));
             return names;
           })
      .def(
          "missing",
          [](Communicator const& self, std::string const& algorithm) {
            return self.missing(find_algorithm(algorithm));
          },
          py::arg("algorithm"))
      .def("close", &close_communicator)
      .def("figures", &figures_of, py::call_guard<py::gil_scoped_release>())
      .def("counters", [](Communicator const& self) { return counters_of(self.counters()); })
      .def("lost_aggregators",
           [](Communicator const& self) { return reasons(self.lost_aggregators()); });

  py::class_<Exchange>(module, "Exchange")
      .def(py::init([](std::shared_ptr<Communicator> communicator, std::int64_t numel,
                       py::object const& dtype, ExchangeOptions const& options) {
             return std::make_unique<Exchange>(
                 std::move(communicator), numel,
                 reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type, options);
           }),
           py::arg("communicator"), py::arg("numel"), py::arg("dtype"), py::arg("options"))
      .def("run", &Exchange::run, py::arg("gradient"), py::arg("ends_step") = true,
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("residual", &Exchange::residual)
      .def("stats", [](Exchange const& self) { return stats_of(self.stats()); })
      .def_property_readonly("algorithm", &Exchange::algorithm)
      .def_property_readonly("settled", &Exchange::settled)
      .def("threshold", [](Exchange const& self) { return self.state().local_threshold; });

  py::class_<Selection>(module, "SelectionExchange")
      .def(py::init<std::shared_ptr<Communicator>, std::int64_t, std::int64_t,
                    ExchangeOptions const&>(),
           py::arg("communicator"), py::arg("numel"), py::arg("k"), py::arg("options"))
      .def("run", &Selection::run, py::arg("indices"), py::arg("values"),
           py::call_guard<py::gil_scoped_release>());

  module.def("algorithms", &describe_algorithms);
  module.def("cost", &cost_of, py::arg("algorithm"), py::arg("ranks"), py::arg("extent"),
             py::arg("k"), py::arg("value_bytes"));
  module.def("build_info", &build_info);
}

}  // namespace sparsecomm
