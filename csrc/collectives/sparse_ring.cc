#include "collectives/sparse_ring.h"

#include <algorithm>
#include <cmath>

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

  // In step s a rank receives the sum of the s ranks before it of region rank - 1 - s, so that it
  // ends with its own region in full.
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

  // frames_[r] becomes rank r's region; each is passed on as it came.
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

}  // namespace

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_sparse_ring(AlgorithmOptions const& options) {
  return std::make_unique<SparseRing<V>>(options);
}
template std::unique_ptr<SparseAllreduce<float>> make_sparse_ring(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<double>> make_sparse_ring(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<std::int32_t>> make_sparse_ring(AlgorithmOptions const&);
template std::unique_ptr<SparseAllreduce<std::int64_t>> make_sparse_ring(AlgorithmOptions const&);

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

}  // namespace sparsecomm
