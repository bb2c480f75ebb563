// Tensors without memory of their own: wrappers of other tensors, such as a DTensor, and those
// whose storage was resized to 0.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/error.h"

namespace sparsecomm {

// Whether there is memory for all that a dense tensor is to hold.
inline bool has_memory(at::Tensor const& tensor) {
  return tensor.has_storage() && tensor.unsafeGetTensorImpl()->storage_initialized();
}

// Throws InvalidArgument unless there is memory for the entries, and the indices, of a tensor that
// is dense, COO or CSR.
inline void require_memory(at::Tensor const& tensor) {
  if (tensor.layout() == at::kSparse) {
    require_memory(tensor._indices());
    require_memory(tensor._values());
  } else if (tensor.layout() == at::kSparseCsr) {
    require_memory(tensor.crow_indices());
    require_memory(tensor.col_indices());
    require_memory(tensor.values());
  } else {
    require(has_memory(tensor), "a tensor of shape ", tensor.sizes(),
            " has no memory of its own; of a DTensor pass tensor.to_local(), of an "
            "AsyncCollectiveTensor tensor.wait(), and resize a storage that was freed");
  }
}

}  // namespace sparsecomm
