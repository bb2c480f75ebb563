// The wire codecs on CPU tensors, one call each: what `sparsecomm bench codecs` measures and tests
// call.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "bindings.h"
#include "tensor_span.h"
#include "wire/codecs.h"
#include "wire/frame.h"
#include "wire/index_kernels.h"
#include "wire/sorted.h"

namespace py = pybind11;

namespace sparsecomm {
namespace {

std::span<std::uint32_t> indices_of(at::Tensor const& tensor) {
  return span_of<std::uint32_t>(tensor, at::kUInt32, "indices");
}

std::span<std::byte> bytes_of(at::Tensor const& tensor) {
  return span_of<std::byte>(tensor, at::kByte, "bytes");
}

// Calls f with the values as a span of float or double.
template <class F>
auto with_values(at::Tensor const& values, F&& f) {
  if (values.scalar_type() == at::kDouble) return f(span_of<double>(values, at::kDouble, "values"));
  return f(span_of<float>(values, at::kFloat, "values"));
}

IndexCodecEntry const& index_codec(std::string const& name) {
  IndexCodecEntry const* const entry = find_index_codec(IndexCodec(index_codec_named(name)));
  require(entry != nullptr, "index codec '", name, "' is a choice among codecs; name one");
  return *entry;
}

ValueCodecEntry const& value_codec(std::string const& name) {
  return *find_value_codec(value_codec_named(name));
}

// Nothing where `out` is too short.
std::optional<std::size_t> encode_indices(std::string const& codec, at::Tensor const& indices,
                                          std::uint32_t first_index, std::uint32_t extent,
                                          at::Tensor const& out) {
  auto const positions = indices_of(indices);
  require(strictly_increasing(positions) &&
              (positions.empty() || (positions.front() >= first_index &&
                                     positions.back() < std::uint64_t{first_index} + extent)),
          "indices must be strictly increasing positions of [", first_index, ", first_index + ",
          extent, ")");
  std::size_t const bytes =
      index_codec(codec).encode(index_kernels(), positions, first_index, extent, bytes_of(out));
  return bytes == does_not_fit ? std::nullopt : std::optional(bytes);
}

void decode_indices(std::string const& codec, at::Tensor const& in, std::uint32_t first_index,
                    std::uint32_t extent, at::Tensor const& indices) {
  index_codec(codec).decode(index_kernels(), bytes_of(in), first_index, extent,
                            indices_of(indices));
}

void round_tensor(std::string const& codec, at::Tensor const& values, std::uint64_t seed,
                  std::uint64_t operation, std::uint32_t stream) {
  with_values(values, [&]<class V>(std::span<V> span) {
    round_values<V>(value_codec_named(codec), span, {seed, operation, stream});
  });
}

std::size_t encode_values(std::string const& codec, at::Tensor const& values,
                          at::Tensor const& out) {
  return with_values(values, [&]<class V>(std::span<V> span) {
    ValueCodecEntry const& entry = value_codec(codec);
    std::size_t const bytes = entry.encoded_bytes(span.size(), sizeof(V));
    auto const room = bytes_of(out);
    require(bytes <= room.size(), "codec ", codec, " takes ", bytes, " bytes, out has ",
            room.size());
    functions<V>(entry).encode(span, room.first(bytes));
    return bytes;
  });
}

void decode_values(std::string const& codec, at::Tensor const& in, at::Tensor const& values) {
  with_values(values, [&]<class V>(std::span<V> span) {
    ValueCodecEntry const& entry = value_codec(codec);
    std::size_t const bytes = entry.encoded_bytes(span.size(), sizeof(V));
    auto const from = bytes_of(in);
    require(bytes == from.size(), "codec ", codec, " takes ", bytes, " bytes, in has ",
            from.size());
    functions<V>(entry).decode(from, span);
  });
}

std::size_t encode_frame(at::Tensor const& indices, at::Tensor const& values, std::uint32_t extent,
                         std::string const& index_codec, std::string const& value_codec,
                         bool allow_dense, at::Tensor const& out) {
  FrameOptions const options{index_codec_named(index_codec), allow_dense,
                             value_codec_named(value_codec)};
  return with_values(values, [&]<class V>(std::span<V> span) {
    return encode_sparse<V>(0, 0, extent, indices_of(indices), span, options, bytes_of(out));
  });
}

// Decodes a frame of f32 into vectors of its own, which it reuses, and returns how many entries
// there are.
class FrameDecoder {
 public:
  std::size_t decode(at::Tensor const& frame, std::uint32_t extent) {
    indices_.clear();
    values_.clear();
    decode_sparse<float>(parse_frame(bytes_of(frame), 0), 0, extent, indices_, values_);
    return indices_.size();
  }

 private:
  std::vector<std::uint32_t> indices_;
  std::vector<float> values_;
};

}  // namespace

void bind_codecs(py::module_& module) {
  module.def("encode_indices", &encode_indices, py::arg("codec"), py::arg("indices"),
             py::arg("first_index"), py::arg("extent"), py::arg("out"));
  module.def("decode_indices", &decode_indices, py::arg("codec"), py::arg("encoded"),
             py::arg("first_index"), py::arg("extent"), py::arg("indices"));
  module.def("round_values", &round_tensor, py::arg("codec"), py::arg("values"), py::arg("seed"),
             py::arg("operation"), py::arg("stream"));
  module.def("encode_values", &encode_values, py::arg("codec"), py::arg("values"), py::arg("out"));
  module.def("decode_values", &decode_values, py::arg("codec"), py::arg("encoded"),
             py::arg("values"));
  module.def("encode_frame", &encode_frame, py::arg("indices"), py::arg("values"),
             py::arg("extent"), py::arg("index_codec"), py::arg("value_codec"),
             py::arg("allow_dense"), py::arg("out"));
  py::class_<FrameDecoder>(module, "FrameDecoder")
      .def(py::init<>())
      .def("decode", &FrameDecoder::decode, py::arg("frame"), py::arg("extent"));
}

}  // namespace sparsecomm
