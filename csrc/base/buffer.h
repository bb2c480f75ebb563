// Reusable scratch: grows and never shrinks, and is never zero-filled, so that pages which are
// reserved for a worst case but never written cost no memory.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace sparsecomm {

template <class T>
class Buffer {
 public:
  // `size` elements whose contents are unspecified. Invalidates spans handed out before when it has
  // to grow, to an eighth more: sizes that differ little from step to step allocate once.
  std::span<T> take(std::size_t size) {
    if (size > capacity_) {
      capacity_ = 0;
      data_.reset();
      data_ = std::make_unique_for_overwrite<T[]>(size + size / 8);
      capacity_ = size + size / 8;
    }
    return {data_.get(), size};
  }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t capacity_ = 0;
};

using ByteBuffer = Buffer<std::byte>;

}  // namespace sparsecomm
