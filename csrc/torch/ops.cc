// torch.ops.sparsecomm: the schemas. ops_*.cc implement them for CPU and CUDA tensors,
// fake_kernels.py says what shapes come out, functional.py what the operators do.
#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops_cuda.h"
#include "wire/sorted.h"

namespace sparsecomm::ops {
namespace {

// True where no two entries can share memory: each step is longer than all shorter ones together.
bool entries_are_apart(at::Tensor const& tensor) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dimensions;  // stride, size
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1) dimensions.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::ranges::sort(dimensions);  // the closest entries first
  std::int64_t reach = 0;
  for (auto const& [stride, size] : dimensions) {
    if (stride <= reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

// The bytes from its first entry to its last.
std::pair<std::uintptr_t, std::uintptr_t> extent_of(at::Tensor const& tensor) {
  auto const begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                          tensor.itemsize())};
}

struct Schema {
  char const* name;
  char const* arguments_and_results;
};

constexpr Schema schemas[] = {
    {"fused_error_feedback",
     "(Tensor(a!) gradient, Tensor(b!) residual, *, Tensor? threshold=None, Tensor? ties=None, "
     "int? k=None, int? limit=None, float scale=1.0, Tensor(c!)? momentum=None, float factor=0.0, "
     "bool mask_momentum=True) -> (Tensor indices, Tensor values)"},
    {"select",
     "(Tensor input, Tensor threshold, Tensor? ties=None, *, int? limit=None) "
     "-> (Tensor indices, Tensor values)"},
    {"top_k", "(Tensor input, int k, *, int? bucket=None) -> (Tensor indices, Tensor values)"},
    {"threshold_exact",
     "(Tensor gradient, int k, *, Tensor? residual=None) -> (Tensor magnitude, Tensor ties)"},
    {"threshold_sampled",
     "(Tensor gradient, int k, *, Tensor? residual=None, int stride=64, int phase=0) "
     "-> (Tensor magnitude, Tensor ties)"},
    {"threshold_gaussian",
     "(Tensor gradient, int k, *, Tensor? residual=None) -> (Tensor magnitude, Tensor ties)"},
    {"qsgd_quantize",
     "(Tensor input, int bits, *, int seed, int operation=0, int stream=0, int bucket=1024) "
     "-> Tensor"},
    {"qsgd_dequantize",
     "(Tensor codes, int size, int bits, *, ScalarType dtype=float32, int bucket=1024) -> Tensor"},
    {"qsgd_dequantize_add", "(Tensor(a!) dense, Tensor codes, int bits, *, int bucket=1024) -> ()"},
    {"block_scan", "(Tensor input, int block) -> (Tensor bitmap, Tensor numbers, Tensor blocks)"},
    {"block_gather", "(Tensor input, Tensor numbers, int block) -> Tensor"},
    {"block_scatter", "(Tensor(a!) dense, Tensor numbers, Tensor blocks) -> ()"},
    {"block_top_k", "(Tensor input, int k, int block) -> (Tensor numbers, Tensor blocks)"},
    {"sparse_sum",
     "(Tensor[] indices, Tensor[] values, int size) -> (Tensor indices, Tensor values)"},
    {"sparse_intersection",
     "(Tensor indices, Tensor values, Tensor other_indices, Tensor? other_values, int size) "
     "-> (Tensor indices, Tensor values, Tensor other_values)"},
    {"scatter", "(Tensor(a!) dense, Tensor indices, Tensor values, *, float divisor=1.0) -> ()"},
};

// For tensors of any other backend: also where torch has one that we have never heard of.
void refuse(c10::OperatorHandle const& op, torch::jit::Stack* stack) {
  std::string found;
  auto const look_at = [&](at::Tensor const& tensor) {
    bool const known = tensor.defined() && (tensor.is_cpu() || tensor.is_cuda());
    if (tensor.defined() && !(known && tensor.layout() == at::kStrided)) {
      found = concat(tensor.layout(), " tensors on ", tensor.device());
    }
  };
  for (c10::IValue const& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensor()) look_at(argument.toTensor());
    if (argument.isTensorList()) std::ranges::for_each(argument.toTensorVector(), look_at);
  }
  TORCH_CHECK_VALUE(!found.empty(), op.schema().name(), " needs at least one tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              " takes dense tensors on the CPU or a CUDA device, not ", found,
                              "; give it tensor.cpu(), or tensor.to_dense()");
}

}  // namespace

InPlace::InPlace(at::Tensor const& tensor, char const* name)
    : tensor_(tensor), contiguous_(tensor.contiguous()) {
  require(tensor.numel() == 0 || entries_are_apart(tensor), name,
          " has entries that share memory; clone() it");
}

std::span<const std::uint32_t> checked_positions(at::Tensor const& contiguous, std::int64_t count,
                                                 std::int64_t size, PositionWords const& words) {
  require(contiguous.dim() == 1 && contiguous.scalar_type() == at::kInt, words.many,
          " must be a vector of int32, not of ", at::toString(contiguous.scalar_type()),
          " and shape ", contiguous.sizes());
  require(contiguous.numel() == count, contiguous.numel(), " ", words.many, " but ", count, " ",
          words.values, ": give as many of both");
  auto const indices = positions(contiguous);
  if (indices.empty()) return indices;
  // A negative index is a large one here.
  std::uint32_t const largest = [&] {
    if (!on_device(contiguous)) return *std::ranges::max_element(indices);
    auto const [low, high] = at::aminmax(contiguous);
    auto const least = low.item<std::int32_t>();
    return static_cast<std::uint32_t>(least < 0 ? least : high.item<std::int32_t>());
  }();
  require(largest < size, words.one, " ", static_cast<std::int32_t>(largest), " is not in [0, ",
          size, ")");
  return indices;
}

void refuse_order(std::string const& whose, PositionWords const& words) {
  throw InvalidArgument(concat("the ", words.many, " of ", whose,
                               " are not strictly increasing; sort them, and ", words.equal));
}

std::span<const std::uint32_t> checked_vector(at::Tensor const& contiguous, std::int64_t count,
                                              std::int64_t size, std::string const& whose,
                                              PositionWords const& words) {
  auto const indices = checked_positions(contiguous, count, size, words);
  bool const increasing =
      on_device(contiguous)
          ? count < 2 || (contiguous.slice(0, 1) > contiguous.slice(0, 0, -1)).all().item<bool>()
          : strictly_increasing(indices);
  if (!increasing) refuse_order(whose, words);
  return indices;
}

void require_apart(at::Tensor const& one, at::Tensor const& other, char const* names) {
  if (one.numel() == 0 || other.numel() == 0 || one.device() != other.device()) return;
  auto const [begin, end] = extent_of(one);
  auto const [other_begin, other_end] = extent_of(other);
  require(end <= other_begin || other_end <= begin, names, " share memory; clone() one of them");
}

TORCH_LIBRARY(sparsecomm, library) {
  library.set_python_module("sparsecomm.fake_kernels");
  for (Schema const& schema : schemas) {
    library.def((std::string(schema.name) + schema.arguments_and_results).c_str(),
                {at::Tag::pt2_compliant_tag});
  }
}

TORCH_LIBRARY_IMPL(sparsecomm, CompositeExplicitAutograd, library) {
  for (Schema const& schema : schemas) {
    library.impl(schema.name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

// Backpropagation through one is an error, not a gradient of zero.
TORCH_LIBRARY_IMPL(sparsecomm, Autograd, library) {
  for (Schema const& schema : schemas) {
    library.impl(schema.name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace sparsecomm::ops
