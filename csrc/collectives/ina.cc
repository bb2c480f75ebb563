// In-network aggregation: ranks send the blocks of their arrays that are not zero to aggregators
// (csrc/ina), which reduce them and send every rank the sums.
//
// 1. Reduce through the aggregators that are left. The sums land in memory of their own, so that
//    the data is as it was if that fails. Blocks that are zero on all ranks are written nowhere:
//    where the result replaces the data they are zero already.
// 2. The ranks tell each other whether it went well and which aggregators are left, by a census.
// 3. If it did not on some rank, an allreduce between the ranks completes the operation on all:
//    a dense one, or topk_dsa of selections. Only what the caller must change, a plan that
//    aggregators do not take, is an error.
//
// A selection is laid out in zeros first, and of the sums the entries that are not zero are its
// result: of a selection by blocks (SelectionRule::block) little else travels. A rank sends its own
// blocks, votes for them and headers, and receives the blocks that are not zero on some rank, their
// numbers and headers, whatever P; see ina_cost(). Arrays are reduced losslessly, of selections
// only sums are. Source: Gu et al. 2024 (OmNICCL).
#include <algorithm>
#include <cmath>
#include <exception>
#include <string>

#include "collectives/dense_frames.h"
#include "collectives/entries.h"
#include "collectives/figures.h"
#include "ina/admission.h"
#include "ina/client.h"

namespace sparsecomm {
namespace {

// The part of an operation's time that aggregators may take, so that a dense allreduce fits behind.
constexpr int attempt_share = 2;

// What ranks tell each other, combined by AND.
struct Vote {
  std::uint64_t left;     // a bit for each aggregator
  std::uint64_t reduced;  // 1: here
  std::uint64_t taken;    // 1: no aggregator has refused the plan
  friend Vote operator&(Vote const& a, Vote const& b) {
    return {a.left & b.left, a.reduced & b.reduced, a.taken & b.taken};
  }
};

// Steps 1 and 2.
template <class T>
class AggregatorReduction {
 public:
  AggregatorReduction(AlgorithmOptions const& options, Services const& services)
      : options_(options), client_(services.aggregators) {}

  // False if no aggregator is left or it went wrong on some rank.
  bool run(Channel& channel, std::span<const T> data, Reduction reduction) {
    require<Error>(client_ != nullptr, "ina was made without aggregators");
    if (client_->left() == 0) return false;
    // Step 1.
    InaPlan const plan{.elements = data.size(),
                       .block_bytes = options_.block_bytes,
                       .workers = static_cast<std::uint16_t>(channel.size()),
                       .window = options_.block_window,
                       .type = ElementType(dtype_of<T>()),
                       .reduction = reduction,
                       .order = options_.combine_order};
    require_plan(plan);
    sum_ = memory_.take(data.size());
    Vote vote{.left = 0, .reduced = 0, .taken = 1};
    std::exception_ptr refusal;
    try {
      auto const waiting = channel.waiting_for("aggregators");
      auto const written = client_->reduce(
          plan, std::as_bytes(data), std::as_writable_bytes(sum_),
          channel.deadline().within(channel.deadline().remaining() / attempt_share));
      written_.assign(written.begin(), written.end());
      vote.reduced = 1;
    } catch (Interrupted const&) {
      throw;
    } catch (AggregatorLost const&) {
    } catch (PeerError const&) {  // an aggregator accuses a rank, which tells for itself
    } catch (Mismatch const&) {
      refusal = std::current_exception();
    } catch (NotAdmitted const&) {
      refusal = std::current_exception();
    }
    // Step 2.
    vote.left = client_->left();
    if (refusal) vote.taken = 0;
    votes_.run(
        channel, Phase::threshold, std::span(&vote, 1),
        [](Vote const& a, Vote const& b) { return a & b; },
        [](std::span<const Vote> votes, int) {
          for (Vote const& other : votes) {
            require<MalformedFrame>(other.reduced <= 1 && other.taken <= 1, "vote: reduced is ",
                                    other.reduced, " and taken is ", other.taken,
                                    ", must both be 0 or 1");
          }
        });
    client_->keep(vote.left, "another rank has lost it");
    if (refusal) std::rethrow_exception(refusal);
    require<Mismatch>(vote.taken == 1,
                      "in-network aggregation: an aggregator has refused the plan of another rank, "
                      "which says why");
    return vote.reduced == 1;
  }

  // Of the last run() that was true: the entries [begin, end) of the parts that are not zero on
  // some rank, in no particular order, and all sums, undefined elsewhere.
  template <class F>
  void for_each_part(F&& f) const {
    for (ByteRange const& part : written_) f(part.begin / sizeof(T), part.end / sizeof(T));
  }
  std::span<const T> sums() const { return sum_; }
  // After it every part lies behind the one before it.
  void sort_parts() { std::ranges::sort(written_, {}, &ByteRange::begin); }

 private:
  AlgorithmOptions options_;
  InaClient* client_;
  CensusAllreduce<Vote> votes_;
  Buffer<T> memory_;
  std::span<T> sum_;
  std::vector<ByteRange> written_;  // of the sums
};

template <class T>
class InNetwork final : public DenseAllreduce<T> {
 public:
  using V = accumulate_t<T>;

  InNetwork(AlgorithmOptions const& options, Services const& services)
      : reduction_(options, services), host_(dense.dense->make<T>(options, services)) {}

  void run(Channel& channel, std::span<const T> data, Reduction reduction, V divisor) override {
    data_ = data;
    divisor_ = divisor;
    by_host_ = channel.size() == 1 || data.empty() || !reduction_.run(channel, data, reduction);
    if (by_host_) host_->run(channel, data, reduction, divisor);
  }

  void write(std::span<T> out) override {
    if (by_host_) return host_->write(out);
    if (out.data() != data_.data()) std::ranges::fill(out, T{});
    reduction_.for_each_part([&](std::size_t begin, std::size_t end) {
      std::span<const T> const from = reduction_.sums().subspan(begin, end - begin);
      std::span<T> const to = out.subspan(begin, end - begin);
      if (divisor_ == V{1}) {
        std::ranges::copy(from, to.begin());
      } else {
        std::ranges::transform(from, to.begin(), [divisor = divisor_](T x) {
          return static_cast<T>(static_cast<V>(x) / divisor);
        });
      }
    });
  }

 private:
  AggregatorReduction<T> reduction_;
  std::unique_ptr<DenseAllreduce<T>> host_;
  std::span<const T> data_;  // of the last run()
  V divisor_{1};
  bool by_host_ = false;
};

template <class V>
class InNetworkSelection final : public SparseAllreduce<V> {
 public:
  InNetworkSelection(AlgorithmOptions const& options, Services const& services)
      : reduction_(options, services),
        host_(make_sparse_allreduce<V>(topk_dsa, options, services)) {}

  AllreduceResult<V> run(Channel& channel, SparseView<V> contribution,
                         SparseProblem const& problem) override {
    if (channel.size() == 1 || problem.extent == 0 ||
        !reduction_.run(channel, lay_out(contribution, problem.extent), Reduction::sum)) {
      return host_->run(channel, contribution, problem);
    }
    return {.reduced = {.sparse = gather()}, .rejected = {}};
  }

 private:
  // In zeros. Those entries are cleared by the next call, whatever becomes of this one.
  std::span<const V> lay_out(SparseView<V> contribution, std::uint64_t extent) {
    if (array_.size() != extent) {
      array_.assign(extent, 0);
    } else {
      for (std::uint32_t const index : laid_out_) array_[index] = 0;
    }
    laid_out_.clear();
    laid_out_.reserve(contribution.nnz());
    for (std::size_t i = 0; i < contribution.nnz(); ++i) {
      laid_out_.push_back(contribution.indices[i]);
      array_[contribution.indices[i]] = contribution.values[i];
    }
    return array_;
  }

  SparseView<V> gather() {
    reduction_.sort_parts();
    std::size_t room = 0;
    reduction_.for_each_part([&](std::size_t begin, std::size_t end) { room += end - begin; });
    auto const indices = indices_.take(room);
    auto const values = values_.take(room);
    std::size_t count = 0;
    reduction_.for_each_part([&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        V const value = reduction_.sums()[i];
        indices[count] = static_cast<std::uint32_t>(i);
        values[count] = value;
        count += value != 0;
      }
    });
    return {indices.first(count), values.first(count)};
  }

  AggregatorReduction<V> reduction_;
  std::unique_ptr<SparseAllreduce<V>> host_;
  std::vector<V> array_;
  std::vector<std::uint32_t> laid_out_;  // where it is not zero
  Buffer<std::uint32_t> indices_;
  Buffer<V> values_;
};

constexpr DenseMakers ina_makers =
    MakeDenseOf<InNetwork>::makers([](std::uint64_t, int) { return std::uint64_t{0}; });

// Blocks, of `blocks`, that hold some of `entries`, as if the positions of their runs were random;
// or at most.
double filled_blocks(double entries, double blocks, CostShape const& shape) {
  auto const extent = static_cast<double>(shape.extent);
  if (entries >= extent) return blocks;
  double const of_block = extent / (blocks * static_cast<double>(shape.run));  // runs
  if (!shape.predicts()) return std::min(entries, blocks);
  return -blocks * std::expm1(std::max(1.0, of_block) * std::log1p(-entries / extent));
}

// Down, of the blocks that are not zero on some rank. A round is a header and the blocks that it
// reduces; the numbers of those behind the first d of a stream have come with the round before.
Cost ina_cost(CostShape const& shape, AlgorithmOptions const& options) {
  if (shape.ranks == 1 || shape.extent == 0) return {.exact = true};
  double const extent = static_cast<double>(shape.extent);
  auto const bytes = static_cast<std::uint64_t>(extent * shape.value_bytes);
  std::uint64_t const blocks = (bytes + options.block_bytes - 1) / options.block_bytes;
  double const all = static_cast<double>(
      shape.union_nnz > 0 ? shape.union_nnz : shape.k * std::uint64_t(shape.ranks));
  double const share =
      filled_blocks(all, static_cast<double>(blocks), shape) / static_cast<double>(blocks);
  auto const streams = static_cast<std::uint64_t>(shape.aggregators) * InaClient::default_streams;
  double rounds = 0, numbers = 0, longest = 0;
  for (std::uint64_t i = 0; i < streams; ++i) {
    std::uint64_t const own = blocks * (i + 1) / streams - blocks * i / streams;
    std::uint64_t const first = std::min<std::uint64_t>(own, options.block_window);
    double const later = share * static_cast<double>(own - first);
    double const turns = 1 + std::ceil(later / options.block_window);
    numbers += later;
    rounds += turns;
    longest = std::max(longest, turns);
  }
  double const down = rounds * sizeof(InaHeader) + numbers * sizeof(std::uint32_t) +
                      share * static_cast<double>(blocks * options.block_bytes);
  double const crowd = std::max(1.0, static_cast<double>(shape.ranks) / shape.aggregators);
  Cost const through{.dense_entries = extent,
                     .aggregator_rounds = 2 * longest,
                     .aggregator_bytes = down,
                     .aggregator_load = down * crowd,
                     .exact = share == 1};
  return through + census_cost(shape.ranks, sizeof(Vote));
}

}  // namespace

AlgorithmEntry const ina = {
    .name = "ina",
    .description = "every block that is not zero, by aggregators on other hosts",
    .words = "N",
    .source = "OmNICCL",
    .cost = ina_cost,
    .dense = &ina_makers,
    .needs = Needs::aggregators,
};

AlgorithmEntry const ina_sparse = {
    .name = "ina_sparse",
    .description = "the blocks that hold selected entries, by aggregators on other hosts",
    .words = "kP, at most N",
    .source = "OmNICCL",
    .sparse = true,
    .cost = ina_cost,
    .make = MakeSparseOf<InNetworkSelection>::floating,
    .needs = Needs::aggregators,
};

}  // namespace sparsecomm
