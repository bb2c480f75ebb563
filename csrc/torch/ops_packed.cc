// What becomes of selected values: rounded to few bits, summed, written back; and blocks.
#include <algorithm>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "kernels/block_scan.h"
#include "ops.h"
#include "sparse/intersection.h"
#include "sparse/sum.h"
#include "wire/codecs.h"
#include "wire/sorted.h"

namespace sparsecomm::ops {
namespace {

// ---- QSGD, in the wire format

ValueCodecEntry const& qsgd_codec(std::int64_t bits) {
  require(bits == 2 || bits == 4 || bits == 8, "bits = ", bits, " is none of 2, 4, 8");
  return *find_value_codec(value_codec_named(concat("qsgd", bits)));
}

template <class F>
decltype(auto) visit_values(at::ScalarType dtype, char const* name, F&& f) {
  if (dtype == at::kFloat) return f.template operator()<float>();
  require(dtype == at::kDouble, name, " is of ", at::toString(dtype),
          "; QSGD takes float32 or float64");
  return f.template operator()<double>();
}

at::Tensor qsgd_quantize_cpu(at::Tensor const& input, std::int64_t bits, std::int64_t seed,
                             std::int64_t operation, std::int64_t stream) {
  ValueCodecEntry const& codec = qsgd_codec(bits);
  require(stream >= 0 && stream <= std::numeric_limits<std::uint32_t>::max(), "stream = ", stream,
          " is not in [0, 2^32)");
  RoundingKey const key{static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(operation),
                        static_cast<std::uint32_t>(stream)};
  return visit_values(input.scalar_type(), "input", [&]<class V>() {
    at::Tensor const rounded = input.clone(at::MemoryFormat::Contiguous);
    auto const values = entries<V>(rounded);
    auto const bytes = codec.encoded_bytes(values.size(), sizeof(V));
    at::Tensor codes = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
    functions<V>(codec).round(values, key);
    functions<V>(codec).encode(values, entries<std::byte>(codes));
    return codes;
  });
}

at::Tensor qsgd_dequantize_cpu(at::Tensor const& codes, std::int64_t size, std::int64_t bits,
                               at::ScalarType dtype) {
  ValueCodecEntry const& codec = qsgd_codec(bits);
  auto const count = static_cast<std::size_t>(require_count(size, "size"));
  require(codes.scalar_type() == at::kByte, "codes are of ", at::toString(codes.scalar_type()),
          ", must be of uint8");
  return visit_values(dtype, "dtype", [&]<class V>() {
    auto const bytes = static_cast<std::int64_t>(codec.encoded_bytes(count, sizeof(V)));
    require(codes.numel() == bytes, size, " values of ", at::toString(dtype), " in ", bits,
            " bits take ", bytes, " bytes, not ", codes.numel());
    at::Tensor const from = codes.contiguous();
    at::Tensor values = at::empty({size}, dtype);
    functions<V>(codec).decode(entries<const std::byte>(from), entries<V>(values));
    return values;
  });
}

void qsgd_dequantize_add_cpu(at::Tensor const& dense, at::Tensor const& codes, std::int64_t bits) {
  // Decoded first: what is malformed leaves `dense` as it was.
  at::Tensor const values = qsgd_dequantize_cpu(codes, dense.numel(), bits, dense.scalar_type());
  dense.add_(values.view(dense.sizes()));
}

// ---- blocks

std::tuple<at::Tensor, at::Tensor, at::Tensor> block_scan_cpu(at::Tensor const& input,
                                                              std::int64_t block) {
  require(block >= 1 && block <= most_entries, "block = ", block, " is not in [1, 2^31]");
  std::int64_t const size = input.numel();
  std::int64_t const blocks = size / block + (size % block != 0);
  require_int32_indices(blocks, "input, in blocks,");
  at::Tensor const x = input.contiguous();
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

// ---- sparse vectors

std::span<const std::uint32_t> checked_positions(at::Tensor const& contiguous, std::int64_t nnz,
                                                 std::int64_t size) {
  require(contiguous.dim() == 1 && contiguous.scalar_type() == at::kInt,
          "indices must be a vector of int32, not of ", at::toString(contiguous.scalar_type()),
          " and shape ", contiguous.sizes());
  require(contiguous.numel() == nnz, contiguous.numel(), " indices but ", nnz,
          " values: give one value for each");
  auto const indices = positions(contiguous);
  // A negative index is a large one here.
  auto const largest = indices.empty() ? indices.end() : std::ranges::max_element(indices);
  require(indices.empty() || *largest < size, "index ",
          indices.empty() ? 0 : static_cast<std::int32_t>(*largest), " is not in [0, ", size, ")");
  return indices;
}

std::span<const std::uint32_t> checked_vector(at::Tensor const& contiguous, std::int64_t nnz,
                                              std::int64_t size, std::string const& whose) {
  auto const indices = checked_positions(contiguous, nnz, size);
  require(strictly_increasing(indices), "the indices of ", whose,
          " are not strictly increasing; sort them, and add up those that are equal");
  return indices;
}

// Calls f.template operator()<V>() for the element type V of a vector's values.
template <class F>
decltype(auto) visit_sparse_values(at::Tensor const& values, F&& f) {
  switch (values.scalar_type()) {
    case at::kFloat:
      return f.template operator()<float>();
    case at::kDouble:
      return f.template operator()<double>();
    case at::kInt:
      return f.template operator()<std::int32_t>();
    case at::kLong:
      return f.template operator()<std::int64_t>();
    default:
      throw InvalidArgument(concat("values are of ", at::toString(values.scalar_type()),
                                   "; convert them to float32, float64, int32 or int64"));
  }
}

void require_size(std::int64_t size) {
  require(size >= 0 && size <= most_entries, "size = ", size, " is not in [0, 2^31]");
}

// As contiguous memory.
template <class V>
at::Tensor checked_values(at::Tensor const& values, char const* name) {
  require_type<V>(values, name);
  require(values.dim() == 1, "values must be vectors, not of shape ", values.sizes());
  return values.contiguous();
}

template <class V>
Pair sum_of(at::TensorList indices, at::TensorList values, std::int64_t size) {
  SparseSum<V> sum;
  sum.reset(0, static_cast<std::uint64_t>(size));
  std::vector<at::Tensor> kept;  // what the sum reads
  for (std::size_t i = 0; i < indices.size(); ++i) {
    at::Tensor const own_indices = indices[i].contiguous();
    at::Tensor const own_values = checked_values<V>(values[i], "a vector's values");
    kept.insert(kept.end(), {own_indices, own_values});
    sum.add({checked_vector(own_indices, own_values.numel(), size, concat("vector ", i)),
             entries<const V>(own_values)});
  }
  auto const total = sum.sum();
  return copy_packed<V>(total.indices, total.values);
}

Pair sparse_sum_cpu(at::TensorList indices, at::TensorList values, std::int64_t size) {
  require(!indices.empty() && indices.size() == values.size(), indices.size(), " indices and ",
          values.size(), " values: give as many of both, and at least one");
  require_size(size);
  return visit_sparse_values(values[0],
                             [&]<class V>() { return sum_of<V>(indices, values, size); });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sparse_intersection_cpu(
    at::Tensor const& indices, at::Tensor const& values, at::Tensor const& other_indices,
    std::optional<at::Tensor> const& other_values, std::int64_t size) {
  require_size(size);
  return visit_sparse_values(values, [&]<class V>() {
    at::Tensor const one_indices = indices.contiguous();
    at::Tensor const one_values = checked_values<V>(values, "values");
    at::Tensor const two_indices = other_indices.contiguous();
    SparseView<V> const one{checked_vector(one_indices, one_values.numel(), size, "vector"),
                            entries<const V>(one_values)};
    SparseIntersection<V> intersection;
    if (!other_values) {
      auto const shared = intersection.run(
          one, checked_vector(two_indices, two_indices.numel(), size, "the other"));
      return std::tuple_cat(copy_packed<V>(shared.indices, shared.values),
                            std::tuple(at::empty({0}, values.options())));
    }
    at::Tensor const two_values = checked_values<V>(*other_values, "the other's values");
    auto const shared =
        intersection.run(one, {checked_vector(two_indices, two_values.numel(), size, "the other"),
                               entries<const V>(two_values)});
    at::Tensor of_other =
        at::empty({static_cast<std::int64_t>(shared.other.size())}, scalar_type<V>);
    std::ranges::copy(shared.other, entries<V>(of_other).begin());
    return std::tuple_cat(copy_packed<V>(shared.indices, shared.one), std::tuple(of_other));
  });
}

void scatter_cpu(at::Tensor const& dense, at::Tensor const& indices, at::Tensor const& values,
                 double divisor) {
  visit_gradient(dense, "dense", [&]<class T>() {
    using V = accumulate_t<T>;
    require_int32_indices(dense.numel(), "dense");
    require_type<V>(values, "values");
    at::Tensor const from_indices = indices.contiguous();
    at::Tensor const from_values = values.contiguous();
    auto const to = checked_positions(from_indices, values.numel(), dense.numel());
    InPlace const target(dense, "dense");
    require_apart(dense, values, "dense and values");
    scatter<T>(entries<T>(target.contiguous()), to, entries<const V>(from_values),
               static_cast<V>(divisor), 0);
    target.store();
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(sparsecomm, CPU, library) {
  library.impl("qsgd_quantize", TORCH_FN(Operator<&qsgd_quantize_cpu>::call));
  library.impl("qsgd_dequantize", TORCH_FN(Operator<&qsgd_dequantize_cpu>::call));
  library.impl("qsgd_dequantize_add", TORCH_FN(Operator<&qsgd_dequantize_add_cpu>::call));
  library.impl("block_scan", TORCH_FN(Operator<&block_scan_cpu>::call));
  library.impl("sparse_sum", TORCH_FN(Operator<&sparse_sum_cpu>::call));
  library.impl("sparse_intersection", TORCH_FN(Operator<&sparse_intersection_cpu>::call));
  library.impl("scatter", TORCH_FN(Operator<&scatter_cpu>::call));
}

}  // namespace sparsecomm::ops
