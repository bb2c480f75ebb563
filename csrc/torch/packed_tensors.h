// Dense tensors as gloo takes them, which reads and writes memory without asking for strides.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace sparsecomm {

// The tensors of one operation. Those on the CPU that are not row-major are packed, so that ranks
// whose strides differ mean the same entry by the same place; all others go as they are.
class PackedTensors {
 public:
  using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Packs a tensor that the operation only reads.
  at::Tensor input(at::Tensor const& tensor);
  // Packs one that it overwrites as a whole. Throws c10::Error if entries share memory, as does
  // in_place().
  at::Tensor output(at::Tensor const& tensor);
  // Packs one that it reads and overwrites.
  at::Tensor in_place(at::Tensor const& tensor);

  template <class T>
  std::vector<T> input(std::vector<T> const& tensors) {
    return each(tensors, [this](T const& tensor) { return input(tensor); });
  }
  template <class T>
  std::vector<T> output(std::vector<T> const& tensors) {
    return each(tensors, [this](T const& tensor) { return output(tensor); });
  }
  std::vector<at::Tensor> in_place(std::vector<at::Tensor> const& tensors) {
    return each(tensors, [this](at::Tensor const& tensor) { return in_place(tensor); });
  }

  // The operation's work; if outputs were packed, one that copies them to their places first. What
  // fails leaves them as they were.
  WorkPtr unpack(WorkPtr work);

 private:
  template <class T, class F>
  static std::vector<T> each(std::vector<T> const& tensors, F const& pack) {
    std::vector<T> packed;
    packed.reserve(tensors.size());
    for (T const& tensor : tensors) packed.push_back(pack(tensor));
    return packed;
  }

  Pairs outputs_;  // packed, and where that belongs
};

}  // namespace sparsecomm
