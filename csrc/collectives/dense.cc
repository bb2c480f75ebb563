// Reduce-scatter by pairwise exchange, then a Bruck allgather; in chunks for dense_overlap.
//
// 1. A chunk (for `dense` the whole vector) is split into P even parts, one for each rank. A rank
//    sends to each other rank its values of that rank's part, in rotated order.
// 2. It adds what arrives for its own part, in the same order and in accumulate_t<T>, then divides
//    and rounds once, so that all ranks get one owner's bits.
// 3. dense_overlap starts step 1 of the next chunk.
// 4. A Bruck allgather of the finished parts completes the chunk on every rank.
//
// P-1 + ceil(log2 P) messages and 2N(P-1)/P elements per chunk. Sources: Chan, Heimlich,
// Purkayastha and van de Geijn 2007; for dense_overlap, Ok-Topk Table 1 (DenseOvlp).
#include <algorithm>
#include <array>
#include <cmath>

#include "collectives/dense_frames.h"
#include "collectives/entries.h"
#include "collectives/frame_allgather.h"
#include "collectives/patterns.h"
#include "collectives/rotated_exchange.h"

namespace sparsecomm {
namespace {

// In chunks of at most `chunk` elements. Of a chunk rank r owns the r-th part.
template <class T>
class Pairwise : public DenseAllreduce<T> {
 public:
  using V = accumulate_t<T>;

  Pairwise(std::uint64_t chunk, int window) : chunk_(chunk), window_(window) {}

  void run(Channel& channel, std::span<const T> data, Reduction reduction, V divisor) override {
    std::uint64_t const chunks = std::max<std::uint64_t>(1, (data.size() + chunk_ - 1) / chunk_);
    auto const first = [&](std::uint64_t chunk) { return even_split(data.size(), chunks, chunk); };
    auto const part_of = [&](std::uint64_t chunk) {
      return Chunk{first(chunk), data.subspan(first(chunk), first(chunk + 1) - first(chunk))};
    };
    // One chunk stays in the frames of its parts.
    result_ = chunks == 1 ? std::span<T>() : gathered_.take(data.size());
    start(channel, part_of(0), stages_[0]);
    for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
      Stage& stage = stages_[chunk % 2];
      reduce(channel, part_of(chunk), reduction, divisor, stage);
      if (chunk + 1 < chunks) start(channel, part_of(chunk + 1), stages_[(chunk + 1) % 2]);
      gather(channel, part_of(chunk));
      if (chunks > 1) copy_parts(result_.subspan(first(chunk), first(chunk + 1) - first(chunk)));
    }
  }

  void write(std::span<T> out) override {
    if (result_.empty()) return copy_parts(out);
    std::ranges::copy(result_, out.begin());
  }

 private:
  struct Chunk {
    std::uint64_t first;
    std::span<const T> data;

    std::uint64_t begin(int part, int size) const { return even_split(data.size(), size, part); }
    std::span<const T> region(int part, int size) const {
      return data.subspan(begin(part, size), begin(part + 1, size) - begin(part, size));
    }
    std::uint64_t first_of(int part, int size) const { return first + begin(part, size); }
    // The first part is the largest.
    std::size_t max_frame(int size) const { return DenseFrames<T>::bytes(region(0, size).size()); }
  };
  struct Stage {
    ByteBuffer send, receive;
    RotatedExchange exchange;
  };

  static auto encoder(Channel& channel, Chunk const& chunk) {
    return [&channel, &chunk, size = channel.size()](int owner, std::span<std::byte> room) {
      return DenseFrames<T>::encode_as_is(channel, chunk.first_of(owner, size),
                                          chunk.region(owner, size), room);
    };
  }

  void start(Channel& channel, Chunk const& chunk, Stage& stage) {
    int const peers = channel.size() - 1;
    std::size_t const frame = chunk.max_frame(channel.size());
    stage.exchange.start(channel,
                         {.outgoing = stage.send.take(frame * peers),
                          .incoming = stage.receive.take(frame * std::min(window_, peers)),
                          .max_frame = frame,
                          .sends = peers},
                         encoder(channel, chunk));
  }

  // Leaves this rank's part of the result as a frame in share_.
  void reduce(Channel& channel, Chunk const& chunk, Reduction reduction, V divisor, Stage& stage) {
    int const size = channel.size();
    auto const own = chunk.region(channel.rank(), size);
    std::uint64_t const first = chunk.first_of(channel.rank(), size);
    sum_.resize(own.size());
    DenseFrames<T>::widen(own, sum_);
    stage.exchange.finish(channel, encoder(channel, chunk),
                          [&](int source, FrameView const& frame) {
                            frames_.reduce(channel, source, frame, first, sum_, reduction);
                          });
    finished_.resize(own.size());
    DenseFrames<T>::finish(sum_, divisor, finished_);
    share_ =
        DenseFrames<T>::encode_as_is(channel, first, finished_, own_.take(chunk.max_frame(size)));
  }

  // Leaves the finished parts as valid frames in parts_.
  void gather(Channel& channel, Chunk const& chunk) {
    int const size = channel.size();
    parts_ = gather_.run(channel, Phase::gather, share_, chunk.max_frame(size));
    for (int part = 0; part < size; ++part) {
      // parse_frame has vouched for the payload; a region of another place or size is caught before
      // any write.
      channel.decode_from(part, [&] {
        FrameHeader const& header = parts_[part].header;
        require<MalformedFrame>(header.kind == FrameKind::dense && header.dtype == dtype_of<T>() &&
                                    header.first_index == chunk.first_of(part, size) &&
                                    header.count == chunk.region(part, size).size(),
                                "kind ", int(header.kind), ", dtype ", name(header.dtype),
                                ", first_index ", header.first_index, ", count ", header.count,
                                " are not region ", part, " of ", chunk.data.size(),
                                " elements of ", name(dtype_of<T>()));
      });
    }
  }

  void copy_parts(std::span<T> out) const {
    for (FrameView const& part : parts_) {
      std::uint32_t const count = part.header.count;
      decode_dense<T>(part, part.header.first_index, out.first(count));
      out = out.subspan(count);
    }
  }

  std::uint64_t chunk_;
  int window_;
  std::array<Stage, 2> stages_;  // of two chunks under way
  ByteBuffer own_;
  std::span<const std::byte> share_;
  std::vector<V> sum_;
  std::vector<T> finished_;
  std::span<const FrameView> parts_;
  Buffer<T> gathered_;
  std::span<T> result_;  // of several chunks
  DenseFrames<T> frames_;
  FrameAllgather gather_;
};

template <class T>
class WholePairwise final : public Pairwise<T> {
 public:
  // Two receives: the next part arrives while one is summed.
  explicit WholePairwise(AlgorithmOptions const&) : Pairwise<T>(std::uint64_t{1} << 32, 2) {}
};

template <class T>
class ChunkedPairwise final : public Pairwise<T> {
 public:
  explicit ChunkedPairwise(AlgorithmOptions const& options)
      : Pairwise<T>(options.overlap_chunk, options.window) {}
};

std::uint64_t largest_region(std::uint64_t extent, int ranks) {
  return (extent + ranks - 1) / ranks;
}

Cost chunked_cost(CostShape const& shape, double chunks) {
  double const peers = shape.ranks - 1;
  auto const extent = static_cast<double>(shape.extent);
  // A chunk's parts differ by one element at most.
  double const region = std::ceil(std::ceil(extent / chunks) / shape.ranks);
  double const frame = header_bytes + region * shape.value_bytes;
  Cost cost = allgather_cost(shape.ranks, frame);
  cost.rounds = cost.rounds * chunks + 1;
  cost.messages = (cost.messages + peers) * chunks;
  cost.bytes = (cost.bytes + peers * frame) * chunks;
  cost.dense_entries = 2 * extent;
  cost.exact = region * shape.ranks * chunks == extent;
  return cost;
}

constexpr DenseMakers whole_makers = MakeDenseOf<WholePairwise>::makers(largest_region, true);
constexpr DenseMakers overlap_makers = MakeDenseOf<ChunkedPairwise>::makers(largest_region, true);

Cost whole_cost(CostShape const& shape, AlgorithmOptions const&) { return chunked_cost(shape, 1); }

Cost overlap_cost(CostShape const& shape, AlgorithmOptions const& options) {
  auto const chunk = static_cast<double>(options.overlap_chunk);
  return chunked_cost(shape, std::max(1.0, std::ceil(static_cast<double>(shape.extent) / chunk)));
}

}  // namespace

AlgorithmEntry const dense = {
    .name = "dense",
    .description = "every element, reduce-scatter then allgather",
    .words = "2N(P-1)/P",
    .source = "Chan et al. 2007",
    .cost = whole_cost,
    .dense = &whole_makers,
};

AlgorithmEntry const dense_overlap = {
    .name = "dense_overlap",
    .description = "every element, a chunk reduced while the previous one is gathered",
    .words = "2N(P-1)/P",
    .source = "Ok-Topk Table 1",
    .cost = overlap_cost,
    .dense = &overlap_makers,
};

}  // namespace sparsecomm
