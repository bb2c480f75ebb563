// Reduce-scatter and allgather of sparse regions around a ring.
//
// 1. The positions are split into P even regions. Each rank sends its entries of the region of the
//    rank before it to the rank after it.
// 2. P - 1 times, a rank receives the partial sum of a region from the rank before it, adds its own
//    entries and, but for the last, which is its own region in full, sends the sum on.
// 3. P - 1 times, a rank passes on the frame of a finished region as it came, its own first.
//
// 2(P-1) messages that wait for one another, all between neighbours. The partial sums grow with
// fill-in: 4k(P-1)/P words if the ranks share their positions, 3k(P-1) if they share none and
// spread them evenly. Sources: SparCML section 8.1, Patarasuk and Yuan 2009.
#include <algorithm>
#include <cmath>

#include "collectives/entries.h"
#include "collectives/region_gather.h"

namespace sparsecomm {
namespace {

template <class V>
class SparseRing final : public SparseAllreduce<V> {
 public:
  explicit SparseRing(AlgorithmOptions const& options) : codec_(options), gather_(options) {}

  AllreduceResult<V> run(Channel& channel, SparseView<V> contribution,
                         SparseProblem const& problem) override {
    int const size = channel.size();
    codec_.begin(problem);
    auto const regions = even_regions(problem.extent, size, regions_);
    std::uint64_t const most = codec_.most(size);
    std::size_t const capacity = codec_.max_bytes(regions, most);
    scatter(channel, contribution, capacity);
    frames_.resize(size);
    pass_on(channel, capacity);
    return {.reduced = gather_.assemble(channel, frames_, regions, problem, most), .rejected = {}};
  }

 private:
  static int next(Channel const& channel) { return (channel.rank() + 1) % channel.size(); }
  static int previous(Channel const& channel) {
    return (channel.rank() + channel.size() - 1) % channel.size();
  }

  // Steps 1 and 2. In round s the sum of the s ranks before this one arrives, of region
  // rank - 1 - s, so that the last is this rank's own region in full.
  void scatter(Channel& channel, SparseView<V> contribution, std::size_t capacity) {
    int const size = channel.size();
    auto const add_own = [&](int part) {
      Region const& region = regions_[part];
      sum_.add(contribution.range(region.first, region.last));
    };
    int part = previous(channel);
    codec_.reset(sum_, regions_[part]);
    add_own(part);
    for (int step = 1; step < size; ++step) {
      auto const incoming = receive_.take(capacity);
      Request receive = channel.irecv(previous(channel), Phase::reduce, incoming);
      auto const frame = codec_.encode(channel, regions_[part], sum_.view(), send_.take(capacity));
      Request send = channel.isend(next(channel), Phase::reduce, frame);
      part = (part + size - 1) % size;
      FrameView const view = channel.wait_frame(receive, previous(channel), incoming);
      codec_.reset(sum_, regions_[part]);
      sum_.add_stream(
          codec_.decode(channel, previous(channel), view, regions_[part], codec_.most(step)));
      add_own(part);
      channel.wait(send);
    }
  }

  // Step 3. frames_[r] becomes rank r's region.
  void pass_on(Channel& channel, std::size_t capacity) {
    int const rank = channel.rank();
    int const size = channel.size();
    auto const blocks = gathered_.take(capacity * size);
    auto const block = [&](int part) { return blocks.subspan(part * capacity, capacity); };
    auto outgoing = codec_.encode(channel, regions_[rank], sum_.view(), block(rank));
    frames_[rank] = parse_frame(outgoing, channel.stamp());
    for (int step = 1; step < size; ++step) {
      int const part = (rank - step + size) % size;
      Request receive = channel.irecv(previous(channel), Phase::gather, block(part));
      Request send = channel.isend(next(channel), Phase::gather, outgoing);
      frames_[part] = channel.wait_frame(receive, previous(channel), block(part));
      channel.wait(send);
      outgoing = block(part).first(frames_[part].size());
    }
  }

  StreamCodec<V> codec_;
  RegionGather<V> gather_;
  SparseStream<V> sum_;
  ByteBuffer send_, receive_, gathered_;
  std::vector<Region> regions_;
  std::vector<FrameView> frames_;
};

Cost sparse_ring_cost(CostShape const& shape, AlgorithmOptions const& options) {
  if (shape.ranks == 1) return {.exact = true};
  double const peers = shape.ranks - 1;
  auto const k = static_cast<double>(shape.k);
  auto const extent = static_cast<double>(shape.extent);
  double const region = std::ceil(extent / shape.ranks);
  Cost cost = region_gather_cost(shape, options, joined_entries(shape, options, shape.ranks, 1));
  cost.rounds = cost.messages = 2 * peers;
  cost.bytes += peers * header_bytes;
  for (int held = 1; held < shape.ranks; ++held) {
    double const part =
        shape.predicts() ? joined_entries(shape, options, held, 1) / shape.ranks : held * k;
    cost.bytes += stream_bytes(shape, options, part, region);
    cost.entries += (2 * shape.merged(held) + shape.merged(held + 1)) / shape.ranks;
  }
  if (!shape.predicts()) {
    // All entries in one region: a rank may receive it nearly complete, and then complete.
    double const headers = 2 * peers * header_bytes;
    cost.bytes =
        std::min(cost.bytes, headers + stream_bytes(shape, options, 2 * peers * k, HUGE_VAL));
  }
  return cost;
}

}  // namespace

AlgorithmEntry const sparse_ring = {
    .name = "sparse_ring",
    .description = "sparse reduce-scatter and allgather around a ring",
    .words = "4k(P-1)/P to 3k(P-1)",
    .source = "SparCML section 8.1",
    .sparse = true,
    .cost = sparse_ring_cost,
    .make = MakeSparseOf<SparseRing>::all,
};

}  // namespace sparsecomm
