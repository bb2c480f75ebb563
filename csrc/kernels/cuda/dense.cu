// Entry by entry over a gradient, and the packed entries that go into one.
#include "base/finite.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tables.h"

namespace sparsecomm::cuda {
namespace {

template <class T>
__global__ void scatter_entries(T* destination, std::size_t size, std::uint32_t const* indices,
                                accumulate_t<T> const* values, std::size_t count,
                                accumulate_t<T> divisor, std::uint32_t first_index,
                                std::uint32_t* outside) {
  for (std::size_t i = grid_thread(); i < count; i += grid_threads()) {
    // An index before first_index wraps to a position that is too large as well.
    std::uint32_t const position = indices[i] - first_index;
    if (position < size) {
      destination[position] = narrowed<T>(values[i] / divisor);
    } else {
      *outside = 1;
    }
  }
}

template <class T>
void scatter(T* destination, std::size_t size, std::uint32_t const* indices,
             accumulate_t<T> const* values, std::size_t count, accumulate_t<T> divisor,
             std::uint32_t first_index, std::uint32_t* outside, Stream stream) {
  if (count == 0) return;
  launch("scatter", scatter_entries<T>, striding_blocks(count), block_threads, stream, destination,
         size, indices, values, count, divisor, first_index, outside);
}

template <class T>
__global__ void divide_entries(T* destination, accumulate_t<T> const* values, std::size_t size,
                               accumulate_t<T> divisor) {
  for (std::size_t i = grid_thread(); i < size; i += grid_threads()) {
    destination[i] = narrowed<T>(values[i] / divisor);
  }
}

template <class T>
void divide(T* destination, accumulate_t<T> const* values, std::size_t size,
            accumulate_t<T> divisor, Stream stream) {
  if (size == 0) return;
  launch("divide", divide_entries<T>, striding_blocks(size), block_threads, stream, destination,
         values, size, divisor);
}

template <class T>
__global__ void fill_entries(T* destination, std::size_t size, T value) {
  for (std::size_t i = grid_thread(); i < size; i += grid_threads()) destination[i] = value;
}

template <class T>
void fill(T* destination, std::size_t size, T value, Stream stream) {
  if (size == 0) return;
  launch("fill", fill_entries<T>, striding_blocks(size), block_threads, stream, destination, size,
         value);
}

template <class T>
__device__ T nearest_finite(accumulate_t<T> value) {
  if constexpr (sizeof(T) == sizeof(accumulate_t<T>)) {
    return value;
  } else {
    accumulate_t<T> const most = largest_finite<T>();
    return narrowed<T>(value > most ? most : value < -most ? -most : value);
  }
}

template <class T>
__global__ void flush_entries(T* gradient, accumulate_t<T>* residual, T* copy, std::size_t size) {
  using V = accumulate_t<T>;
  for (std::size_t i = grid_thread(); i < size; i += grid_threads()) {
    V const sum = residual[i] + widened(gradient[i]);
    T const sent = nearest_finite<T>(sum);
    residual[i] = sum - widened(sent);
    gradient[i] = sent;
    copy[i] = sent;
  }
}

template <class T>
void flush(T* gradient, accumulate_t<T>* residual, T* copy, std::size_t size, Stream stream) {
  if (size == 0) return;
  launch("flush", flush_entries<T>, striding_blocks(size), block_threads, stream, gradient,
         residual, copy, size);
}

template <class T>
__global__ void add_entries(accumulate_t<T>* residual, T const* values, std::size_t size) {
  for (std::size_t i = grid_thread(); i < size; i += grid_threads()) {
    residual[i] += widened(values[i]);
  }
}

template <class T>
void add(accumulate_t<T>* residual, T const* values, std::size_t size, Stream stream) {
  if (size == 0) return;
  launch("add", add_entries<T>, striding_blocks(size), block_threads, stream, residual, values,
         size);
}

template <class V>
__global__ void add_sparse_entries(V* dense, std::size_t size, std::uint32_t const* indices,
                                   V const* values, std::size_t count, std::uint32_t first_index,
                                   V* before, std::uint32_t* outside) {
  for (std::size_t i = grid_thread(); i < count; i += grid_threads()) {
    std::uint32_t const position = indices[i] - first_index;
    if (position >= size) {
      *outside = 1;
      continue;
    }
    V const old = dense[position];
    if (before != nullptr) before[i] = old;
    dense[position] = old + values[i];
  }
}

template <class V>
void add_sparse(V* dense, std::size_t size, std::uint32_t const* indices, V const* values,
                std::size_t count, std::uint32_t first_index, V* before, std::uint32_t* outside,
                Stream stream) {
  if (count == 0) return;
  launch("add_sparse", add_sparse_entries<V>, striding_blocks(count), block_threads, stream, dense,
         size, indices, values, count, first_index, before, outside);
}

}  // namespace

template <class T>
void add_dense_kernels(Kernels<T>& table) {
  table.scatter = scatter<T>;
  table.divide = divide<T>;
  table.fill = fill<T>;
  table.flush = flush<T>;
  table.add = add<T>;
}

template <class V>
void add_sparse_kernels(ValueKernels<V>& table) {
  table.add_sparse = add_sparse<V>;
}

template void add_dense_kernels(Kernels<float>&);
template void add_dense_kernels(Kernels<double>&);
template void add_dense_kernels(Kernels<Half>&);
template void add_dense_kernels(Kernels<BFloat16>&);
template void add_sparse_kernels(ValueKernels<float>&);
template void add_sparse_kernels(ValueKernels<double>&);

}  // namespace sparsecomm::cuda
