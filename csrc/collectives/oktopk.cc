// Ok-Topk's O(k) sparse allreduce: u = TopK(sum of the ranks' selections). Source: Ok-Topk (Li and
// Hoefler 2022), Algorithm 1.
//
// 1. Regions, every tau steps and whenever the sizes of step 2 demand it: those that hold even
//    shares of all ranks' selections together, found from histograms of their positions
//    (collectives/regions.h).
// 2. Sizes: the largest selection, and the most that each rank has for any other, by a census
//    (collectives/figures.h). Where the regions no longer fit, so that a rank might receive more
//    than (2 - 3/P) times the largest selection in step 3, they are found anew. Up to three ranks
//    then gather all selections instead, and each sums them and takes the k largest for itself,
//    which ends the call.
// 3. Split and reduce: rank j receives everyone's part of region j, in rotated order, and sums it a
//    window of parts at a time while the next window arrives.
// 4. Global threshold: a census of the histograms of the sums' magnitudes names the bin that holds
//    the k-th largest; refined to a single bit pattern where the schedule says exact, the former
//    threshold where it says reused. Each rank then says how many it has above and in that bin,
//    which makes the sizes of all shares.
// 5. Shares are evened out where the largest exceeds balance_factor times the average, then
//    allgathered.
//
// Words received: at most 6k(P-1)/P whatever is selected where, plus frame headers, the sizes, the
// histograms and, where they are found, the regions: in step 3 (2 - 3/P) k pairs, or where the
// regions are new (for P > 3) k + k/6 + 2P, which is no more for k > 24P; in step 5 k pairs. k
// stands for the largest of k and the selections; where the schedule says reused the result may
// have more than k entries, and the words of step 5 are those. 2k(P-1)/P in step 5 alone is the
// least there can be (section 3.2): so it is where each rank selects in its own region only.
// Messages: P-1, at most 2P-1 in balancing, and ceil(log2 P) for each allgather and census.
// With P grow the headers of the split and of the last allgather, 2(P-1), and two words per rank in
// step 4; regions take O(P) words where they are found.
#include <algorithm>
#include <cmath>

#include "collectives/entries.h"
#include "collectives/frame_allgather.h"
#include "collectives/global_cut.h"
#include "collectives/pair_frames.h"
#include "collectives/pairs.h"
#include "collectives/patterns.h"
#include "collectives/regions.h"
#include "collectives/rotated_exchange.h"
#include "collectives/rounding.h"
#include "kernels/magnitude.h"
#include "sparse/intersection.h"
#include "sparse/sum.h"

namespace sparsecomm {
namespace {

template <class V>
class OkTopk final : public SparseAllreduce<V> {
 public:
  explicit OkTopk(AlgorithmOptions const& options)
      : options_(options), rounding_(options.frame.value_codec) {}

  AllreduceResult<V> run(Channel& channel, SparseView<V> selection,
                         SparseProblem const& problem) override {
    if (settle_regions(channel, selection.indices, problem)) {
      SparseView<V> const region =
          split_and_reduce(channel, round_parts(channel, selection, problem), problem);
      keep_top_k(channel, region, problem);
      if (needs_balance(cut_.kept(), options_.balance_factor)) balance(channel, problem);
      gather(channel, problem);
    } else {
      reduce_everywhere(channel, selection, problem);
    }
    state_.global_threshold = cut_.threshold();
    return {.reduced = {.sparse = result_.view()}, .rejected = reject(selection, problem)};
  }

  AlgorithmState state() const override { return state_; }
  void load_state(AlgorithmState const& state) override {
    state_ = state;
    cut_.load_threshold(state_.global_threshold);
  }

 private:
  bool settle_regions(Channel& channel, std::span<const std::uint32_t> indices,
                      SparseProblem const& problem);
  // The most that each rank has for any other, added up, and the least of these; the largest
  // selection.
  struct Sizes {
    std::uint64_t parts;
    std::uint32_t least_part, selection;
  };
  bool within_budget(Channel& channel, std::span<const std::uint32_t> indices,
                     SparseProblem const& problem);
  SparseView<V> round_parts(Channel& channel, SparseView<V> selection,
                            SparseProblem const& problem);
  SparseView<V> reject(SparseView<V> selection, SparseProblem const& problem);
  void reduce_everywhere(Channel& channel, SparseView<V> selection, SparseProblem const& problem);
  SparseView<V> split_and_reduce(Channel& channel, SparseView<V> selection,
                                 SparseProblem const& problem);
  void keep_top_k(Channel& channel, SparseView<V> region, SparseProblem const& problem);
  static void keep(SparseView<V> region, Cut const& cut, std::uint64_t count, Pairs<V>& out);
  void balance(Channel& channel, SparseProblem const& problem);
  void gather(Channel& channel, SparseProblem const& problem);

  ThresholdSource source(SparseProblem const& problem) const {
    return options_.schedule.global_at(problem.step, cut_.threshold() > 0);
  }
  // Region `part` is [first, last); the last one ends with the extent.
  std::uint32_t region_first(int part) const { return part == 0 ? 0 : state_.boundaries[part - 1]; }
  std::uint32_t region_last(int part, SparseProblem const& problem) const {
    return part < static_cast<int>(state_.boundaries.size())
               ? state_.boundaries[part]
               : static_cast<std::uint32_t>(problem.extent);
  }
  std::span<const std::byte> encode(Channel const& channel, std::uint32_t first, std::uint32_t last,
                                    SparseView<V> part, FrameOptions const& options,
                                    std::span<std::byte> out) const {
    return out.first(encode_sparse<V>(channel.stamp(), first, last - first, part.indices,
                                      part.values, options, out));
  }
  // Appends the pairs of a share, which come behind those of lower ranks.
  static void decode_share(Channel& channel, int peer, FrameView const& frame, std::uint32_t extent,
                           std::uint64_t most, Pairs<V>& out) {
    std::size_t const before = out.indices.size();
    decode_pairs(channel, peer, frame, 0, extent, most, out.indices, out.values);
    channel.decode_from(peer, [&] {
      require<MalformedFrame>(before == 0 || before == out.indices.size() ||
                                  out.indices[before - 1] < out.indices[before],
                              "its share overlaps that of a lower rank");
    });
  }

  AlgorithmOptions options_;
  Rounding<V> rounding_;
  std::vector<V> sent_, exact_share_;  // only with a lossy codec
  AlgorithmState state_;
  GlobalCut<V> cut_;
  SparseSum<V> sum_;
  SparseStream<V> rejected_;
  SparseIntersection<V> intersection_;
  Pairs<V> share_, balanced_, result_, errors_;
  ByteBuffer send_, receive_;
  FrameAllgather gather_;
  CensusAllreduce<Sizes> sizes_;
  RegionSearch search_;
  RotatedExchange exchange_;
  std::vector<Request> sends_, receives_;  // of balance()
};

// False where no regions would do: then every rank takes all selections, which three ranks or fewer
// can afford.
template <class V>
bool OkTopk<V>::settle_regions(Channel& channel, std::span<const std::uint32_t> indices,
                               SparseProblem const& problem) {
  int const size = channel.size();
  if (size == 1) return true;
  std::size_t const boundaries = size - 1;
  bool const outdated =
      state_.boundaries.size() != boundaries || problem.step % options_.partition_period == 0;
  auto const search = [&] {
    state_.boundaries.resize(boundaries);
    search_.run(channel, indices, problem.extent, state_.boundaries);
  };
  if (outdated) search();
  if (size <= 3) return within_budget(channel, indices, problem);
  if (!outdated && !within_budget(channel, indices, problem)) search();
  return true;
}

// Whether no rank can receive more than (2 - 3/P) times the largest selection in split and reduce,
// judged by the most that each rank has for any other.
template <class V>
bool OkTopk<V>::within_budget(Channel& channel, std::span<const std::uint32_t> indices,
                              SparseProblem const& problem) {
  int const size = channel.size();
  std::uint32_t largest_part = 0;
  auto begin = indices.begin();
  for (int part = 0; part < size; ++part) {
    auto const end = std::lower_bound(begin, indices.end(), region_last(part, problem));
    if (part != channel.rank()) {
      largest_part = std::max(largest_part, static_cast<std::uint32_t>(end - begin));
    }
    begin = end;
  }
  Sizes sizes{largest_part, largest_part, static_cast<std::uint32_t>(indices.size())};
  sizes_.run(
      channel, Phase::partition, std::span(&sizes, 1),
      [](Sizes const& a, Sizes const& b) {
        return Sizes{a.parts + b.parts, std::min(a.least_part, b.least_part),
                     std::max(a.selection, b.selection)};
      },
      [&](std::span<const Sizes> arrived, int ranks) {
        Sizes const& of = arrived.front();
        auto const count = static_cast<std::uint64_t>(ranks);
        require<MalformedFrame>(count * of.least_part <= of.parts &&
                                    of.parts <= count * of.selection &&
                                    of.selection <= problem.limit,
                                ranks, " ranks' parts of at least ", of.least_part, " entries, ",
                                of.parts, " together, of at most ", of.selection,
                                " entries, where ", problem.limit, " may be selected");
      });
  auto const ranks = static_cast<std::uint64_t>(size);
  return ranks * (sizes.parts - sizes.least_part) <=
         (2 * ranks - 3) * std::max<std::uint64_t>(problem.k, sizes.selection);
}

// What the others receive of the selection; the part that stays here is not rounded.
template <class V>
SparseView<V> OkTopk<V>::round_parts(Channel& channel, SparseView<V> selection,
                                     SparseProblem const& problem) {
  if (!rounding_.lossy()) return selection;
  rounding_.begin(channel.rank(), problem.step);
  sent_.assign(selection.values.begin(), selection.values.end());
  for (int part = 0; part < channel.size(); ++part) {
    if (part == channel.rank()) continue;
    auto const values = selection.range(region_first(part), region_last(part, problem)).values;
    rounding_.round(
        std::span(sent_).subspan(values.data() - selection.values.data(), values.size()));
  }
  return {selection.indices, sent_};
}

// Where the result has no entry, all of what this rank selected is missing; where it has one, what
// rounding took of the selection, and of the sum that this rank gave away.
template <class V>
SparseView<V> OkTopk<V>::reject(SparseView<V> selection, SparseProblem const& problem) {
  if (!rounding_.lossy()) return intersection_.difference(selection, result_.indices);
  errors_.clear();
  auto const extent = static_cast<std::uint32_t>(problem.extent);
  rejected_.reset(0, extent, extent);
  // The index of the result that the last call has come to.
  auto next = result_.indices.begin();
  auto const in_result = [&](std::uint32_t index) {
    next = std::lower_bound(next, result_.indices.end(), index);
    return next != result_.indices.end() && *next == index;
  };
  for (std::size_t i = 0; i < selection.nnz(); ++i) {
    std::uint32_t const index = selection.indices[i];
    V const missing = selection.values[i] - (in_result(index) ? sent_[i] : V{0});
    if (missing != 0) errors_.push(index, missing);
  }
  rejected_.add(errors_.view());
  errors_.clear();
  next = result_.indices.begin();
  for (std::size_t i = 0; i < exact_share_.size(); ++i) {
    V const missing = exact_share_[i] - share_.values[i];
    if (missing != 0 && in_result(share_.indices[i])) errors_.push(share_.indices[i], missing);
  }
  rejected_.add(errors_.view());
  return rejected_.sparse();
}

// The same result, from an allgather of the selections.
template <class V>
void OkTopk<V>::reduce_everywhere(Channel& channel, SparseView<V> selection,
                                  SparseProblem const& problem) {
  auto const extent = static_cast<std::uint32_t>(problem.extent);
  std::size_t const max_frame = max_sparse_frame_bytes<V>(problem.limit, extent);
  share_.clear();
  exact_share_.clear();
  SparseView<V> sent = selection;
  if (rounding_.lossy()) {
    rounding_.begin(channel.rank(), problem.step);
    sent_.assign(selection.values.begin(), selection.values.end());
    rounding_.round(sent_);
    sent.values = sent_;
  }
  auto const frame = encode(channel, 0, extent, sent, options_.frame, send_.take(max_frame));
  auto const frames = gather_.run(channel, Phase::gather, frame, max_frame);
  sum_.reset(0, extent);
  for (int rank = 0; rank < channel.size(); ++rank) {
    if (rank == channel.rank() && frames[rank].header.kind == FrameKind::sparse) {
      sum_.add(sent);  // what the others decode
      continue;
    }
    sum_.add_from([&](auto& indices, auto& values) {
      decode_pairs(channel, rank, frames[rank], 0, extent, problem.limit, indices, values);
    });
  }
  SparseView<V> const sum = sum_.sum();
  Cut const cut = cut_.run_everywhere(sum.values, problem.k, source(problem));
  keep(sum, cut, cut_.kept().front(), result_);
}

template <class V>
SparseView<V> OkTopk<V>::split_and_reduce(Channel& channel, SparseView<V> selection,
                                          SparseProblem const& problem) {
  int const rank = channel.rank();
  int const size = channel.size();
  std::uint32_t const first = region_first(rank);
  std::uint32_t const last = region_last(rank, problem);
  std::size_t const max_receive =
      max_sparse_frame_bytes<V>(std::min<std::uint64_t>(problem.limit, last - first), last - first);
  int const posted = RotatedExchange::two_windows(options_.window, size);
  std::size_t send_bytes = 0;
  for (int part = 0; part < size; ++part) {
    auto const nnz = selection.range(region_first(part), region_last(part, problem)).nnz();
    send_bytes += max_sparse_frame_bytes<V>(nnz, problem.extent);
  }
  sum_.reset(first, last - first);
  sum_.add(selection.range(first, last));
  int decoded = 0;
  exchange_.run(
      channel,
      {.outgoing = send_.take(send_bytes),
       .incoming = receive_.take(posted * max_receive),
       .max_frame = max_receive,
       .sends = posted},
      [&](int owner, std::span<std::byte> room) {
        std::uint32_t const begin = region_first(owner);
        std::uint32_t const end = region_last(owner, problem);
        return encode(channel, begin, end, selection.range(begin, end), options_.frame, room);
      },
      [&](int source, FrameView const& frame) {
        sum_.add_from([&](auto& indices, auto& values) {
          decode_pairs(channel, source, frame, first, last, problem.limit, indices, values);
        });
        // Sums a window while the next one arrives; the last one below.
        ++decoded;
        if (decoded % options_.window == 0 && decoded < size - 1) sum_.fold();
      });
  return sum_.sum();
}

template <class V>
void OkTopk<V>::keep_top_k(Channel& channel, SparseView<V> region, SparseProblem const& problem) {
  Cut const cut = cut_.run(channel, region.values, problem.k, source(problem), problem.extent);
  keep(region, cut, cut_.kept()[channel.rank()], share_);
}

// Replaces `out` by the `count` entries that the cut keeps. Writes every entry and steps on behind
// those: no branch on the data.
template <class V>
void OkTopk<V>::keep(SparseView<V> region, Cut const& cut, std::uint64_t count, Pairs<V>& out) {
  out.resize(count);
  std::uint64_t quota = cut.quota;
  std::size_t kept = 0;
  for (std::size_t i = 0; kept < count && i < region.nnz(); ++i) {
    std::uint64_t const pattern = magnitude_bits(region.values[i]);
    bool const above = pattern >= cut.high;
    bool const in_quota = !above & (pattern >= cut.low) & (quota > 0);
    quota -= in_quota;
    out.indices[kept] = region.indices[i];
    out.values[kept] = region.values[i];
    kept += above | in_quota;
  }
}

template <class V>
void OkTopk<V>::balance(Channel& channel, SparseProblem const& problem) {
  int const rank = channel.rank();
  auto const extent = static_cast<std::uint32_t>(problem.extent);
  auto const plan = plan_balance(cut_.kept());
  // What moves is rounded when it is gathered, and only then.
  FrameOptions exact = options_.frame;
  exact.value_codec = ValueCodec::raw;
  auto const frame_bytes = [&](Transfer const& transfer) {
    return max_sparse_frame_bytes<V>(transfer.count, extent);
  };
  std::size_t send_bytes = 0;
  std::size_t receive_bytes = 0;
  for (Transfer const& transfer : plan) {
    if (transfer.source == transfer.destination) continue;
    if (transfer.source == rank) send_bytes += frame_bytes(transfer);
    if (transfer.destination == rank) receive_bytes += frame_bytes(transfer);
  }
  auto outgoing = send_.take(send_bytes);
  auto incoming = receive_.take(receive_bytes);
  sends_.clear();
  receives_.clear();
  for (Transfer const& transfer : plan) {
    if (transfer.source == transfer.destination) continue;
    if (transfer.destination == rank) {
      auto const buffer = incoming.first(frame_bytes(transfer));
      incoming = incoming.subspan(buffer.size());
      receives_.push_back(channel.irecv(transfer.source, Phase::balance, buffer));
    } else if (transfer.source == rank) {
      auto const part = share_.view().slice(transfer.offset, transfer.offset + transfer.count);
      auto const frame =
          encode(channel, part.indices.front(), part.indices.back() + 1, part, exact, outgoing);
      outgoing = outgoing.subspan(frame.size());
      sends_.push_back(channel.isend(transfer.destination, Phase::balance, frame));
    }
  }
  balanced_.clear();
  incoming = receive_.take(receive_bytes);
  auto receive = receives_.begin();
  for (Transfer const& transfer : plan) {
    if (transfer.destination != rank) continue;
    if (transfer.source == rank) {
      balanced_.append(share_.view().slice(transfer.offset, transfer.offset + transfer.count));
    } else {
      auto const buffer = incoming.first(frame_bytes(transfer));
      incoming = incoming.subspan(buffer.size());
      FrameView const frame = channel.wait_frame(*receive++, transfer.source, buffer);
      decode_share(channel, transfer.source, frame, extent, transfer.count, balanced_);
    }
  }
  channel.wait_all(sends_);
  std::swap(share_, balanced_);
}

template <class V>
void OkTopk<V>::gather(Channel& channel, SparseProblem const& problem) {
  auto const extent = static_cast<std::uint32_t>(problem.extent);
  std::uint64_t largest = *std::ranges::max_element(cut_.kept());
  std::size_t const max_frame = max_sparse_frame_bytes<V>(largest, extent);
  if (rounding_.lossy()) {
    exact_share_ = share_.values;
    rounding_.round(share_.values);
  }
  auto const frame = encode(channel, share_.indices.empty() ? 0 : share_.indices.front(),
                            share_.indices.empty() ? 0 : share_.indices.back() + 1, share_.view(),
                            options_.frame, send_.take(max_frame));
  auto const frames = gather_.run(channel, Phase::gather, frame, max_frame);
  result_.clear();
  for (int rank = 0; rank < channel.size(); ++rank) {
    decode_share(channel, rank, frames[rank], extent, largest, result_);
  }
}

// Pairs received: in split and reduce (2 - 3/P) k at most, or k(1 + 1/6) + 2P where regions are
// new; k in balance and allgather together, since a rank that is given an even share does not
// receive it again. A prediction is an average over the steps, of even shares.
Cost oktopk_cost(CostShape const& shape, AlgorithmOptions const& options) {
  if (shape.ranks == 1) return {};
  double const ranks = shape.ranks;
  double const peers = ranks - 1;
  auto const k = static_cast<double>(shape.k);
  bool const average = shape.predicts();
  double const pairs = (average ? 2 : 3) * k * peers / ranks;
  auto const once_in = [&](std::uint64_t period) {
    return average ? 1 / static_cast<double>(period) : 1.0;
  };
  int const exact_rounds = shape.value_bytes > 4 ? GlobalCut<double>::exact_rounds(shape.k)
                                                 : GlobalCut<float>::exact_rounds(shape.k);
  double const searches =
      options.schedule.between == ThresholdSource::exact ? 1.0 : once_in(options.schedule.period);
  double const transfers = average ? 0 : 2 * peers + 1;  // in balance
  // Encoded once and its share once more, decoded and merged region by region, and the result
  // decoded: the sum of a region grows while P parts of it arrive.
  double merging = 0;
  for (int rank = 1; rank <= shape.ranks; ++rank) merging += shape.merged(rank) / shape.ranks;
  // Random selections of two ranks are never quite even, so that each takes both.
  if (average && shape.ranks == 2) merging *= 2;
  Cost const split{
      .rounds = average ? 1.0 : 2.0,
      .messages = peers + transfers,
      .bytes = (peers + transfers) * header_bytes + pairs * shape.pair_bytes(),
      .entries = 3 * k + merging,
  };
  Cost const cut =
      global_cut_cost(shape.ranks, GlobalCut<float>::bins(shape.k), 1 + searches * exact_rounds);
  Cost const sizes = census_cost(shape.ranks, 16);
  Cost const gather = allgather_cost(shape.ranks, header_bytes);
  return split + sizes + gather + cut +
         once_in(options.partition_period) * regions_cost(shape.ranks, shape.extent);
}

}  // namespace

AlgorithmEntry const oktopk = {
    .name = "oktopk",
    .description = "split and reduce, then balance and allgather the k largest sums",
    .words = "6k(P-1)/P",
    .source = "Ok-Topk Algorithm 1",
    .sparse = true,
    .top_k_result = true,
    .cost = oktopk_cost,
    .make = MakeSparseOf<OkTopk>::floating,
    .rounds = true,
};

}  // namespace sparsecomm
