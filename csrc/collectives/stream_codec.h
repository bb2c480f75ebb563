// Frames of streams in either form: what algorithms that pass on partial reductions send.
#pragma once

#include <span>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/patterns.h"

namespace sparsecomm {

// The form of a frame is the stream's own: a rank that keeps what it sends holds the bits that its
// peers receive.
template <class V>
class StreamCodec {
 public:
  explicit StreamCodec(AlgorithmOptions const& options);

  // Of the calls that follow.
  void begin(SparseProblem const& problem) { problem_ = problem; }

  // Empties a stream for the reductions of a region.
  void reset(SparseStream<V>& stream, Region const& region) const;
  // The most entries that come together in a region when `count` contributions are reduced.
  std::uint64_t most(int count) const { return problem_.limit * static_cast<std::uint64_t>(count); }
  // An upper bound, in bytes, for the frame of a stream in which at most `most` entries came
  // together. Throws InvalidArgument where its payload might exceed a frame's 2^32 - 1 bytes.
  std::size_t max_bytes(Region const& region, std::uint64_t most) const;
  // The same for any of several regions.
  std::size_t max_bytes(std::span<const Region> regions, std::uint64_t most) const;
  // Pairs beyond the region's delta are sent dense. A lossy codec is for dense views that
  // round_values() has rounded as one span.
  std::span<const std::byte> encode(Channel const& channel, Region const& region,
                                    StreamView<V> const& view, std::span<std::byte> out,
                                    ValueCodec dense_codec = ValueCodec::raw);

  // The decoders throw PeerInvalid unless the frame is one of this region in which at most `most`
  // entries came together: that many pairs at most, and dense only where they may exceed delta.
  // Valid until the next call.
  StreamView<V> decode(Channel& channel, int peer, FrameView const& frame, Region const& region,
                       std::uint64_t most);
  // As all values of the region, the neutral element where there is no entry.
  void decode_dense(Channel& channel, int peer, FrameView const& frame, Region const& region,
                    std::uint64_t most, std::span<V> out);
  // Appends pairs; neutral elements of a dense frame are dropped.
  void append_pairs(Channel& channel, int peer, FrameView const& frame, Region const& region,
                    std::uint64_t most, std::vector<std::uint32_t>& indices,
                    std::vector<V>& values);

 private:
  void check(FrameView const& frame, Region const& region, std::uint64_t most) const;

  AlgorithmOptions options_;
  SparseProblem problem_;
  SparseStream<V> expanded_;
  std::vector<std::uint32_t> indices_;
  std::vector<V> values_;
};

// The most entries of `extent` positions that travel as pairs.
double sparse_limit(CostShape const& shape, AlgorithmOptions const& options, double extent);
// Entries of a partial result in which `ranks` ranks' contributions come together, those of `added`
// of them last; all positions where it is predicted to turn dense.
double joined_entries(CostShape const& shape, AlgorithmOptions const& options, int ranks,
                      int added);
// The bytes of streams over `extent` positions, headers excluded, in which `entries` entries came
// together: as a prediction of one stream, or of several alike; as a bound for any streams.
double stream_bytes(CostShape const& shape, AlgorithmOptions const& options, double entries,
                    double extent);

}  // namespace sparsecomm
