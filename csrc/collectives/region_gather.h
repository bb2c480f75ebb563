// The second half: every rank's reduced region, in either form, becomes the result on all ranks.
#pragma once

#include <span>
#include <vector>

#include "collectives/frame_allgather.h"
#include "collectives/stream_codec.h"

namespace sparsecomm {

template <class V>
class RegionGather {
 public:
  explicit RegionGather(AlgorithmOptions const& options) : options_(options), codec_(options) {}

  // Regions in which at most `most` entries came together each; own is regions[rank], reduced.
  // log P messages. The result is dense where its entries exceed delta, those of a dense region
  // being all. Valid until the next call.
  StreamView<V> run(Channel& channel, StreamView<V> const& own, std::span<const Region> regions,
                    SparseProblem const& problem, std::uint64_t most,
                    ValueCodec dense_codec = ValueCodec::raw);
  // The same of frames that have arrived by another way: frames[r] is that of regions[r], which
  // rank r has reduced. All ranks decode the same frames, their own too, and so get the same bits.
  StreamView<V> assemble(Channel& channel, std::span<const FrameView> frames,
                         std::span<const Region> regions, SparseProblem const& problem,
                         std::uint64_t most);

 private:
  AlgorithmOptions options_;
  StreamCodec<V> codec_;
  ByteBuffer send_;
  FrameAllgather gather_;
  std::vector<std::uint32_t> indices_;
  std::vector<V> values_, dense_values_;
};

// With even regions, of a reduction of `entries` entries; a bound has them all in others' regions.
Cost region_gather_cost(CostShape const& shape, AlgorithmOptions const& options, double entries);

// Both halves.
Cost split_allgather_cost(CostShape const& shape, AlgorithmOptions const& options, double entries);

}  // namespace sparsecomm
