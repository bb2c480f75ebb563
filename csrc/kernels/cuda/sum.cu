// The sum of sparse vectors through a bitmap of their union, as sparse/sum.h does: the place of an
// index in the sum is the number of bits before it.
#include "kernels/cuda/look_back.cuh"
#include "kernels/cuda/tables.h"

namespace sparsecomm::cuda {
namespace {

// The workspace: what look_back needs, then the bitmap, then how many bits stand before each of its
// words.
struct Union {
  void* tiles;
  std::uint32_t* bits;
  std::uint32_t* before;
  std::size_t words;

  __device__ std::uint32_t place(std::uint32_t index) const {
    return before[index / 32] + __popc(bits[index / 32] & ((1u << index % 32) - 1));
  }
};

std::size_t tiles_of(std::size_t size) { return divided_up(divided_up(size, 32), block_threads); }

Union union_of(std::size_t size, void* workspace) {
  auto* const bits = reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(workspace) +
                                                      look_back_bytes(tiles_of(size)));
  std::size_t const words = divided_up(size, 32);
  return {workspace, bits, bits + words, words};
}

__global__ void mark_indices(std::uint32_t const* indices, std::size_t count, std::size_t size,
                             Union all, std::uint32_t* invalid) {
  for (std::size_t i = grid_thread(); i < count; i += grid_threads()) {
    std::uint32_t const index = indices[i];
    if (index < size && (i == 0 || indices[i - 1] < index)) {
      atomicOr(all.bits + index / 32, 1u << index % 32);
    } else {
      *invalid = 1;
    }
  }
}

struct NumberShared {
  unsigned tile;
  std::uint32_t of_warp[block_warps];
  std::uint64_t before;
};

__global__ void __launch_bounds__(block_threads)
    number_words(Union all, TileWords words, std::uint64_t* count) {
  SPARSECOMM_SHARED(NumberShared, shared);
  unsigned const lane = threadIdx.x % warp_lanes;
  unsigned const warp = threadIdx.x / warp_lanes;
  if (threadIdx.x == 0) shared.tile = atomicAdd(words.next, 1u);
  __syncthreads();
  unsigned const tile = shared.tile;
  std::size_t const word = std::size_t{tile} * block_threads + threadIdx.x;
  auto const own = static_cast<std::uint32_t>(word < all.words ? __popc(all.bits[word]) : 0);
  std::uint32_t up_to = own;
  for (unsigned offset = 1; offset < warp_lanes; offset *= 2) {
    std::uint32_t const other = __shfl_up_sync(all_lanes, up_to, offset);
    up_to += lane >= offset ? other : 0;
  }
  if (lane == warp_lanes - 1) shared.of_warp[warp] = up_to;
  __syncthreads();
  if (warp == 0) {
    std::uint64_t total = 0;
    for (unsigned w = 0; w < block_warps; ++w) total += shared.of_warp[w];
    Counts const before = look_back(words, tile, {total, 0}, {});
    if (lane == 0) {
      shared.before = before.larger;
      if (tile == gridDim.x - 1) *count = before.larger + total;
    }
  }
  __syncthreads();
  std::uint32_t before = static_cast<std::uint32_t>(shared.before) + up_to - own;
  for (unsigned w = 0; w < warp; ++w) before += shared.of_warp[w];
  if (word < all.words) all.before[word] = before;
}

__global__ void list_indices(Union all, std::uint32_t* indices) {
  for (std::size_t word = grid_thread(); word < all.words; word += grid_threads()) {
    std::uint32_t place = all.before[word];
    for (std::uint32_t left = all.bits[word]; left != 0; left &= left - 1) {
      indices[place++] = static_cast<std::uint32_t>(word * 32) +
                         static_cast<std::uint32_t>(__ffs(static_cast<int>(left))) - 1;
    }
  }
}

template <class V>
__global__ void add_values(std::uint32_t const* indices, V const* values, std::size_t count,
                           Union all, V* sums) {
  for (std::size_t i = grid_thread(); i < count; i += grid_threads()) {
    sums[all.place(indices[i])] += values[i];
  }
}

template <class V>
void add(std::uint32_t const* indices, V const* values, std::size_t count, std::size_t size,
         void* workspace, V* sums, Stream stream) {
  if (count == 0) return;
  launch("union add", add_values<V>, striding_blocks(count), block_threads, stream, indices, values,
         count, union_of(size, workspace), sums);
}

std::size_t workspace_bytes(std::size_t size) {
  return look_back_bytes(tiles_of(size)) + 2 * divided_up(size, 32) * sizeof(std::uint32_t);
}

void clear(std::size_t size, void* workspace, Stream stream) {
  require(size <= std::uint64_t{1} << 32, "union: vectors of ", size,
          " entries, which do not all have 32-bit indices");
  require_success(cudaMemsetAsync(workspace, 0, workspace_bytes(size), stream), "union clear");
}

void mark(std::uint32_t const* indices, std::size_t count, std::size_t size, void* workspace,
          std::uint32_t* invalid, Stream stream) {
  if (count == 0) return;
  launch("union mark", mark_indices, striding_blocks(count), block_threads, stream, indices, count,
         size, union_of(size, workspace), invalid);
}

void number(std::size_t size, void* workspace, std::uint64_t* count, Stream stream) {
  if (size == 0) {
    require_success(cudaMemsetAsync(count, 0, sizeof(*count), stream), "union number");
    return;
  }
  std::size_t const tiles = tiles_of(size);
  TileWords const words = prepare_look_back("union number", workspace, tiles, stream);
  launch("union number", number_words, tiles, block_threads, stream, union_of(size, workspace),
         words, count);
}

void list(std::size_t size, void* workspace, std::uint32_t* indices, Stream stream) {
  if (size == 0) return;
  launch("union list", list_indices, striding_blocks(divided_up(size, 32)), block_threads, stream,
         union_of(size, workspace), indices);
}

}  // namespace

UnionKernels union_kernels() {
  return {workspace_bytes,  clear, mark, number, list, add<float>, add<double>, add<std::int32_t>,
          add<std::int64_t>};
}

}  // namespace sparsecomm::cuda
