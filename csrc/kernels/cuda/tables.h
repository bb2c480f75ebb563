// The files of kernels, each of which adds its own to the tables of library.h.
#pragma once

#include "kernels/cuda/library.h"

namespace sparsecomm::cuda {

std::size_t selection_workspace(std::size_t size);
void begin(SelectionState const& initial, SelectionState* state, Stream stream);
template <class T>
void add_selection_kernels(Kernels<T>& table);

std::size_t threshold_workspace(std::size_t size, std::size_t stride);
template <class T>
void add_threshold_kernels(Kernels<T>& table);

template <class T>
void add_bucket_kernels(Kernels<T>& table);

template <class T>
void add_gaussian_kernels(Kernels<T>& table);

template <class T>
void add_dense_kernels(Kernels<T>& table);
template <class V>
void add_sparse_kernels(ValueKernels<V>& table);
template <class V>
void add_qsgd_kernels(ValueKernels<V>& table);

UnionKernels union_kernels();

template <class T>
void add_block_kernels(Kernels<T>& table);

std::size_t block_workspace(std::size_t blocks);
void block_scan(std::byte const* bytes, std::size_t size, std::size_t block_bytes,
                std::uint32_t* bitmap, std::uint32_t* numbers, std::byte* out, std::uint64_t* count,
                void* workspace, Stream stream);
void block_gather(std::byte const* bytes, std::size_t size, std::size_t block_bytes,
                  std::uint32_t const* numbers, std::size_t count, std::byte* out,
                  std::uint32_t* outside, Stream stream);
void block_scatter(std::byte* bytes, std::size_t size, std::size_t block_bytes,
                   std::uint32_t const* numbers, std::size_t count, std::byte const* blocks,
                   std::uint32_t* outside, Stream stream);

}  // namespace sparsecomm::cuda
