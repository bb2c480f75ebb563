// What the files of the operators share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "base/dtype.h"
#include "base/error.h"
#include "kernels/kernels.h"
#include "tensor_memory.h"
#include "torch_executor.h"
#include "wire/qsgd.h"

namespace sparsecomm::ops {

using Pair = std::tuple<at::Tensor, at::Tensor>;
using Triple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Throws InvalidArgument if an operator's argument is a tensor without memory, or holds one.
template <class T>
void require_memory_of(T const& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    require_memory(argument);
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    if (argument) require_memory(*argument);
  } else if constexpr (std::is_same_v<T, at::TensorList>) {
    for (at::Tensor const& tensor : argument) require_memory(tensor);
  }
}

// `Function` with errors that Python raises as ValueError, whichever way torch calls it.
template <auto Function, class Type = decltype(Function)>
struct Operator;
template <auto Function, class Result, class... Arguments>
struct Operator<Function, Result (*)(Arguments...)> {
  static Result call(Arguments... arguments) {
    try {
      (require_memory_of(arguments), ...);
      return Function(std::forward<Arguments>(arguments)...);
    } catch (Error const& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
  }
};

// Throws InvalidArgument where there is no such format.
QsgdFormat qsgd_format(std::int64_t bits, std::int64_t bucket);

// The threads of torch.set_num_threads(), or the caller's alone where it is one of several already.
inline std::shared_ptr<Executor const> executor() {
  return make_executor(at::in_parallel_region() ? 1 : at::get_num_threads());
}

// Calls f.template operator()<T>() for the element type T of a gradient.
template <class F>
decltype(auto) visit_gradient(at::Tensor const& tensor, char const* name, F&& f) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return f.template operator()<float>();
    case at::kDouble:
      return f.template operator()<double>();
    case at::kHalf:
      return f.template operator()<Half>();
    case at::kBFloat16:
      return f.template operator()<BFloat16>();
    default:
      throw InvalidArgument(concat(name, " is of ", at::toString(tensor.scalar_type()),
                                   "; convert it to float32, float64, float16 or bfloat16"));
  }
}

template <class V>
constexpr at::ScalarType scalar_type = c10::CppTypeToScalarType<V>::value;

template <class V>
void require_type(at::Tensor const& tensor, char const* name) {
  require(tensor.scalar_type() == scalar_type<V>, name, " is of ",
          at::toString(tensor.scalar_type()), ", must be of ", at::toString(scalar_type<V>));
}

template <class T>
std::span<T> entries(at::Tensor const& contiguous) {
  return {static_cast<T*>(contiguous.data_ptr()), static_cast<std::size_t>(contiguous.numel())};
}

inline std::span<const std::uint32_t> positions(at::Tensor const& contiguous) {
  return entries<const std::uint32_t>(contiguous);
}

// Indices are int32, as torch has few operators for uint32.
inline constexpr std::int64_t most_entries = std::int64_t{1} << 31;

inline void require_int32_indices(std::int64_t size, char const* name) {
  require(size <= most_entries, name, " has ", size, " entries, of which int32 indices number ",
          most_entries, "; split it");
}

inline std::uint64_t require_count(std::int64_t count, char const* name) {
  require(count >= 0, name, " = ", count, " is negative");
  return static_cast<std::uint64_t>(count);
}

// An operand that is changed in place, as contiguous memory: a copy where it is not, written back
// by store().
class InPlace {
 public:
  InPlace(at::Tensor const& tensor, char const* name);
  at::Tensor const& contiguous() const { return contiguous_; }
  void store() const {
    if (!contiguous_.is_same(tensor_)) tensor_.copy_(contiguous_);
  }

 private:
  at::Tensor tensor_, contiguous_;
};

inline void require_same_device(at::Tensor const& one, at::Tensor const& other, char const* name) {
  require(one.device() == other.device(), name, " is on ", other.device().str(), ", not on ",
          one.device().str(), " as the others; move it there");
}

// What errors call positions, what there is one of for each, and what to do if some are equal.
struct PositionWords {
  char const* one = "index";
  char const* many = "indices";
  char const* values = "values";
  char const* equal = "add up those that are equal";
};

// The entries of a vector of int32. Throws InvalidArgument unless they are `count` and lie in [0,
// size).
std::span<const std::uint32_t> checked_positions(at::Tensor const& contiguous, std::int64_t count,
                                                 std::int64_t size,
                                                 PositionWords const& words = {});
// The same, strictly increasing: those of `whose`.
std::span<const std::uint32_t> checked_vector(at::Tensor const& contiguous, std::int64_t count,
                                              std::int64_t size, std::string const& whose,
                                              PositionWords const& words = {});
[[noreturn]] void refuse_order(std::string const& whose, PositionWords const& words = {});

// Throws where the two share memory.
void require_apart(at::Tensor const& one, at::Tensor const& other, char const* names);

// |a| >= threshold, or, with ties, |a| > threshold and so many of those with |a| == threshold.
template <class V>
Threshold<V> threshold_of(at::Tensor const& threshold, std::optional<at::Tensor> const& ties) {
  require(threshold.numel() == 1 && threshold.is_floating_point(),
          "threshold must be one floating-point number, not ", threshold.numel(), " of ",
          at::toString(threshold.scalar_type()));
  double const wanted = threshold.item().toDouble();
  require(wanted >= 0, "threshold = ", wanted, " is not 0 or more");
  Threshold<V> found{std::numeric_limits<V>::max(), std::numeric_limits<std::uint64_t>::max()};
  if (wanted <= static_cast<double>(found.magnitude)) {
    found.magnitude = static_cast<V>(wanted);
    if (static_cast<double>(found.magnitude) > wanted) {
      found.magnitude = std::nextafter(found.magnitude, V{0});
    }
  }
  if (static_cast<double>(found.magnitude) < wanted) {
    found.ties = 0;  // no V equals what was wanted
  } else if (ties) {
    require(ties->numel() == 1 && ties->scalar_type() == at::kLong,
            "ties must be one number of int64, not ", ties->numel(), " of ",
            at::toString(ties->scalar_type()));
    found.ties = require_count(ties->item<std::int64_t>(), "ties");
  }
  return found;
}

// Tensors of their own of what was packed.
template <class V>
Pair copy_packed(std::span<const std::uint32_t> indices, std::span<const V> values) {
  auto const size = static_cast<std::int64_t>(indices.size());
  Pair out{at::empty({size}, at::kInt), at::empty({size}, scalar_type<V>)};
  std::ranges::copy(indices, entries<std::uint32_t>(std::get<0>(out)).begin());
  std::ranges::copy(values, entries<V>(std::get<1>(out)).begin());
  return out;
}

}  // namespace sparsecomm::ops
