// In-network aggregation: ranks send the blocks of their arrays that are not zero to aggregators
// (csrc/ina), which reduce them and send every rank the sums.
//
// 1. Reduce through the aggregators that are left. The result lands in memory of its own, so that
//    the data is as it was if that fails.
// 2. The ranks tell each other whether it went well and which aggregators are left, by a census.
// 3. If it did not on some rank, a dense allreduce between the ranks completes the operation, on
// all
//    of them. Only what the caller must change, a plan that aggregators do not take, is an error.
//
// A rank receives (union + headers) and sends (own blocks + votes + headers), whatever P; see
// stream_cost(). Lossless. Source: Gu et al. 2024 (OmNICCL).
#include <algorithm>
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

template <class T>
class InNetwork final : public DenseAllreduce<T> {
 public:
  using V = accumulate_t<T>;

  InNetwork(AlgorithmOptions const& options, Services const& services)
      : options_(options),
        client_(services.aggregators),
        host_(dense.dense->make<T>(options, services)) {}

  void run(Channel& channel, std::span<const T> data, Reduction reduction, V divisor) override {
    reduced_ = data;
    divisor_ = divisor;
    by_host_ = false;
    if (channel.size() == 1 || data.empty()) return;
    require<Error>(client_ != nullptr, "ina was made without aggregators");
    by_host_ = client_->left() == 0 || !reduce(channel, data, reduction);
    if (by_host_) host_->run(channel, data, reduction, divisor);
  }

  void write(std::span<T> out) override {
    if (by_host_) return host_->write(out);
    std::ranges::transform(reduced_, out.begin(), [divisor = divisor_](T x) {
      return static_cast<T>(static_cast<V>(x) / divisor);
    });
  }

 private:
  // As they travel; combined by AND.
  struct Vote {
    std::uint64_t left;     // a bit for each aggregator
    std::uint64_t reduced;  // 1: here
    std::uint64_t taken;    // 1: no aggregator has refused the plan
    friend Vote operator&(Vote const& a, Vote const& b) {
      return {a.left & b.left, a.reduced & b.reduced, a.taken & b.taken};
    }
  };

  // False if it went wrong on some rank.
  bool reduce(Channel& channel, std::span<const T> data, Reduction reduction) {
    // Step 1.
    InaPlan const plan{.elements = data.size(),
                       .block_bytes = options_.block_bytes,
                       .workers = static_cast<std::uint16_t>(channel.size()),
                       .window = options_.block_window,
                       .type = ElementType(dtype_of<T>()),
                       .reduction = reduction,
                       .order = options_.combine_order};
    require_plan(plan);
    std::span<T> const sum = sum_.take(data.size());
    Vote vote{.left = 0, .reduced = 0, .taken = 1};
    std::exception_ptr refusal;
    try {
      auto const waiting = channel.waiting_for("aggregators");
      client_->reduce(plan, std::as_bytes(data), std::as_writable_bytes(sum),
                      channel.deadline().within(channel.deadline().remaining() / attempt_share));
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
    reduced_ = sum;
    return vote.reduced == 1;
  }

  AlgorithmOptions options_;
  InaClient* client_;
  std::unique_ptr<DenseAllreduce<T>> host_;
  CensusAllreduce<Vote> votes_;
  Buffer<T> sum_;
  std::span<const T> reduced_;
  V divisor_{1};
  bool by_host_ = false;
};

constexpr DenseMakers ina_makers =
    MakeDenseOf<InNetwork>::makers([](std::uint64_t, int) { return std::uint64_t{0}; });

// Down, of an array without zeros. Each round is a header and the blocks that it reduces; the
// numbers of those behind the first round have come with the round before. The first message up has
// a plan more.
Cost ina_cost(CostShape const& shape, AlgorithmOptions const& options) {
  if (shape.ranks == 1 || shape.extent == 0) return {.exact = true};
  auto const bytes =
      static_cast<std::uint64_t>(static_cast<double>(shape.extent) * shape.value_bytes);
  std::uint64_t const blocks = (bytes + options.block_bytes - 1) / options.block_bytes;
  auto const streams = static_cast<std::uint64_t>(shape.aggregators * InaClient::default_streams);
  std::uint64_t rounds = 0, numbers = 0, longest = 0;
  for (std::uint64_t i = 0; i < streams; ++i) {
    std::uint64_t const own = blocks * (i + 1) / streams - blocks * i / streams;
    std::uint64_t const first = std::min<std::uint64_t>(own, options.block_window);
    std::uint64_t const turns = 1 + (own - first + options.block_window - 1) / options.block_window;
    numbers += own - first;
    rounds += turns;
    longest = std::max(longest, turns);
  }
  Cost const vote = census_cost(shape.ranks, 24);
  return Cost{.rounds = 2.0 * static_cast<double>(longest),
              .messages = static_cast<double>(rounds),
              .bytes =
                  static_cast<double>(rounds * sizeof(InaHeader) + numbers * sizeof(std::uint32_t) +
                                      blocks * options.block_bytes),
              .dense_entries = static_cast<double>(shape.extent)} +
         vote;
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
