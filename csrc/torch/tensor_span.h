// The memory of a tensor that is bound as it is, for benches and tests.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

#include "base/error.h"

namespace sparsecomm {

// Throws InvalidArgument that names the tensor unless it is contiguous, on the CPU and of `dtype`,
// which stands for T.
template <class T>
std::span<T> span_of(at::Tensor const& tensor, at::ScalarType dtype, char const* name) {
  require(tensor.is_contiguous() && tensor.device().is_cpu() && tensor.scalar_type() == dtype, name,
          " must be a contiguous CPU tensor of ", at::toString(dtype), ", not of ",
          at::toString(tensor.scalar_type()), " on ", tensor.device().str());
  return {static_cast<T*>(tensor.data_ptr()), static_cast<std::size_t>(tensor.numel())};
}

}  // namespace sparsecomm
