// Reusable scratch: grows to the largest size asked for and is never zero-filled, so that pages
// which are reserved for a worst case but never written cost no memory.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace sparsecomm {

template <class T>
class Buffer {
 public:
  // `size` elements whose contents are unspecified. Invalidates spans handed out before when it has
  // to grow.
  std::span<T> take(std::size_t size) {
    if (size > capacity_) {
      data_ = std::make_unique_for_overwrite<T[]>(size);
      capacity_ = size;
    }
    return {data_.get(), size};
  }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t capacity_ = 0;
};

using ByteBuffer = Buffer<std::byte>;

}  // namespace sparsecomm
