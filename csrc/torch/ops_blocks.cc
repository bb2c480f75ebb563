// Blocks of consecutive entries: which hold anything, which have the largest norms, and copies.
#include <algorithm>

#include "base/buffer.h"
#include "kernels/block_scan.h"
#include "kernels/block_top_k.h"
#include "ops_cuda.h"

namespace sparsecomm::ops {
namespace {

std::int64_t count_blocks(std::int64_t size, std::int64_t block) {
  require(block >= 1 && block <= most_entries, "block = ", block, " is not in [1, 2^31]");
  std::int64_t const blocks = size / block + (size % block != 0);
  require_int32_indices(blocks, "a tensor in blocks");
  return blocks;
}

constexpr PositionWords of_blocks{"number", "numbers", "blocks", "give each once"};

std::span<std::byte> bytes_of(at::Tensor const& contiguous) {
  return {static_cast<std::byte*>(contiguous.data_ptr()), contiguous.nbytes()};
}

Triple scan_on_device(at::Tensor const& x, std::int64_t block, std::int64_t blocks) {
  DeviceCall const call(x);
  auto const block_bytes = static_cast<std::size_t>(block) * x.itemsize();
  require(block_bytes % 4 == 0, "blocks of ", block_bytes,
          " bytes: choose a positive multiple of 4");
  at::Tensor const bitmap =
      call.empty(blocks / 64 + (blocks % 64 != 0), at::kLong).zero_();  // the last word's end too
  at::Tensor const numbers = call.empty(blocks, at::kInt);
  at::Tensor const copies = at::empty({blocks, block}, x.options());
  at::Tensor const count = call.zeroed<std::uint64_t>();
  at::Tensor const workspace =
      call.workspace(call.library().block_workspace(static_cast<std::size_t>(blocks)));
  call.library().block_scan(
      static_cast<std::byte const*>(x.data_ptr()), x.nbytes(), block_bytes,
      entries<std::uint32_t>(bitmap).data(), entries<std::uint32_t>(numbers).data(),
      static_cast<std::byte*>(copies.data_ptr()), entries<std::uint64_t>(count).data(),
      workspace.data_ptr(), call.stream());
  auto const found = static_cast<std::int64_t>(call.read<std::uint64_t>(count));
  at::Tensor const found_numbers = numbers.narrow(0, 0, found).clone();
  at::Tensor const found_blocks = copies.narrow(0, 0, found).clone();
  std::int64_t const held = x.numel() % block;
  if (found > 0 && held != 0 && found_numbers[found - 1].item<std::int64_t>() + 1 == blocks) {
    found_blocks[found - 1].narrow(0, held, block - held).zero_();
  }
  return {bitmap, found_numbers, found_blocks};
}

Triple block_scan_op(at::Tensor const& input, std::int64_t block) {
  std::int64_t const size = input.numel();
  std::int64_t const blocks = count_blocks(size, block);
  at::Tensor const x = input.contiguous();
  if (on_device(input)) return scan_on_device(x, block, blocks);
  at::Tensor bitmap = at::empty({blocks / 64 + (blocks % 64 != 0)}, at::kLong);
  Buffer<std::uint32_t> numbers;
  Buffer<std::byte> copies;
  std::span const bytes(static_cast<std::byte const*>(x.data_ptr()), x.nbytes());
  auto const block_bytes = static_cast<std::size_t>(block) * x.itemsize();
  auto const all_numbers = numbers.take(static_cast<std::size_t>(blocks));
  auto const all_copies = copies.take(bytes.size());
  std::size_t const found = block_scan(
      bytes, block_bytes, {entries<std::uint64_t>(bitmap), all_numbers, all_copies}, *executor());

  auto const count = static_cast<std::int64_t>(found);
  at::Tensor found_numbers = at::empty({count}, at::kInt);
  at::Tensor found_blocks = at::empty({count, block}, input.options());
  std::ranges::copy(all_numbers.first(found), entries<std::uint32_t>(found_numbers).begin());
  std::size_t const whole = found * block_bytes;
  bool const cut = count > 0 && size % block != 0 && all_numbers[found - 1] + 1 == blocks;
  std::size_t const held = cut ? whole - (block_bytes - bytes.size() % block_bytes) : whole;
  std::span const out(static_cast<std::byte*>(found_blocks.data_ptr()), whole);
  std::ranges::copy(all_copies.first(held), out.begin());
  std::ranges::fill(out.subspan(held), std::byte{0});
  return {bitmap, found_numbers, found_blocks};
}

// ---- by their numbers

// Of contiguous tensors; the numbers are those of blocks.
void gather(at::Tensor const& x, std::span<const std::uint32_t> numbers, at::Tensor const& out) {
  std::size_t const block_bytes = static_cast<std::size_t>(out.size(1)) * x.itemsize();
  if (!on_device(x)) {
    block_gather(bytes_of(x), block_bytes, numbers, bytes_of(out), *executor());
    return;
  }
  DeviceCall const call(x);
  at::Tensor const outside = call.zeroed<std::uint32_t>();
  call.library().block_gather(bytes_of(x).data(), x.nbytes(), block_bytes, numbers.data(),
                              numbers.size(), bytes_of(out).data(),
                              entries<std::uint32_t>(outside).data(), call.stream());
}

at::Tensor block_gather_op(at::Tensor const& input, at::Tensor const& numbers, std::int64_t block) {
  std::int64_t const blocks = count_blocks(input.numel(), block);
  require_same_device(input, numbers, "numbers");
  at::Tensor const x = input.contiguous();
  at::Tensor const own_numbers = numbers.contiguous();
  auto const wanted = checked_positions(own_numbers, numbers.numel(), blocks, of_blocks);
  at::Tensor out = at::empty({numbers.numel(), block}, x.options());
  gather(x, wanted, out);
  return out;
}

void block_scatter_op(at::Tensor const& dense, at::Tensor const& numbers,
                      at::Tensor const& blocks) {
  require(blocks.dim() == 2 && blocks.size(1) >= 1,
          "blocks must be of shape [numbers, block], not ", blocks.sizes());
  require(blocks.scalar_type() == dense.scalar_type(), "blocks is of ",
          at::toString(blocks.scalar_type()), ", must be of ", at::toString(dense.scalar_type()),
          " as dense");
  require_same_device(dense, numbers, "numbers");
  require_same_device(dense, blocks, "blocks");
  require_apart(dense, blocks, "dense and blocks");
  require_apart(dense, numbers, "dense and numbers");
  at::Tensor const own_numbers = numbers.contiguous();
  at::Tensor const from = blocks.contiguous();
  auto const to = checked_vector(own_numbers, blocks.size(0),
                                 count_blocks(dense.numel(), blocks.size(1)), "blocks", of_blocks);
  InPlace const target(dense, "dense");
  at::Tensor const& out = target.contiguous();
  std::size_t const block_bytes = static_cast<std::size_t>(blocks.size(1)) * blocks.itemsize();
  if (on_device(dense)) {
    DeviceCall const call(dense);
    at::Tensor const outside = call.zeroed<std::uint32_t>();
    call.library().block_scatter(bytes_of(out).data(), out.nbytes(), block_bytes, to.data(),
                                 to.size(), bytes_of(from).data(),
                                 entries<std::uint32_t>(outside).data(), call.stream());
  } else {
    block_scatter(bytes_of(out), block_bytes, to, bytes_of(from), *executor());
  }
  target.store();
}

// The numbers of the `wanted` blocks of the largest norms.
template <class T>
at::Tensor largest_blocks(at::Tensor const& x, std::size_t block, std::size_t wanted) {
  auto const from = entries<const T>(x);
  auto const count = static_cast<std::int64_t>(wanted);
  if (!on_device(x)) {
    BlockTopKScratch scratch;
    at::Tensor numbers = at::empty({count}, at::kInt);
    std::ranges::copy(block_top_k<T>(from, block, wanted, scratch, *executor()),
                      entries<std::uint32_t>(numbers).begin());
    return numbers;
  }
  DeviceCall const call(x);
  at::Tensor numbers = call.empty(count, at::kInt);
  if (wanted == 0) return numbers;
  at::Tensor const squares =
      call.empty(static_cast<std::int64_t>(part_count(from.size(), block)), at::kDouble);
  at::Tensor const largest = call.empty(count, at::kDouble);
  call.library().template kernels<T>().block_squares(
      from.data(), from.size(), block, entries<double>(squares).data(), call.stream());
  DeviceThreshold<double> threshold(call.queue());
  top_k_of_row<double>(call, entries<const double>(squares), wanted,
                       {entries<std::uint32_t>(numbers).data(), entries<double>(largest).data()},
                       threshold);
  return numbers;
}

Pair block_top_k_op(at::Tensor const& input, std::int64_t k, std::int64_t block) {
  return visit_gradient(input, "input", [&]<class T>() {
    std::int64_t const blocks = count_blocks(input.numel(), block);
    std::size_t const wanted = std::min(require_count(k, "k"), static_cast<std::uint64_t>(blocks));
    at::Tensor const x = input.contiguous();
    at::Tensor const numbers = largest_blocks<T>(x, static_cast<std::size_t>(block), wanted);
    at::Tensor const out = at::empty({static_cast<std::int64_t>(wanted), block}, x.options());
    gather(x, positions(numbers), out);
    return Pair{numbers, out};
  });
}

void implement_blocks(torch::Library& library) {
  library.impl("block_scan", TORCH_FN(Operator<&block_scan_op>::call));
  library.impl("block_gather", TORCH_FN(Operator<&block_gather_op>::call));
  library.impl("block_scatter", TORCH_FN(Operator<&block_scatter_op>::call));
  library.impl("block_top_k", TORCH_FN(Operator<&block_top_k_op>::call));
}

}  // namespace

TORCH_LIBRARY_IMPL(sparsecomm, CPU, library) { implement_blocks(library); }
TORCH_LIBRARY_IMPL(sparsecomm, CUDA, library) { implement_blocks(library); }

}  // namespace sparsecomm::ops
