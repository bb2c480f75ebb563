// The numbers of a few blocks, increasing: what a worker votes for, and what a round reduces.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace sparsecomm {

// A bitmap of a round's blocks is one word.
inline constexpr std::size_t most_blocks = 64;

class BlockList {
 public:
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::uint32_t operator[](std::size_t i) const { return numbers_[i]; }
  std::uint32_t back() const { return numbers_[size_ - 1]; }
  std::span<const std::uint32_t> numbers() const& { return {numbers_.data(), size_}; }
  std::span<const std::uint32_t> numbers() && = delete;  // would not outlive the list

  void clear() { size_ = 0; }
  // At most most_blocks in all.
  void push_back(std::uint32_t number) { numbers_[size_++] = number; }
  void drop_front(std::size_t count) {
    std::copy(numbers_.begin() + count, numbers_.begin() + size_, numbers_.begin());
    size_ -= count;
  }

  // A bit for each block.
  std::uint64_t all_bits() const {
    return size_ == most_blocks ? ~std::uint64_t{0} : (std::uint64_t{1} << size_) - 1;
  }

  friend bool operator==(BlockList const& a, BlockList const& b) {
    return std::ranges::equal(a.numbers(), b.numbers());
  }

 private:
  std::array<std::uint32_t, most_blocks> numbers_{};
  std::size_t size_ = 0;
};

// The `window` smallest distinct numbers of both, in O(window): it does not matter in which order
// lists are merged, nor whether one is merged twice.
inline BlockList merge_smallest(BlockList const& a, BlockList const& b, std::size_t window) {
  BlockList merged;
  for (std::size_t i = 0, j = 0; merged.size() < window && (i < a.size() || j < b.size());) {
    if (j == b.size() || (i < a.size() && a[i] < b[j])) {
      merged.push_back(a[i++]);
    } else {
      if (i < a.size() && a[i] == b[j]) ++i;
      merged.push_back(b[j++]);
    }
  }
  return merged;
}

}  // namespace sparsecomm
