// What becomes of selected values: rounded to few bits, summed, written back.
#include <algorithm>
#include <string>
#include <vector>

#include "ops_cuda.h"
#include "sparse/intersection.h"
#include "sparse/sum.h"
#include "wire/qsgd.h"

namespace sparsecomm::ops {

QsgdFormat qsgd_format(std::int64_t bits, std::int64_t bucket) {
  require(bits == 2 || bits == 4 || bits == 8, "bits = ", bits, " is none of 2, 4, 8");
  require(bucket == 512 || bucket == 1024, "bucket = ", bucket, " is none of 512, 1024");
  return {static_cast<int>(bits), static_cast<std::size_t>(bucket)};
}

namespace {

// ---- QSGD, in the wire format

template <class F>
decltype(auto) visit_values(at::ScalarType dtype, char const* name, F&& f) {
  if (dtype == at::kFloat) return f.template operator()<float>();
  require(dtype == at::kDouble, name, " is of ", at::toString(dtype),
          "; QSGD takes float32 or float64");
  return f.template operator()<double>();
}

template <class V>
at::Tensor quantize_on_device(at::Tensor const& input, QsgdFormat format, RoundingKey const& key) {
  DeviceCall const call(input);
  at::Tensor const x = input.contiguous();
  auto const values = entries<const V>(x);
  at::Tensor const codes = call.workspace(format.bytes(values.size(), sizeof(V)));
  at::Tensor const not_finite = call.zeroed<std::uint32_t>();
  call.library().template values<V>().qsgd_quantize(
      values.data(), values.size(), format.bits, format.bucket, key,
      entries<std::byte>(codes).data(), nullptr, entries<std::uint32_t>(not_finite).data(),
      call.stream());
  require(call.template read<std::uint32_t>(not_finite) == 0,
          "input has a value that is not finite; QSGD has no level for it");
  return codes;
}

template <class V>
at::Tensor dequantize_on_device(at::Tensor const& codes, std::int64_t size, QsgdFormat format) {
  DeviceCall const call(codes);
  auto const from = entries<const std::byte>(codes);
  auto const count = static_cast<std::size_t>(size);
  at::Tensor const invalid = call.zeroed<std::uint32_t>();
  auto const& kernels = call.library().template values<V>();
  kernels.qsgd_check(from.data(), count, format.bits, format.bucket,
                     entries<std::uint32_t>(invalid).data(), call.stream());
  require(call.template read<std::uint32_t>(invalid) == 0,
          "codes are none that qsgd_quantize makes: a scale is negative or not finite, a level is "
          "too large, or the padding is not 0");
  // To which adding changes nothing, not even the sign of a zero.
  at::Tensor values = call.empty(size, scalar_type<V>).fill_(-0.0);
  kernels.qsgd_dequantize_add(from.data(), count, format.bits, format.bucket,
                              entries<V>(values).data(), call.stream());
  return values;
}

at::Tensor qsgd_quantize(at::Tensor const& input, std::int64_t bits, std::int64_t seed,
                         std::int64_t operation, std::int64_t stream, std::int64_t bucket) {
  QsgdFormat const format = qsgd_format(bits, bucket);
  require(stream >= 0 && stream <= std::numeric_limits<std::uint32_t>::max(), "stream = ", stream,
          " is not in [0, 2^32)");
  RoundingKey const key{static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(operation),
                        static_cast<std::uint32_t>(stream)};
  return visit_values(input.scalar_type(), "input", [&]<class V>() {
    if (on_device(input)) return quantize_on_device<V>(input, format, key);
    at::Tensor const from = input.contiguous();
    auto const values = entries<const V>(from);
    at::Tensor codes =
        at::empty({static_cast<std::int64_t>(format.bytes(values.size(), sizeof(V)))}, at::kByte);
    sparsecomm::qsgd_quantize<V>(qsgd_kernels<V>(), format, values, key, entries<std::byte>(codes),
                                 *executor());
    return codes;
  });
}

void require_codes(at::Tensor const& codes, QsgdFormat format, std::int64_t size,
                   at::ScalarType dtype) {
  require(codes.scalar_type() == at::kByte, "codes are of ", at::toString(codes.scalar_type()),
          ", must be of uint8");
  auto const bytes = static_cast<std::int64_t>(
      format.bytes(static_cast<std::size_t>(size), c10::elementSize(dtype)));
  require(codes.numel() == bytes, size, " values of ", at::toString(dtype), " in ", format.bits,
          " bits, ", format.bucket, " to a bucket, take ", bytes, " bytes, not ", codes.numel());
}

at::Tensor qsgd_dequantize(at::Tensor const& codes, std::int64_t size, std::int64_t bits,
                           at::ScalarType dtype, std::int64_t bucket) {
  QsgdFormat const format = qsgd_format(bits, bucket);
  require_count(size, "size");
  return visit_values(dtype, "dtype", [&]<class V>() {
    require_codes(codes, format, size, dtype);
    at::Tensor const from = codes.contiguous();
    if (on_device(codes)) return dequantize_on_device<V>(from, size, format);
    at::Tensor values = at::empty({size}, dtype);
    qsgd_decode<V>(qsgd_kernels<V>(), format, entries<const std::byte>(from), entries<V>(values),
                   *executor());
    return values;
  });
}

void qsgd_dequantize_add(at::Tensor const& dense, at::Tensor const& codes, std::int64_t bits,
                         std::int64_t bucket) {
  QsgdFormat const format = qsgd_format(bits, bucket);
  require_same_device(dense, codes, "codes");
  if (on_device(dense)) {
    // Decoded first: what is malformed leaves `dense` as it was.
    at::Tensor const values =
        qsgd_dequantize(codes, dense.numel(), bits, dense.scalar_type(), bucket);
    dense.add_(values.view(dense.sizes()));
    return;
  }
  visit_values(dense.scalar_type(), "dense", [&]<class V>() {
    require_codes(codes, format, dense.numel(), dense.scalar_type());
    require_apart(dense, codes, "dense and codes");
    at::Tensor const from = codes.contiguous();
    InPlace const target(dense, "dense");
    qsgd_add<V>(qsgd_kernels<V>(), format, entries<const std::byte>(from),
                entries<V>(target.contiguous()), *executor());
    target.store();
  });
}

// ---- sparse vectors

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
at::Tensor checked_values(at::Tensor const& indices, at::Tensor const& values, char const* name) {
  require_type<V>(values, name);
  require_same_device(indices, values, name);
  require(values.dim() == 1, "values must be vectors, not of shape ", values.sizes());
  return values.contiguous();
}

template <class V>
Pair sum_on_device(at::TensorList indices, at::TensorList values, std::int64_t size) {
  DeviceCall const call(indices[0]);
  cuda::UnionKernels const& kernels = call.library().unions;
  auto const extent = static_cast<std::size_t>(size);
  at::Tensor const workspace = call.workspace(kernels.workspace(extent));
  kernels.clear(extent, workspace.data_ptr(), call.stream());
  std::vector<at::Tensor> own_indices, own_values;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    own_indices.push_back(indices[i].contiguous());
    own_values.push_back(checked_values<V>(indices[i], values[i], "a vector's values"));
    auto const own = checked_positions(own_indices[i], own_values[i].numel(), size);
    at::Tensor const invalid = call.zeroed<std::uint32_t>();
    kernels.mark(own.data(), own.size(), extent, workspace.data_ptr(),
                 entries<std::uint32_t>(invalid).data(), call.stream());
    if (call.template read<std::uint32_t>(invalid) != 0) refuse_order(concat("vector ", i));
  }
  at::Tensor const count = call.zeroed<std::uint64_t>();
  kernels.number(extent, workspace.data_ptr(), entries<std::uint64_t>(count).data(), call.stream());
  auto const total = static_cast<std::int64_t>(call.template read<std::uint64_t>(count));
  Pair const sum{call.empty(total, at::kInt), call.empty(total, scalar_type<V>).fill_(-0.0)};
  kernels.list(extent, workspace.data_ptr(), entries<std::uint32_t>(std::get<0>(sum)).data(),
               call.stream());
  for (std::size_t i = 0; i < indices.size(); ++i) {
    auto const own = positions(own_indices[i]);
    kernels.template add<V>()(own.data(), entries<const V>(own_values[i]).data(), own.size(),
                              extent, workspace.data_ptr(), entries<V>(std::get<1>(sum)).data(),
                              call.stream());
  }
  return sum;
}

template <class V>
Pair sum_of(at::TensorList indices, at::TensorList values, std::int64_t size) {
  if (on_device(indices[0])) return sum_on_device<V>(indices, values, size);
  SparseSum<V> sum;
  sum.reset(0, static_cast<std::uint64_t>(size));
  std::vector<at::Tensor> kept;  // what the sum reads
  for (std::size_t i = 0; i < indices.size(); ++i) {
    at::Tensor const own_indices = indices[i].contiguous();
    at::Tensor const own_values = checked_values<V>(own_indices, values[i], "a vector's values");
    kept.insert(kept.end(), {own_indices, own_values});
    sum.add({checked_vector(own_indices, own_values.numel(), size, concat("vector ", i)),
             entries<const V>(own_values)});
  }
  auto const total = sum.sum();
  return copy_packed<V>(total.indices, total.values);
}

Pair sparse_sum(at::TensorList indices, at::TensorList values, std::int64_t size) {
  require(!indices.empty() && indices.size() == values.size(), indices.size(), " indices and ",
          values.size(), " values: give as many of both, and at least one");
  require_size(size);
  for (at::Tensor const& vector : indices) require_same_device(indices[0], vector, "a vector");
  return visit_sparse_values(values[0],
                             [&]<class V>() { return sum_of<V>(indices, values, size); });
}

// By a binary search for each entry.
Triple intersection_on_device(at::Tensor const& indices, at::Tensor const& values,
                              at::Tensor const& other_indices,
                              std::optional<at::Tensor> const& other_values) {
  std::int64_t const others = other_indices.numel();
  at::Tensor const place = at::searchsorted(other_indices, indices);
  at::Tensor const within = (place < others).nonzero().squeeze(1);
  at::Tensor const found = place.index_select(0, within);
  at::Tensor const equal = (other_indices.index_select(0, found) == indices.index_select(0, within))
                               .nonzero()
                               .squeeze(1);
  at::Tensor const shared = within.index_select(0, equal);
  return {indices.index_select(0, shared), values.index_select(0, shared),
          other_values ? other_values->index_select(0, found.index_select(0, equal))
                       : at::empty({0}, values.options())};
}

Triple sparse_intersection(at::Tensor const& indices, at::Tensor const& values,
                           at::Tensor const& other_indices,
                           std::optional<at::Tensor> const& other_values, std::int64_t size) {
  require_size(size);
  return visit_sparse_values(values, [&]<class V>() -> Triple {
    at::Tensor const one_indices = indices.contiguous();
    at::Tensor const one_values = checked_values<V>(indices, values, "values");
    at::Tensor const two_indices = other_indices.contiguous();
    require_same_device(indices, other_indices, "the other");
    std::optional<at::Tensor> two_values;
    if (other_values) {
      two_values = checked_values<V>(other_indices, *other_values, "the other's values");
    }
    auto const one = checked_vector(one_indices, one_values.numel(), size, "vector");
    auto const two = checked_vector(
        two_indices, two_values ? two_values->numel() : two_indices.numel(), size, "the other");
    if (on_device(indices)) {
      return intersection_on_device(one_indices, one_values, two_indices, two_values);
    }
    SparseView<V> const vector{one, entries<const V>(one_values)};
    SparseIntersection<V> intersection;
    if (!two_values) {
      auto const shared = intersection.run(vector, two);
      return std::tuple_cat(copy_packed<V>(shared.indices, shared.values),
                            std::tuple(at::empty({0}, values.options())));
    }
    auto const shared = intersection.run(vector, {two, entries<const V>(*two_values)});
    at::Tensor of_other =
        at::empty({static_cast<std::int64_t>(shared.other.size())}, scalar_type<V>);
    std::ranges::copy(shared.other, entries<V>(of_other).begin());
    return std::tuple_cat(copy_packed<V>(shared.indices, shared.one), std::tuple(of_other));
  });
}

void scatter_op(at::Tensor const& dense, at::Tensor const& indices, at::Tensor const& values,
                double divisor) {
  visit_gradient(dense, "dense", [&]<class T>() {
    using V = accumulate_t<T>;
    require_int32_indices(dense.numel(), "dense");
    require_type<V>(values, "values");
    require_same_device(dense, indices, "indices");
    require_same_device(dense, values, "values");
    at::Tensor const from_indices = indices.contiguous();
    at::Tensor const from_values = values.contiguous();
    auto const to = checked_positions(from_indices, values.numel(), dense.numel());
    InPlace const target(dense, "dense");
    require_apart(dense, values, "dense and values");
    auto const out = entries<T>(target.contiguous());
    auto const from = entries<const V>(from_values);
    if (on_device(dense)) {
      DeviceCall const call(dense);
      at::Tensor const outside = call.zeroed<std::uint32_t>();
      call.library().template kernels<T>().scatter(
          out.data(), out.size(), to.data(), from.data(), to.size(), static_cast<V>(divisor), 0,
          entries<std::uint32_t>(outside).data(), call.stream());
    } else {
      scatter<T>(out, to, from, static_cast<V>(divisor), 0);
    }
    target.store();
  });
}

void implement_packed(torch::Library& library) {
  library.impl("qsgd_quantize", TORCH_FN(Operator<&qsgd_quantize>::call));
  library.impl("qsgd_dequantize", TORCH_FN(Operator<&qsgd_dequantize>::call));
  library.impl("qsgd_dequantize_add", TORCH_FN(Operator<&qsgd_dequantize_add>::call));
  library.impl("sparse_sum", TORCH_FN(Operator<&sparse_sum>::call));
  library.impl("sparse_intersection", TORCH_FN(Operator<&sparse_intersection>::call));
  library.impl("scatter", TORCH_FN(Operator<&scatter_op>::call));
}

}  // namespace

TORCH_LIBRARY_IMPL(sparsecomm, CPU, library) { implement_packed(library); }
TORCH_LIBRARY_IMPL(sparsecomm, CUDA, library) { implement_packed(library); }

}  // namespace sparsecomm::ops
