// The kernels on CPU tensors, one call each: what `sparsecomm bench kernels` measures and tests
// call.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "ina/element_type.h"
#include "kernels/block_scan.h"
#include "kernels/kernels.h"
#include "kernels/parallel.h"
#include "kernels/top_k.h"
#include "ops.h"
#include "sparse/intersection.h"
#include "sparse/sum.h"
#include "tensor_span.h"
#include "torch_executor.h"
#include "wire/qsgd.h"

namespace py = pybind11;

namespace sparsecomm {
namespace {

template <class T>
constexpr at::ScalarType scalar_type() {
  if constexpr (std::is_same_v<T, float>) return at::kFloat;
  if constexpr (std::is_same_v<T, double>) return at::kDouble;
  if constexpr (std::is_same_v<T, Half>) return at::kHalf;
  return at::kBFloat16;
}

template <class Table>
Table const& table_named(std::span<Table const> tables, std::string const& target) {
  std::string known;
  for (Table const& table : tables) {
    if (table.target == target) return table;
    known += concat(known.empty() ? "" : ", ", table.target);
  }
  throw InvalidArgument(concat("target '", target, "' is none of ", known));
}

std::vector<std::string> targets() {
  std::vector<std::string> names;
  for (auto const& table : kernel_tables<float>()) names.emplace_back(table.target);
  return names;
}

// The kernels of one instruction set, on some threads, for one element type; keeps their scratch.
template <class T>
class Kernels {
 public:
  using V = accumulate_t<T>;

  Kernels(std::string const& target, std::int64_t threads)
      : table_(table_named(kernel_tables<T>(), target)),
        blocks_(table_named(block_kernel_tables(), target)),
        qsgd_(table_named(qsgd_kernel_tables<V>(), target)),
        executor_(make_executor(threads)) {}

  bool all_finite(at::Tensor const& x) const {
    return sparsecomm::all_finite<T>(elements(x, "x"), *executor_, table_);
  }

  std::size_t select(at::Tensor const& x, double magnitude, at::Tensor const& indices,
                     at::Tensor const& values) {
    Threshold<V> threshold{static_cast<V>(magnitude), 0};
    auto const out = packed(indices, values);
    return sparsecomm::select<T>(elements(x, "x"), threshold, 0, out.indices.size(), out,
                                 selection_, *executor_, table_)
        .count;
  }

  std::size_t fused_error_feedback(at::Tensor const& gradient, at::Tensor const& residual,
                                   double magnitude, at::Tensor const& indices,
                                   at::Tensor const& values) {
    Threshold<V> threshold{static_cast<V>(magnitude), 0};
    auto const out = packed(indices, values);
    auto const [grad, rest] = segment(gradient, residual);
    return sparsecomm::fused_error_feedback<T>({grad, rest}, threshold, 0, out.indices.size(), out,
                                               selection_, *executor_, table_)
        .count;
  }

  double exact_threshold(at::Tensor const& gradient, at::Tensor const& residual, std::uint64_t k) {
    Segment<T> const one = segment(gradient, residual);
    return sparsecomm::exact_threshold<T>({&one, 1}, k, threshold_, *executor_, table_).magnitude;
  }

  double sampled_threshold(at::Tensor const& gradient, at::Tensor const& residual, std::uint64_t k,
                           std::size_t stride, std::size_t phase) {
    require(stride >= 1, "stride = 0 takes no sample");
    Segment<T> const one = segment(gradient, residual);
    return sparsecomm::sampled_threshold<T>({&one, 1}, k, stride, phase, threshold_, *executor_,
                                            table_)
        .magnitude;
  }

  std::size_t exact_top_k(at::Tensor const& x, std::uint64_t k, at::Tensor const& indices,
                          at::Tensor const& values) {
    auto const out = packed(indices, values);
    require(k <= out.indices.size(), "k = ", k, " entries do not fit into ", out.indices.size());
    return sparsecomm::exact_top_k<T>(elements(x, "x"), k, out, top_k_, *executor_, table_);
  }

  void top_k_per_bucket(at::Tensor const& x, std::size_t bucket, std::size_t k,
                        at::Tensor const& indices, at::Tensor const& values) const {
    auto const all = elements(x, "x");
    sparsecomm::top_k_per_bucket<T>(all, all.size(), bucket, k, packed(indices, values), *executor_,
                                    table_);
  }

  std::size_t block_scan(at::Tensor const& x, std::size_t block_bytes, at::Tensor const& bitmap,
                         at::Tensor const& numbers, at::Tensor const& blocks) const {
    return sparsecomm::block_scan(
        std::as_bytes(elements(x, "x")), block_bytes,
        {.bitmap = span_of<std::uint64_t>(bitmap, at::kUInt64, "bitmap"),
         .numbers = span_of<std::uint32_t>(numbers, at::kUInt32, "numbers"),
         .blocks = std::as_writable_bytes(span_of<T>(blocks, scalar_type<T>(), "blocks"))},
        *executor_, blocks_);
  }

  // As a worker of in-network aggregation does it: until x ends, as many blocks at a time as there
  // are numbers, into the same slots; returns how many they are.
  std::size_t copy_nonzero_blocks(at::Tensor const& x, std::size_t block_bytes,
                                  at::Tensor const& numbers, at::Tensor const& slots) const {
    auto const bytes = std::as_bytes(elements(x, "x"));
    auto const found = span_of<std::uint32_t>(numbers, at::kUInt32, "numbers");
    auto const room = std::as_writable_bytes(elements(slots, "slots"));
    require(!found.empty(), "numbers is empty");
    std::size_t total = 0;
    BlockWalk walk;
    do {
      walk = blocks_.copy_nonzero_blocks(bytes, block_bytes, walk.next, room, found);
      total += walk.found;
    } while (walk.found == found.size());
    return total;
  }

  // What that costs at least where no block is zero: copies x, a part at a time, into the slots.
  static void copy_through(at::Tensor const& x, at::Tensor const& slots) {
    auto const bytes = std::as_bytes(elements(x, "x"));
    auto const room = std::as_writable_bytes(elements(slots, "slots"));
    require(!room.empty(), "slots is empty");
    for (std::size_t begin = 0; begin < bytes.size(); begin += room.size()) {
      auto const part = bytes.subspan(begin, std::min(room.size(), bytes.size() - begin));
      std::memcpy(room.data(), part.data(), part.size());
    }
  }

  // As an aggregator does it: adds x, a block at a time, to the partial results of a few blocks,
  // again and again. What is left of x behind its whole blocks is not added.
  static void combine_blocks(at::Tensor const& sums, at::Tensor const& x, std::size_t block_bytes) {
    auto const bytes = std::as_bytes(elements(x, "x"));
    auto const partial = span_of<V>(sums, scalar_type<V>(), "sums");
    require(block_bytes > 0 && block_bytes % line_bytes == 0, "blocks of ", block_bytes,
            " bytes, must be of a positive multiple of ", line_bytes);
    std::size_t const entries = block_bytes / sizeof(T);
    require(!partial.empty() && partial.size() % entries == 0, "sums has ", partial.size(),
            " entries, must be some blocks of ", entries);
    auto const combine =
        entry_of(static_cast<ElementType>(dtype_of<T>())).of(Reduction::sum).combine;
    std::size_t place = 0;
    for (std::size_t begin = 0; begin + block_bytes <= bytes.size(); begin += block_bytes) {
      combine(std::as_writable_bytes(partial.subspan(place)).data(), bytes.data() + begin,
              block_bytes);
      place = place + entries == partial.size() ? 0 : place + entries;
    }
  }

  std::size_t qsgd_quantize(at::Tensor const& x, int bits, std::int64_t bucket, std::uint64_t seed,
                            at::Tensor const& codes) const {
    QsgdFormat const format = ops::qsgd_format(bits, bucket);
    auto const values = span_of<V>(x, scalar_type<V>(), "x");
    sparsecomm::qsgd_quantize<V>(qsgd_, format, values, {.seed = seed},
                                 codes_of(codes, format, values.size()), *executor_);
    return format.bytes(values.size(), sizeof(V));
  }

  void qsgd_add(at::Tensor const& codes, int bits, std::int64_t bucket,
                at::Tensor const& dense) const {
    QsgdFormat const format = ops::qsgd_format(bits, bucket);
    auto const values = span_of<V>(dense, scalar_type<V>(), "dense");
    sparsecomm::qsgd_add<V>(qsgd_, format, codes_of(codes, format, values.size()), values,
                            *executor_);
  }

 private:
  static std::span<T> elements(at::Tensor const& tensor, char const* name) {
    return span_of<T>(tensor, scalar_type<T>(), name);
  }
  static Segment<T> segment(at::Tensor const& gradient, at::Tensor const& residual) {
    Segment<T> const one{elements(gradient, "gradient"),
                         span_of<V>(residual, scalar_type<V>(), "residual")};
    require(one.gradient.size() == one.residual.size(), "a residual of ", one.residual.size(),
            " entries for a gradient of ", one.gradient.size());
    return one;
  }
  static PackedSpan<V> packed(at::Tensor const& indices, at::Tensor const& values) {
    PackedSpan<V> const out{span_of<std::uint32_t>(indices, at::kUInt32, "indices"),
                            span_of<V>(values, scalar_type<V>(), "values")};
    require(out.indices.size() == out.values.size(), out.indices.size(), " indices but ",
            out.values.size(), " values");
    return out;
  }

  static std::span<std::byte> codes_of(at::Tensor const& codes, QsgdFormat format,
                                       std::size_t count) {
    auto const room = span_of<std::byte>(codes, at::kByte, "codes");
    std::size_t const bytes = format.bytes(count, sizeof(V));
    require(bytes <= room.size(), count, " values take ", bytes, " bytes, codes have ",
            room.size());
    return room.first(bytes);
  }

  KernelTable<T> const& table_;
  BlockKernelTable const& blocks_;
  QsgdKernels<V> const& qsgd_;
  std::shared_ptr<Executor const> executor_;
  SelectionScratch<V> selection_;
  ThresholdScratch<V> threshold_;
  TopKScratch<V> top_k_;
};

template <class T>
void bind(py::module_& module, char const* name) {
  using K = Kernels<T>;
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<K>(module, name)
      .def(py::init<std::string const&, std::int64_t>(), py::arg("target"), py::arg("threads"))
      .def("all_finite", &K::all_finite, Released(), py::arg("x"))
      .def("select", &K::select, Released(), py::arg("x"), py::arg("magnitude"), py::arg("indices"),
           py::arg("values"))
      .def("fused_error_feedback", &K::fused_error_feedback, Released(), py::arg("gradient"),
           py::arg("residual"), py::arg("magnitude"), py::arg("indices"), py::arg("values"))
      .def("exact_threshold", &K::exact_threshold, Released(), py::arg("gradient"),
           py::arg("residual"), py::arg("k"))
      .def("sampled_threshold", &K::sampled_threshold, Released(), py::arg("gradient"),
           py::arg("residual"), py::arg("k"), py::arg("stride"), py::arg("phase"))
      .def("exact_top_k", &K::exact_top_k, Released(), py::arg("x"), py::arg("k"),
           py::arg("indices"), py::arg("values"))
      .def("top_k_per_bucket", &K::top_k_per_bucket, Released(), py::arg("x"), py::arg("bucket"),
           py::arg("k"), py::arg("indices"), py::arg("values"))
      .def("block_scan", &K::block_scan, Released(), py::arg("x"), py::arg("block_bytes"),
           py::arg("bitmap"), py::arg("numbers"), py::arg("blocks"))
      .def("copy_nonzero_blocks", &K::copy_nonzero_blocks, Released(), py::arg("x"),
           py::arg("block_bytes"), py::arg("numbers"), py::arg("slots"))
      .def_static("copy_through", &K::copy_through, Released(), py::arg("x"), py::arg("slots"))
      .def_static("combine_blocks", &K::combine_blocks, Released(), py::arg("sums"), py::arg("x"),
                  py::arg("block_bytes"))
      .def("qsgd_quantize", &K::qsgd_quantize, Released(), py::arg("x"), py::arg("bits"),
           py::arg("bucket"), py::arg("seed"), py::arg("codes"))
      .def("qsgd_add", &K::qsgd_add, Released(), py::arg("codes"), py::arg("bits"),
           py::arg("bucket"), py::arg("dense"));
}

// Adds up sorted streams of f32 over [0, numel); returns how many entries the sum has.
std::size_t sum_streams(SparseSum<float>& sum, std::uint64_t numel,
                        std::vector<std::pair<at::Tensor, at::Tensor>> const& streams) {
  sum.reset(0, numel);
  for (auto const& [indices, values] : streams) {
    sum.add({span_of<std::uint32_t>(indices, at::kUInt32, "indices"),
             span_of<float>(values, at::kFloat, "values")});
  }
  return sum.sum().nnz();
}

// How many indices two streams of f32 share. For benches: that the indices are sorted and distinct
// is not looked at.
std::size_t intersect_streams(SparseIntersection<float>& intersection,
                              std::pair<at::Tensor, at::Tensor> const& one,
                              std::pair<at::Tensor, at::Tensor> const& other) {
  auto const view = [](std::pair<at::Tensor, at::Tensor> const& stream) {
    return SparseView<float>{span_of<std::uint32_t>(stream.first, at::kUInt32, "indices"),
                             span_of<float>(stream.second, at::kFloat, "values")};
  };
  return intersection.run(view(one), view(other)).indices.size();
}

}  // namespace

void bind_kernels(py::module_& module) {
  module.def("kernel_targets", &targets);
  bind<float>(module, "KernelsF32");
  bind<double>(module, "KernelsF64");
  bind<Half>(module, "KernelsF16");
  bind<BFloat16>(module, "KernelsBF16");
  py::class_<SparseSum<float>>(module, "SparseSum")
      .def(py::init<>())
      .def("sum", &sum_streams, py::call_guard<py::gil_scoped_release>(), py::arg("numel"),
           py::arg("streams"));
  py::class_<SparseIntersection<float>>(module, "SparseIntersection")
      .def(py::init([](std::string const& target) {
             return std::make_unique<SparseIntersection<float>>(
                 table_named(intersect_kernel_tables(), target));
           }),
           py::arg("target"))
      .def("run", &intersect_streams, py::call_guard<py::gil_scoped_release>(), py::arg("one"),
           py::arg("other"));
}

}  // namespace sparsecomm
