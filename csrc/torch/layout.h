// The order in which the entries of a dense tensor lie in memory.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/DimVector.h>

#include <string>

namespace sparsecomm {

// Without gaps: the strides are those of some permutation of the dimensions.
class Layout {
 public:
  Layout() = default;
  // The tensor's own, as autograd gives a gradient its parameter's; row-major where that has gaps
  // or entries share memory.
  explicit Layout(at::Tensor const& tensor);

  // Whether Layout(tensor) has as many entries in the same order; strides of dimensions of size 1
  // do not count.
  bool fits(at::Tensor const& tensor) const;
  // The same, and that the tensor has no gaps.
  bool is_of(at::Tensor const& tensor) const;
  bool row_major() const;
  c10::IntArrayRef sizes() const { return sizes_; }
  c10::IntArrayRef strides() const { return strides_; }
  // As many entries as the layout has, which lie in this order from the first of `flat` on.
  at::Tensor view(at::Tensor const& flat) const;
  // The dimensions of more than one entry, the outermost in memory first.
  std::string text() const;

 private:
  c10::DimVector sizes_;
  c10::DimVector strides_;
};

}  // namespace sparsecomm
