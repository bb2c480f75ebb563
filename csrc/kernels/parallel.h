// The kernels on several threads. Every result has the bits that one call of the table's kernel for
// all of the input gives, whatever the executor: parts of a fixed size are worked on anywhere and
// claim their places in the output in index order. Memory is read and written once, as by one
// thread; with one thread, or one part, the kernel itself is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/executor.h"
#include "kernels/kernels.h"

namespace sparsecomm {

// A part for each worker to pack. Kept between calls, so that they need not allocate.
template <class V>
struct SelectionScratch {
  Buffer<std::uint32_t> indices;
  Buffer<V> values;
};

// As the members of KernelTable with these names, which say what is checked and returned.
template <class T>
bool all_finite(std::span<const T> x, Executor const& executor,
                KernelTable<T> const& kernel = kernels<T>());

template <class T>
SelectionStats<accumulate_t<T>> fused_error_feedback(FusedArguments<T> const& arguments,
                                                     Threshold<accumulate_t<T>>& threshold,
                                                     std::uint32_t first_index, std::size_t limit,
                                                     PackedSpan<accumulate_t<T>> out,
                                                     SelectionScratch<accumulate_t<T>>& scratch,
                                                     Executor const& executor,
                                                     KernelTable<T> const& kernel = kernels<T>());

template <class T>
SelectionStats<accumulate_t<T>> select(std::span<const T> x, Threshold<accumulate_t<T>>& threshold,
                                       std::uint32_t first_index, std::size_t limit,
                                       PackedSpan<accumulate_t<T>> out,
                                       SelectionScratch<accumulate_t<T>>& scratch,
                                       Executor const& executor,
                                       KernelTable<T> const& kernel = kernels<T>());

}  // namespace sparsecomm
