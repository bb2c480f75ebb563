#include "collectives/stream_codec.h"

#include <algorithm>
#include <limits>

namespace sparsecomm {
namespace {

std::uint32_t first_of(Region const& region) { return static_cast<std::uint32_t>(region.first); }
std::uint32_t extent_of(Region const& region) {
  return static_cast<std::uint32_t>(region.extent());
}

}  // namespace

template <class V>
StreamCodec<V>::StreamCodec(AlgorithmOptions const& options) : options_(options) {
  require(options.frame.value_codec == ValueCodec::raw, "value codec ",
          value_codec_for(options.frame.value_codec, DType::f32).name,
          " rounds, but partial results travel as they are; use raw, or dense_codec where the "
          "result is dense");
  options_.frame.allow_dense = false;  // the form is the stream's choice
}

template <class V>
void StreamCodec<V>::reset(SparseStream<V>& stream, Region const& region) const {
  stream.reset(first_of(region), region.extent(), sparse_limit<V>(options_, region.extent()),
               problem_.reduction);
}

template <class V>
std::size_t StreamCodec<V>::max_bytes(Region const& region, std::uint64_t most) const {
  std::uint64_t const limit = sparse_limit<V>(options_, region.extent());
  std::size_t const pairs = max_sparse_frame_bytes<V>(std::min(most, limit), region.extent());
  std::size_t const dense = most > limit ? max_dense_frame_bytes<V>(region.extent()) : 0;
  std::size_t const bytes = std::max(pairs, dense);
  require(bytes <= std::numeric_limits<std::uint32_t>::max(), "a message of up to ", most,
          " entries of ", region.extent(), " may take ", bytes,
          " bytes, more than a frame's 2^32 - 1; reduce less at a time");
  return bytes;
}

template <class V>
std::size_t StreamCodec<V>::max_bytes(std::span<const Region> regions, std::uint64_t most) const {
  std::size_t bytes = 0;
  for (Region const& region : regions) bytes = std::max(bytes, max_bytes(region, most));
  return bytes;
}

template <class V>
std::span<const std::byte> StreamCodec<V>::encode(Channel const& channel, Region const& region,
                                                  StreamView<V> const& view,
                                                  std::span<std::byte> out,
                                                  ValueCodec dense_codec) {
  if (!view.is_dense && view.nnz() <= sparse_limit<V>(options_, region.extent())) {
    return out.first(encode_sparse<V>(channel.stamp(), first_of(region), extent_of(region),
                                      view.sparse.indices, view.sparse.values, options_.frame,
                                      out));
  }
  std::span<const V> values = view.dense;
  if (!view.is_dense) {
    reset(expanded_, region);
    expanded_.add(view.sparse);
    values = expanded_.dense();
  }
  return out.first(encode_dense<V>(channel.stamp(), first_of(region), values, out, dense_codec));
}

template <class V>
void StreamCodec<V>::check(FrameView const& frame, Region const& region, std::uint64_t most) const {
  if (frame.header.kind != FrameKind::dense) {
    require<MalformedFrame>(frame.header.count <= most, "frame: count is ", frame.header.count,
                            ", must be at most ", most);
    return;
  }
  std::uint64_t const limit = sparse_limit<V>(options_, region.extent());
  require<MalformedFrame>(most > limit, "frame: kind is 2 (dense), must be 1 (sparse) for at most ",
                          most, " entries, which do not exceed ", limit);
}

template <class V>
StreamView<V> StreamCodec<V>::decode(Channel& channel, int peer, FrameView const& frame,
                                     Region const& region, std::uint64_t most) {
  if (frame.header.kind == FrameKind::dense) {
    values_.resize(region.extent());
    decode_dense(channel, peer, frame, region, most, values_);
    return {.dense = values_, .is_dense = true};
  }
  indices_.clear();
  values_.clear();
  append_pairs(channel, peer, frame, region, most, indices_, values_);
  return {.sparse = {indices_, values_}};
}

template <class V>
void StreamCodec<V>::decode_dense(Channel& channel, int peer, FrameView const& frame,
                                  Region const& region, std::uint64_t most, std::span<V> out) {
  if (frame.header.kind == FrameKind::dense) {
    channel.decode_from(peer, [&] {
      check(frame, region, most);
      sparsecomm::decode_dense<V>(frame, first_of(region), out);
    });
    return;
  }
  StreamView<V> const view = decode(channel, peer, frame, region, most);
  std::ranges::fill(out, neutral<V>(problem_.reduction));
  for (std::size_t i = 0; i < view.nnz(); ++i) {
    out[view.sparse.indices[i] - region.first] = view.sparse.values[i];
  }
}

template <class V>
void StreamCodec<V>::append_pairs(Channel& channel, int peer, FrameView const& frame,
                                  Region const& region, std::uint64_t most,
                                  std::vector<std::uint32_t>& indices, std::vector<V>& values) {
  if (frame.header.kind != FrameKind::dense) {
    channel.decode_from(peer, [&] {
      check(frame, region, most);
      decode_sparse<V>(frame, first_of(region), extent_of(region), indices, values);
    });
    return;
  }
  StreamView<V> const view = decode(channel, peer, frame, region, most);
  reset(expanded_, region);
  expanded_.add_stream(view);
  SparseView<V> const pairs = expanded_.sparse();
  indices.insert(indices.end(), pairs.indices.begin(), pairs.indices.end());
  values.insert(values.end(), pairs.values.begin(), pairs.values.end());
}

template class StreamCodec<float>;
template class StreamCodec<double>;
template class StreamCodec<std::int32_t>;
template class StreamCodec<std::int64_t>;

double sparse_limit(CostShape const& shape, AlgorithmOptions const& options, double extent) {
  return extent * (options.delta > 0 ? options.delta : shape.value_bytes / (4 + shape.value_bytes));
}

double joined_entries(CostShape const& shape, AlgorithmOptions const& options, int ranks,
                      int added) {
  auto const extent = static_cast<double>(shape.extent);
  bool const dense = shape.predicts() && shape.merged(ranks - added) + shape.merged(added) >
                                             sparse_limit(shape, options, extent);
  return dense ? extent : shape.merged(ranks);
}

// A stream turns dense when more than `limit` entries came together, so no entry costs more than
// dense / limit bytes or a pair's.
double stream_bytes(CostShape const& shape, AlgorithmOptions const& options, double entries,
                    double extent) {
  if (shape.predicts()) {
    bool const dense = entries > sparse_limit(shape, options, extent);
    return dense ? extent * shape.value_bytes : entries * shape.pair_bytes(entries, extent);
  }
  double const pair = shape.pair_bytes();
  double const density = sparse_limit(shape, options, 1);
  return std::min(entries * std::max(pair, shape.value_bytes / density),
                  extent * std::max(pair * density, shape.value_bytes));
}

}  // namespace sparsecomm
