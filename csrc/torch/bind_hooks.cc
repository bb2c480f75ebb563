#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "bindings.h"
#include "ddp_bucket.h"
#include "hook_state.h"
#include "interpreter.h"
#include "planner_dict.h"
#include "python_duration.h"
#include "signal_check.h"
#include "stall_log.h"
#include "tensor_memory.h"
#include "torch_executor.h"
#include "transport_holder.h"
#include "wire/checksum.h"

namespace py = pybind11;

namespace sparsecomm {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> failed_future(std::exception_ptr error, c10::TypePtr type) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(std::move(type));
  future->setError(std::move(error));
  return future;
}

// The hook that DDP's reducer calls without touching Python.
//
// An exception out of it would leave the reducer in the middle of the backward pass, and its next
// one would end in an internal assertion. So what a bucket throws fails the futures of this and of
// the step's further buckets, for which the reducer waits when the pass ends.
class DdpHook final : public c10d::CommHookInterface {
 public:
  DdpHook(c10d::Reducer const& reducer, std::shared_ptr<HookState> state)
      : reducer_(reducer), state_(std::move(state)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    if (bucket.getIndex() == 0) error_ = nullptr;
    try {
      if (!error_) {
        return state_->run(to_bucket(bucket, &reducer_), bucket.getBuffer(),
                           c10::TensorType::get());
      }
    } catch (...) {
      error_ = std::current_exception();
    }
    return failed_future(error_, c10::TensorType::get());
  }
  at::Tensor parseHookResult(c10::IValue const& result) override { return result.toTensor(); }

 private:
  c10d::Reducer const& reducer_;  // which owns this
  std::shared_ptr<HookState> state_;
  std::exception_ptr error_;  // of this step
};

// A Python object as the value of a future: what DDP's Python hooks must yield.
class PythonValue final : public c10::ivalue::PyObjectHolder {
 public:
  explicit PythonValue(at::Tensor tensor)
      : tensor_(std::move(tensor)), object_(py::cast(tensor_)) {}
  ~PythonValue() override {
    with_interpreter([&] { object_ = py::object(); });
    object_.release();  // what is left is the process's
  }
  PyObject* getPyObject() override { return object_.ptr(); }
  c10::InferredType tryToInferType() override { return {"a hook's result"}; }
  c10::IValue toIValue(c10::TypePtr const&, std::optional<int32_t>) override { unsupported(); }
  std::string toStr() override { return "a hook's result"; }
  std::vector<at::Tensor> extractTensors() override { return {tensor_}; }

 private:
  [[noreturn]] static void unsupported() { throw Error("a hook's result is for DDP alone"); }
  at::Tensor tensor_;
  py::object object_;
};

// Hands a future to Python: Work is what torch has bound, with get_future().
class FutureWork final : public c10d::Work {
 public:
  explicit FutureWork(c10::intrusive_ptr<c10::ivalue::Future> future,
                      std::weak_ptr<Communicator const> communicator = {})
      : communicator_(std::move(communicator)), future_(std::move(future)), end_(*future_) {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    auto const communicator = communicator_.lock();
    if (communicator && !future_->completed()) communicator->require_waitable();
    end_.wait();
    future_->waitAndThrow();
    return true;
  }

 private:
  std::weak_ptr<Communicator const> communicator_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  FutureEnd end_;
};

c10::intrusive_ptr<c10d::Work> run_for_python(HookState& state, Bucket const& bucket) {
  // Wrapped here, the progress thread needs no GIL for it.
  c10::IValue value(c10::intrusive_ptr<c10::ivalue::PyObjectHolder>(
      c10::make_intrusive<PythonValue>(bucket.buffer)));
  py::gil_scoped_release const release;
  auto future = state.run(bucket, std::move(value), c10::PyObjectType::get());
  return c10::make_intrusive<FutureWork>(std::move(future), state.communicator());
}

using Counts = std::pair<float, float>;
using ShareTuple = std::tuple<double, double, std::optional<Counts>, std::optional<Counts>>;

py::object to_tuple(DensityShare const& share) {
  auto const pair = [](std::optional<ShareCounts> const& counts) {
    return counts ? std::optional(Counts(counts->entries, counts->threshold)) : std::nullopt;
  };
  return py::cast(ShareTuple(share.factor, share.magnitude, pair(share.own), pair(share.agreed)));
}

DensityShare read_share(py::handle const& saved) {
  auto const counts = [](std::optional<Counts> const& pair) {
    return pair ? std::optional(ShareCounts{pair->first, pair->second}) : std::nullopt;
  };
  auto const [factor, magnitude, own, agreed] = saved.cast<ShareTuple>();
  return {factor, magnitude, counts(own), counts(agreed)};
}

py::dict to_dict(HookCheckpoint const& checkpoint) {
  py::list groups;
  for (HookCheckpoint::Group const& group : checkpoint.groups) {
    AlgorithmState const& collective = group.state.collective;
    py::dict saved;
    saved["parameters"] = group.parameters;
    saved["step"] = group.state.step;
    saved["local_threshold"] = group.state.local_threshold;
    saved["global_threshold"] = collective.global_threshold;
    saved["boundaries"] = collective.boundaries;
    if (group.state.plan.figures) saved["plan"] = to_dict(group.state.plan);
    if (DensityShare const& share = group.state.share;
        share.own || share.agreed || share.magnitude > 0)
      saved["density_share"] = to_tuple(share);
    // With each, so that a state without any, or a former release's, looks as ever.
    if (auto const& times = checkpoint.grouping)
      saved["grouping"] = std::pair(times->model, times->buckets);
    groups.append(saved);
  }
  py::dict result;
  result["row_major"] = checkpoint.row_major;
  result["residuals"] = checkpoint.residuals;
  result["moments"] = checkpoint.moments;
  result["loss_scale"] = checkpoint.loss_scale;
  result["groups"] = groups;
  return result;
}

// Throws a Python exception, or py::cast_error, where the dict is not one that to_dict() makes.
HookCheckpoint read_dict(py::dict const& saved) {
  HookCheckpoint checkpoint;
  checkpoint.row_major = saved["row_major"].cast<bool>();
  checkpoint.residuals = saved["residuals"].cast<std::map<std::string, at::Tensor>>();
  checkpoint.moments = saved["moments"].cast<std::map<std::string, at::Tensor>>();
  checkpoint.loss_scale = saved["loss_scale"].cast<double>();
  for (py::handle const item : saved["groups"]) {
    HookCheckpoint::Group& group = checkpoint.groups.emplace_back();
    group.parameters = item["parameters"].cast<std::vector<std::string>>();
    group.state.step = item["step"].cast<std::uint64_t>();
    group.state.local_threshold = item["local_threshold"].cast<double>();
    group.state.collective.global_threshold = item["global_threshold"].cast<double>();
    group.state.collective.boundaries = item["boundaries"].cast<std::vector<std::uint32_t>>();
    group.state.loss_scale = checkpoint.loss_scale;
    if (item.contains("plan")) group.state.plan = plan_from_dict(item["plan"]);
    if (item.contains("density_share")) group.state.share = read_share(item["density_share"]);
    if (item.contains("grouping")) {
      auto const [model, buckets] = item["grouping"].cast<std::pair<float, float>>();
      require(std::isfinite(model) && std::isfinite(buckets) && std::min(model, buckets) >= 0,
              "the state_dict to load has steps of ", model, " and ", buckets,
              " s, which no step takes");
      checkpoint.grouping = GroupingTimes{model, buckets};
    }
  }
  return checkpoint;
}

HookCheckpoint from_dict(py::dict const& saved) {
  try {
    return read_dict(saved);
  } catch (py::cast_error const& error) {
    throw InvalidArgument(
        concat("the state_dict to load holds what no state saves: ", error.what()));
  } catch (py::error_already_set const& error) {
    throw InvalidArgument(
        concat("the state_dict to load holds what no state saves: ", error.what()));
  }
}

GroupsBy find_groups_by(std::string const& name) {
  if (name == "arrival") return GroupsBy::arrival;
  if (name == "number") return GroupsBy::number;
  if (name == "bucket") return GroupsBy::bucket;
  require(name == "measured", "groups_by = '", name,
          "' is none of arrival, number, bucket, measured");
  return GroupsBy::measured;
}

// None: a time that is not known.
py::object grouping_dict(std::optional<GroupingTrial> const& trial) {
  if (!trial) return py::none();
  auto const known = [](float seconds) -> py::object {
    if (seconds == 0) return py::none();
    return py::float_(seconds);
  };
  py::dict result;
  result["groups"] = trial->grouping() == Grouping::model ? "model" : "buckets";
  result["decided"] = trial->decided();
  result["model_seconds"] = known(trial->times().model);
  result["buckets_seconds"] = known(trial->times().buckets);
  return result;
}

double share(std::uint64_t count, std::uint64_t numel) {
  return numel == 0 ? 0.0 : static_cast<double>(count) / static_cast<double>(numel);
}

py::dict group_dict(GroupStats const& group) {
  StepRecord const& last = group.last;
  py::dict result;
  result["name"] = group.name;
  result["parameters"] = group.parameters;
  result["numel"] = group.numel;
  result["algorithm"] = last.algorithm;
  result["step"] = last.step;
  result["finite"] = last.finite;
  result["realised_density"] = share(last.selected, group.numel);
  result["result_density"] = share(last.result_nnz, group.numel);
  result["threshold"] = last.threshold;
  result["threshold_age"] = last.threshold_age;
  result["sent_bytes"] = last.sent_bytes;
  result["received_bytes"] = last.received_bytes;
  result["messages"] = last.messages;
  result["agree_seconds"] = seconds(last.agree);
  result["select_seconds"] = seconds(last.select);
  result["exchange_seconds"] = seconds(last.exchange);
  result["apply_seconds"] = seconds(last.apply);
  result["exposed_seconds"] = seconds(group.exposed);
  result["observed_seconds"] = last.observed_seconds;
  result["predicted_seconds"] = last.predicted_seconds;
  return result;
}

py::dict stats_dict(HookState const& state) {
  HookStats const stats = state.stats();
  auto const per_element = [&](std::uint64_t count) { return share(count, stats.exchange.numel); };
  py::dict result;
  result["steps"] = stats.exchange.steps;
  result["realised_density"] = per_element(stats.exchange.selected);
  result["result_density"] = per_element(stats.exchange.result_nnz);
  result["sent_bytes"] = Counters::total(stats.counters.sent_bytes);
  result["received_bytes"] = Counters::total(stats.counters.received_bytes);
  result["messages"] = Counters::total(stats.counters.sent_messages);
  result["agree_seconds"] = seconds(stats.exchange.agree);
  result["select_seconds"] = seconds(stats.exchange.select);
  result["exchange_seconds"] = seconds(stats.exchange.exchange);
  result["apply_seconds"] = seconds(stats.exchange.apply);
  result["exposed_seconds"] = seconds(stats.exposed);
  result["lost_aggregators"] = reasons(stats.lost_aggregators);
  py::list groups;
  for (GroupStats const& group : stats.groups) {
    if (!group.last.algorithm.empty()) groups.append(group_dict(group));
  }
  result["groups"] = groups;
  result["grouping"] = grouping_dict(stats.grouping);
  return result;
}

// True where DDP's reducer waits for the parameter's gradient: its hooks on gradient accumulators
// are the only ones of this type.
bool has_reducer(at::Tensor const& parameter) {
  auto const accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return accumulator && std::ranges::any_of(accumulator->post_hooks(), [](auto const& hook) {
           return dynamic_cast<torch::autograd::utils::LambdaPostHook const*>(hook.get()) !=
                  nullptr;
         });
}

}  // namespace

void bind_hooks(py::module_& module) {
  py::class_<HookState, std::shared_ptr<HookState>>(module, "HookState")
      .def(py::init([](ExchangeOptions options, PythonDuration timeout, std::int64_t threads,
                       std::string cuda_library, int dense_below, double clip_norm,
                       std::optional<PythonDuration> stall_limit,
                       std::function<void(std::string const&)> log_stall,
                       AggregatorAddresses const& aggregators, std::string const& groups_by) {
             CommunicatorOptions communicator;
             communicator.timeout = timeout.value;
             communicator.aggregator_addresses = aggregators;
             communicator.stall = make_stall_options(stall_limit, std::move(log_stall));
             communicator.executor = make_executor(threads);
             return HookState::make(
                 HookOptions{std::move(options), dense_below, clip_norm, find_groups_by(groups_by)},
                 communicator, std::move(cuda_library));
           }),
           py::arg("options"), py::arg("timeout"), py::arg("threads"), py::arg("cuda_library"),
           py::arg("dense_below"), py::arg("clip_norm"), py::arg("stall_limit") = py::none(),
           py::arg("log_stall") = py::none(), py::arg("aggregators") = AggregatorAddresses{},
           py::arg("groups_by") = "arrival")
      .def("connect",
           [](HookState& self, TransportHolder& transport) {
             self.connect(transport.take(), transport.timeline());
           })
      .def("reconnect",
           [](HookState& self, TransportHolder& transport) {
             self.reconnect(transport.take(), transport.timeline());
           })
      .def_property_readonly("connected", &HookState::connected)
      .def("close", &HookState::close)
      .def("name_parameters", &HookState::name_parameters)
      .def("set_densities", &HookState::set_densities)
      .def("set_groups", &HookState::set_groups)
      .def("follow_loss_scale", &HookState::follow_loss_scale)
      .def("run",
           [](HookState& self, c10d::GradBucket& bucket, c10d::Reducer const* reducer) {
             return run_for_python(self, to_bucket(bucket, reducer));
           })
      .def(
          "exchange",
          [](HookState& self, std::size_t index, bool last, at::Tensor const& buffer,
             std::vector<at::Tensor> parameters, std::vector<at::Tensor> gradients, bool continues,
             std::vector<bool> unused) {
            return run_for_python(self, {.index = index,
                                         .last = last,
                                         .buffer = buffer,
                                         .parameters = std::move(parameters),
                                         .gradients = std::move(gradients),
                                         .unused = std::move(unused),
                                         .continues = continues});
          },
          py::arg("index"), py::arg("last"), py::arg("buffer"), py::arg("parameters"),
          py::arg("gradients"), py::arg("continues") = false,
          py::arg("unused") = std::vector<bool>())
      .def("add_parameters", &HookState::add_parameters)
      .def("add_received", &HookState::add_received, py::arg("parameters"), py::arg("gradients"),
           py::arg("factor"), py::arg("everywhere"), py::call_guard<py::gil_scoped_release>())
      .def("set_density", &HookState::set_density)
      .def("set_momenta", &HookState::set_momenta)
      .def("set_moments", &HookState::set_moments)
      .def("stats", &stats_dict)
      .def_property_readonly("delivered", &HookState::delivered)
      .def("release_waiting", &HookState::release_waiting)
      .def_property_readonly("rank", &HookState::rank)
      .def("request", &HookState::request)
      .def("take_requested", &HookState::take_requested)
      .def("algorithms", &HookState::algorithms)
      .def("checkpoint", [](HookState const& self) { return to_dict(self.checkpoint()); })
      .def("load", [](HookState& self, py::dict const& saved) { self.load(from_dict(saved)); });

  module.def("has_memory", &has_memory);
  // Of a contiguous tensor on the CPU.
  module.def("checksum", [](at::Tensor const& tensor) {
    require_memory(tensor);
    Checksum checksum;
    auto const* const data = static_cast<std::byte const*>(tensor.const_data_ptr());
    checksum.add({data, tensor.nbytes()});
    return checksum.value();
  });

  module.def("is_bucket_of", &is_bucket_of);
  // The strides of a bucket's view for the parameter's gradient.
  module.def("gradient_strides",
             [](at::Tensor const& parameter) { return Layout(parameter).strides().vec(); });
  // True when the reducer has seen a gradient become ready; a hook would then begin in the middle.
  module.def("has_run_backward", [](c10d::Reducer const& reducer) {
    return std::ranges::any_of(reducer.get_backward_stats(), [](auto time) { return time != 0; });
  });
  module.def("has_reducer", &has_reducer);
  // The name of the first place, (name, a module's parameters, key), whose parameter is trained and
  // whose gradient no reducer waits for. What torch.func.functional_call puts there for a while is
  // no leaf, or no nn.Parameter.
  module.def("first_unreduced", [](py::list const& places) -> std::optional<py::str> {
    for (py::handle const place : places) {
      auto const [name, parameters, key] = place.cast<std::tuple<py::str, py::dict, py::str>>();
      if (!parameters.contains(key)) continue;
      py::object const parameter = parameters[key];
      if (!THPVariable_Check(parameter.ptr())) continue;
      at::Tensor const& tensor = THPVariable_Unpack(parameter.ptr());
      if (!tensor.requires_grad() || !tensor.is_leaf() || has_reducer(tensor)) continue;
      if (py::isinstance(parameter, ParameterClass)) return name;
    }
    return std::nullopt;
  });
  // What a hook in Python returns instead of raising, as DdpHook does.
  module.def("failed_work", [](py::object const& error) -> c10::intrusive_ptr<c10d::Work> {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    return c10::make_intrusive<FutureWork>(
        failed_future(std::make_exception_ptr(py::error_already_set()), c10::PyObjectType::get()));
  });
  module.def("register_hook", [](c10d::Reducer& reducer, std::shared_ptr<HookState> state) {
    reducer.register_comm_hook(std::make_unique<DdpHook>(reducer, std::move(state)));
  });
}

}  // namespace sparsecomm
