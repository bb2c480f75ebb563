#include "layout.h"

#include <c10/util/strides.h>

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace sparsecomm {
namespace {

bool same_order(c10::IntArrayRef sizes, c10::IntArrayRef one, c10::IntArrayRef other) {
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] > 1 && one[i] != other[i]) return false;
  }
  return true;
}

}  // namespace

Layout::Layout(at::Tensor const& tensor) : sizes_(tensor.sizes()) {
  strides_ = tensor.is_non_overlapping_and_dense() ? c10::DimVector(tensor.strides())
                                                   : c10::contiguous_strides(sizes_);
}

bool Layout::fits(at::Tensor const& tensor) const {
  if (tensor.sizes() != sizes()) return false;
  if (tensor.is_non_overlapping_and_dense()) return same_order(sizes_, strides_, tensor.strides());
  return row_major();
}

bool Layout::is_of(at::Tensor const& tensor) const {
  return tensor.is_non_overlapping_and_dense() && fits(tensor);
}

bool Layout::row_major() const {
  return same_order(sizes_, strides_, c10::contiguous_strides(sizes_));
}

at::Tensor Layout::view(at::Tensor const& flat) const { return flat.as_strided(sizes_, strides_); }

std::string Layout::text() const {
  std::vector<std::size_t> dimensions;
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    if (sizes_[i] > 1) dimensions.push_back(i);
  }
  std::ranges::sort(dimensions, std::ranges::greater(), [&](std::size_t i) { return strides_[i]; });
  std::string text;
  for (std::size_t const i : dimensions) text += concat(text.empty() ? "" : " ", i);
  return text;
}

}  // namespace sparsecomm
