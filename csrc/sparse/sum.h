// The sum of many sorted streams at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparse/stream.h"

namespace sparsecomm {

// Takes P sorted streams over [first_index, first_index + extent) and adds them up, at each index
// in the order in which they came: the bits that P - 1 merges would give. O(entries + extent / 64),
// or O(entries log P) where that is less. Its storage is kept between uses.
template <class V>
class SparseSum {
 public:
  void reset(std::uint32_t first_index, std::uint64_t extent);

  // Throws InvalidArgument when the first or last index lies outside of the range.
  void add(SparseView<V> view);
  // The same of what `append` appends, sorted, to the two vectors it is given.
  template <class F>
  void add_from(F&& append) {
    append(indices_, values_);
    take();
  }

  std::size_t entries() const { return indices_.size(); }

  // Entries whose sum is 0 stay. Valid until the next reset() or add(). Ends the sum: what is added
  // afterwards is not part of it.
  SparseView<V> sum();

 private:
  void take();
  SparseView<V> by_bitmap();
  SparseView<V> by_merging();

  std::uint32_t first_index_ = 0;
  std::uint64_t extent_ = 0;
  std::vector<std::size_t> ends_;  // of the streams, which stand one behind the other
  std::vector<std::uint32_t> indices_, sum_indices_, ranks_;
  std::vector<V> values_, sum_values_;
  std::vector<std::uint64_t> bitmap_, keys_, merged_keys_;
  std::vector<std::size_t> runs_;
};

}  // namespace sparsecomm
