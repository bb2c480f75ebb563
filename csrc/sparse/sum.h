// The sum of many sorted streams at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "sparse/stream.h"

namespace sparsecomm {

// Takes P sorted streams over [first_index, first_index + extent) and adds them up, at each index
// in the order in which they came: the bits that P - 1 merges would give. Three streams at most are
// merged so; more are added up in windows that stay in the second cache, O(entries + extent / 64),
// or, where that is less, by sorting, O(entries log P). Its storage is kept between uses.
template <class V>
class SparseSum {
 public:
  void reset(std::uint32_t first_index, std::uint64_t extent);

  // The view's memory must stay until the sum is made. Throws InvalidArgument when the first or
  // last index lies outside of the range.
  void add(SparseView<V> view);
  // The same of what `append` appends, sorted, to the two vectors it is given.
  template <class F>
  void add_from(F&& append) {
    std::size_t const begin = indices_.size();
    append(indices_, values_);
    take_own(begin);
  }

  // Sums what has been added so far, so that it need not be kept: sum() gives the same bits. Views
  // that were added are needed no longer, unless there is only one stream yet.
  void fold();

  // Entries whose sum is 0 stay. Valid until the next reset() or add(). Ends the sum: what is added
  // afterwards is not part of it.
  SparseView<V> sum();

 private:
  void check(SparseView<V> view) const;
  void take_own(std::size_t begin);
  SparseView<V> by_merging();
  SparseView<V> by_windows(std::size_t entries);
  SparseView<V> by_sorting(std::size_t entries);

  std::uint32_t first_index_ = 0;
  std::uint64_t extent_ = 0;
  std::vector<SparseView<V>> streams_;
  struct Own {
    std::size_t stream, begin, end;
  };
  std::vector<Own> own_;  // the streams that lie in indices_ and values_, and where
  std::vector<std::uint32_t> indices_;
  std::vector<V> values_, all_values_;
  struct Output {
    Buffer<std::uint32_t> indices;
    Buffer<V> values;
  };
  Output sum_, former_sum_, folded_;
  bool swapped_ = false;                 // sum_ and folded_, since reset()
  std::vector<V> window_;                // -0 between uses
  std::vector<std::uint64_t> occupied_;  // a bit of a window's entry; none is set between uses
  std::vector<std::uint64_t> keys_, merged_keys_;
  std::vector<std::size_t> next_, runs_;
};

}  // namespace sparsecomm
