// Blocks of consecutive bytes or entries: which hold anything, which have the largest norms, and
// copies of them.
#include "kernels/cuda/device.h"
#include "kernels/cuda/look_back.cuh"
#include "kernels/cuda/tables.h"

namespace sparsecomm::cuda {
namespace {

// Blocks of data that a block of threads looks at: the bits of one word of the bitmap.
constexpr unsigned scanned_blocks = 32;

struct ScanShared {
  unsigned tile;
  std::uint32_t set;
  std::uint64_t before;
};

struct Bytes {
  std::byte const* data;
  std::size_t size;
  std::size_t block;

  __device__ std::size_t begin(std::size_t number) const { return number * block; }
  __device__ std::size_t length(std::size_t number) const {
    std::size_t const left = size - begin(number);
    return left < block ? left : block;
  }
};

// Bytes before the first address that is a multiple of 8.
__device__ inline std::size_t head_of(std::byte const* from, std::size_t length) {
  std::size_t const head = -reinterpret_cast<std::uintptr_t>(from) % 8;
  return head < length ? head : length;
}

// By a warp: whether a bit of the block is set. Whole words, wherever the block begins; the bytes
// around them, 14 at the most, are one lane's each.
__device__ inline bool any_set(Bytes const& bytes, std::size_t number) {
  std::byte const* const from = bytes.data + bytes.begin(number);
  std::size_t const length = bytes.length(number);
  std::size_t const head = head_of(from, length);
  std::size_t const words = (length - head) / 8;
  std::size_t const tail = length - head - words * 8;
  unsigned const lane = threadIdx.x % warp_lanes;
  std::uint64_t bits = 0;
  for (std::size_t i = lane; i < words; i += warp_lanes) {
    bits |= reinterpret_cast<std::uint64_t const*>(from + head)[i];
  }
  if (lane < head) bits |= static_cast<std::uint64_t>(from[lane]);
  if (lane < tail) bits |= static_cast<std::uint64_t>(from[length - tail + lane]);
  return __ballot_sync(all_lanes, bits != 0) != 0;
}

// By a warp. Whole words too, where both begin at the same byte of a word.
__device__ inline void copy_bytes(std::byte const* from, std::byte* to, std::size_t length) {
  std::size_t const head = head_of(from, length);
  std::size_t const words = head_of(to, length) == head ? (length - head) / 8 : 0;
  unsigned const lane = threadIdx.x % warp_lanes;
  for (std::size_t i = lane; i < words; i += warp_lanes) {
    reinterpret_cast<std::uint64_t*>(to + head)[i] =
        reinterpret_cast<std::uint64_t const*>(from + head)[i];
  }
  if (lane < head) to[lane] = from[lane];
  for (std::size_t i = head + words * 8 + lane; i < length; i += warp_lanes) to[i] = from[i];
}

__global__ void __launch_bounds__(block_threads)
    scan_blocks(Bytes bytes, std::size_t blocks, std::uint32_t* bitmap, std::uint32_t* numbers,
                std::byte* out, std::uint64_t* count, TileWords words) {
  SPARSECOMM_SHARED(ScanShared, shared);
  unsigned const warp = threadIdx.x / warp_lanes;
  unsigned const lane = threadIdx.x % warp_lanes;
  if (threadIdx.x == 0) {
    shared.tile = atomicAdd(words.next, 1u);
    shared.set = 0;
  }
  __syncthreads();
  unsigned const tile = shared.tile;
  std::size_t const first = std::size_t{tile} * scanned_blocks;
  for (unsigned b = warp; b < scanned_blocks; b += block_warps) {
    if (first + b < blocks && any_set(bytes, first + b) && lane == 0) {
      atomicOr(&shared.set, 1u << b);
    }
  }
  __syncthreads();
  std::uint32_t const set = shared.set;
  if (warp == 0) {
    auto const own = static_cast<std::uint64_t>(__popc(set));
    Counts const before = look_back(words, tile, {own, 0}, {});
    if (lane == 0) {
      shared.before = before.larger;
      bitmap[tile] = set;
      if (tile == gridDim.x - 1) *count = before.larger + own;
    }
  }
  __syncthreads();
  for (unsigned b = warp; b < scanned_blocks; b += block_warps) {
    if ((set >> b & 1u) == 0) continue;
    std::uint64_t const place = shared.before + __popc(set & ((1u << b) - 1));
    if (lane == 0) numbers[place] = static_cast<std::uint32_t>(first + b);
    if (out != nullptr) {
      copy_bytes(bytes.data + bytes.begin(first + b), out + place * bytes.block,
                 bytes.length(first + b));
    }
  }
}

__device__ inline std::size_t grid_warp() { return grid_thread() / warp_lanes; }
__device__ inline std::size_t grid_warps() { return grid_threads() / warp_lanes; }

// A warp for each block.
__global__ void __launch_bounds__(block_threads)
    gather_blocks(Bytes bytes, std::size_t blocks, std::uint32_t const* numbers, std::size_t count,
                  std::byte* out, std::uint32_t* outside) {
  unsigned const lane = threadIdx.x % warp_lanes;
  for (std::size_t i = grid_warp(); i < count; i += grid_warps()) {
    std::size_t const number = numbers[i];
    if (number >= blocks) {
      *outside = 1;
      continue;
    }
    std::byte* const to = out + i * bytes.block;
    std::size_t const length = bytes.length(number);
    copy_bytes(bytes.data + bytes.begin(number), to, length);
    for (std::size_t at = length + lane; at < bytes.block; at += warp_lanes) to[at] = std::byte{0};
  }
}

__global__ void __launch_bounds__(block_threads)
    scatter_blocks(Bytes bytes, std::byte* data, std::size_t blocks, std::uint32_t const* numbers,
                   std::size_t count, std::byte const* from, std::uint32_t* outside) {
  unsigned const lane = threadIdx.x % warp_lanes;
  for (std::size_t i = grid_warp(); i < count; i += grid_warps()) {
    std::size_t const number = numbers[i];
    if (number >= blocks) {
      *outside = 1;
      continue;
    }
    std::byte* const to = data + bytes.begin(number);
    std::size_t const length = bytes.length(number);
    if (from != nullptr) {
      copy_bytes(from + i * bytes.block, to, length);
    } else {
      for (std::size_t at = lane; at < length; at += warp_lanes) to[at] = std::byte{0};
    }
  }
}

// moment_lanes threads for each block, which add in the order of the scalar kernel, `moments`.
template <class T>
__global__ void __launch_bounds__(block_threads)
    square_blocks(T const* x, std::size_t size, std::size_t block, std::size_t blocks,
                  double* squares) {
  constexpr unsigned each = warp_lanes / moment_lanes;
  auto const lane = static_cast<unsigned>(threadIdx.x % moment_lanes);
  unsigned const own = threadIdx.x % warp_lanes / moment_lanes;
  // All threads of a warp stay together, for they exchange sums.
  for (std::size_t first = grid_warp() * each; first < blocks; first += grid_warps() * each) {
    std::size_t const number = first + own;
    double sum = 0;
    if (number < blocks) {
      T const* const entries = x + number * block;
      std::size_t const left = size - number * block;
      std::size_t const length = left < block ? left : block;
      for (std::size_t i = lane; i < length; i += moment_lanes) {
        auto const value = static_cast<double>(widened(entries[i]));
        sum += value * value;
      }
    }
    for (unsigned half = moment_lanes / 2; half > 0; half /= 2) {
      sum += __shfl_xor_sync(all_lanes, sum, half);
    }
    if (lane == 0 && number < blocks) squares[number] = sum;
  }
}

template <class T>
void block_squares(T const* x, std::size_t size, std::size_t block, double* squares,
                   Stream stream) {
  constexpr char const* call = "block_squares";
  require(block >= 1, call, ": blocks of ", block, " entries: 1 is the least");
  if (size == 0) return;
  std::size_t const blocks = divided_up(size, block);
  launch(call, square_blocks<T>, striding_blocks(blocks * warp_lanes), block_threads, stream, x,
         size, block, blocks, squares);
}

}  // namespace

template <class T>
void add_block_kernels(Kernels<T>& table) {
  table.block_squares = block_squares<T>;
}

template void add_block_kernels(Kernels<float>&);
template void add_block_kernels(Kernels<double>&);
template void add_block_kernels(Kernels<Half>&);
template void add_block_kernels(Kernels<BFloat16>&);

void block_gather(std::byte const* bytes, std::size_t size, std::size_t block_bytes,
                  std::uint32_t const* numbers, std::size_t count, std::byte* out,
                  std::uint32_t* outside, Stream stream) {
  constexpr char const* call = "block_gather";
  require(block_bytes >= 1, call, ": blocks of ", block_bytes, " bytes: 1 is the least");
  if (count == 0) return;
  launch(call, gather_blocks, striding_blocks(count * warp_lanes), block_threads, stream,
         Bytes{bytes, size, block_bytes}, divided_up(size, block_bytes), numbers, count, out,
         outside);
}

void block_scatter(std::byte* bytes, std::size_t size, std::size_t block_bytes,
                   std::uint32_t const* numbers, std::size_t count, std::byte const* blocks,
                   std::uint32_t* outside, Stream stream) {
  constexpr char const* call = "block_scatter";
  require(block_bytes >= 1, call, ": blocks of ", block_bytes, " bytes: 1 is the least");
  if (count == 0) return;
  launch(call, scatter_blocks, striding_blocks(count * warp_lanes), block_threads, stream,
         Bytes{bytes, size, block_bytes}, bytes, divided_up(size, block_bytes), numbers, count,
         blocks, outside);
}

std::size_t block_workspace(std::size_t blocks) {
  return look_back_bytes(divided_up(blocks, scanned_blocks));
}

void block_scan(std::byte const* bytes, std::size_t size, std::size_t block_bytes,
                std::uint32_t* bitmap, std::uint32_t* numbers, std::byte* out, std::uint64_t* count,
                void* workspace, Stream stream) {
  constexpr char const* call = "block_scan";
  require(block_bytes >= 1, call, ": blocks of ", block_bytes, " bytes: 1 is the least");
  std::size_t const blocks = divided_up(size, block_bytes);
  require(blocks <= std::uint64_t{1} << 32, call, ": ", blocks,
          " blocks do not all have 32-bit numbers; use larger ones");
  if (blocks == 0) {
    require_success(cudaMemsetAsync(count, 0, sizeof(*count), stream), call);
    return;
  }
  std::size_t const tiles = divided_up(blocks, scanned_blocks);
  TileWords const words = prepare_look_back(call, workspace, tiles, stream);
  launch(call, scan_blocks, tiles, block_threads, stream, Bytes{bytes, size, block_bytes}, blocks,
         bitmap, numbers, out, count, words);
}

}  // namespace sparsecomm::cuda
