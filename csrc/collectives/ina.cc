// In-network aggregation: ranks send the blocks of their arrays that are not zero to aggregators
// (csrc/ina), which reduce them and send every rank the sums.
//
// 1. Reduce through the aggregators that are left. The sums land in memory of their own, so that
//    the data is as it was if that fails. Blocks that are zero on all ranks are written nowhere:
//    where the result replaces the data they are zero already.
// 2. The ranks tell each other whether it went well and which aggregators are left, by a census.
// 3. If it did not on some rank, a dense allreduce between the ranks completes the operation on
//    all. Only what the caller must change, a plan that aggregators do not take, is an error.
//
// A rank sends its own blocks, votes for them and headers, and receives the blocks that are not
// zero on some rank, their numbers and headers, whatever P; see ina_cost(). Lossless. Source: Gu et
// al. 2024 (OmNICCL).
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

template <class T>
class InNetwork final : public DenseAllreduce<T> {
 public:
  using V = accumulate_t<T>;

  InNetwork(AlgorithmOptions const& options, Services const& services)
      : options_(options),
        client_(services.aggregators),
        host_(dense.dense->make<T>(options, services)) {}

  void run(Channel& channel, std::span<const T> data, Reduction reduction, V divisor) override {
    data_ = data;
    divisor_ = divisor;
    by_host_ = channel.size() == 1 || data.empty() || !reduce(channel, data, reduction);
    if (by_host_) host_->run(channel, data, reduction, divisor);
  }

  void write(std::span<T> out) override {
    if (by_host_) return host_->write(out);
    if (out.data() != data_.data()) std::ranges::fill(out, T{});
    for (ByteRange const& part : written_) {
      std::size_t const begin = part.begin / sizeof(T), count = (part.end - part.begin) / sizeof(T);
      std::span<const T> const from = sum_.subspan(begin, count);
      std::span<T> const to = out.subspan(begin, count);
      if (divisor_ == V{1}) {
        std::ranges::copy(from, to.begin());
      } else {
        std::ranges::transform(from, to.begin(), [divisor = divisor_](T x) {
          return static_cast<T>(static_cast<V>(x) / divisor);
        });
      }
    }
  }

 private:
  // False if no aggregator is left or it went wrong on some rank.
  bool reduce(Channel& channel, std::span<const T> data, Reduction reduction) {
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

  AlgorithmOptions options_;
  InaClient* client_;
  std::unique_ptr<DenseAllreduce<T>> host_;
  CensusAllreduce<Vote> votes_;
  Buffer<T> memory_;
  std::span<T> sum_;
  std::vector<ByteRange> written_;  // of the sums
  std::span<const T> data_;         // of the last run()
  V divisor_{1};
  bool by_host_ = false;
};

constexpr DenseMakers ina_makers =
    MakeDenseOf<InNetwork>::makers([](std::uint64_t, int) { return std::uint64_t{0}; });

// Blocks, of `blocks`, that hold some of `entries`, as if their positions were random; or at most.
double filled_blocks(double entries, double extent, double blocks, bool predicts) {
  if (entries >= extent) return blocks;
  if (!predicts) return std::min(entries, blocks);
  return -blocks * std::expm1(extent / blocks * std::log1p(-entries / extent));
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
  double const share = filled_blocks(all, extent, static_cast<double>(blocks), shape.predicts()) /
                       static_cast<double>(blocks);
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

}  // namespace sparsecomm
