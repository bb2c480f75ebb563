// Every lossless algorithm of the table against a plain reduction, without selection or engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <random>

#include "allocations.h"
#include "collectives/sparse_allgather.h"
#include "contributions.h"
#include "uncounted.h"

namespace sparsecomm::test {
namespace {

class AllreduceTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Algorithms, AllreduceTest, ::testing::ValuesIn(lossless_names()),
                         [](auto const& info) { return info.param; });

// What one rank got of one reduction.
struct Outcome {
  std::vector<std::byte> bits;
  std::size_t nnz = 0;
  bool dense = false;
  bool operator==(Outcome const&) const = default;
};

template <class V>
Outcome outcome_of(StreamView<V> const& view, std::vector<V> const& expanded) {
  auto const bytes = std::as_bytes(std::span(expanded));
  return {{bytes.begin(), bytes.end()}, view.nnz(), view.is_dense};
}

struct Grid {
  std::vector<double> deltas;
  std::vector<std::uint64_t> extents;
};

// Every reduction of every support, one after another on the same objects.
template <class V>
void check_reductions(std::string const& algorithm, int ranks, Grid const& grid) {
  std::vector<std::vector<Outcome>> outcomes(ranks);
  auto transports = make_inproc_transports(ranks);
  auto const errors = run_transports(transports, [&](Transport& transport) {
    std::uint32_t operation = 0;
    for (double const delta : grid.deltas) {
      AlgorithmOptions options;
      options.delta = delta;
      options.window = 3;
      auto const allreduce = make_sparse_allreduce<V>(find_algorithm(algorithm), options, {});
      for (std::uint64_t const extent : grid.extents) {
        for (Support const& support : supports) {
          std::vector<Contribution<V>> all;
          std::size_t limit = 0;
          for (int rank = 0; rank < ranks; ++rank) {
            all.push_back(contribute<V>(support, rank, ranks, extent));
            limit = std::max(limit, all.back().indices.size());
          }
          for (ReductionEntry const& reduction : reductions()) {
            SCOPED_TRACE(concat(algorithm, ", P=", ranks, ", N=", extent, ", ", support.name, ", ",
                                reduction.name, ", delta ", delta, ", ", name(dtype_of<V>())));
            Channel channel(transport, ++operation, soon());
            auto const result =
                allreduce->run(channel, all[transport.rank()].view(),
                               {.extent = extent, .limit = limit, .reduction = reduction.id});
            std::vector<V> expected(extent, neutral<V>(reduction.id));
            visit_reduction<V>(reduction.id, [&](auto combine) {
              for (auto const& one : all) {
                for (std::size_t i = 0; i < one.indices.size(); ++i) {
                  V& value = expected[one.indices[i]];
                  value = combine(value, one.values[i]);
                }
              }
            });
            auto const actual = expand(result.reduced, extent, reduction.id);
            ASSERT_EQ(actual, expected);
            ASSERT_EQ(result.rejected.nnz(), 0u);
            outcomes[transport.rank()].push_back(outcome_of(result.reduced, actual));
          }
        }
      }
    }
  });
  expect_no_errors(errors);
  for (int rank = 1; rank < ranks; ++rank) {
    ASSERT_TRUE(outcomes[rank] == outcomes[0]) << algorithm << ": rank " << rank << " of " << ranks;
  }
}

TEST_P(AllreduceTest, EveryReductionOfEveryTypeForAnyWorldSizeAndSupport) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    check_reductions<float>(GetParam(), ranks, {{0, 1e-9, 0.3, 1}, {90}});
    check_reductions<float>(GetParam(), ranks, {{0}, {0, 1, 7}});
    check_reductions<double>(GetParam(), ranks, {{0, 0.2}, {60}});
    check_reductions<std::int32_t>(GetParam(), ranks, {{0.3}, {60}});
    check_reductions<std::int64_t>(GetParam(), ranks, {{0.2}, {60}});
  }
}

// Sums that are rounded, zeros of either sign, NaN and infinities: which bits come out depends on
// the order, which must be the same on all ranks.
TEST_P(AllreduceTest, InexactSumsAndSpecialValuesHaveTheSameBitsOnAllRanks) {
  float const infinity = std::numeric_limits<float>::infinity();
  float const special[] = {0.0f, -0.0f, infinity, -infinity, std::nanf("1"), -std::nanf("2")};
  std::uint64_t const extent = 400;
  for (int ranks = 2; ranks <= 9; ++ranks) {
    std::vector<std::vector<Outcome>> outcomes(ranks);
    auto transports = make_inproc_transports(ranks);
    expect_no_errors(run_transports(transports, [&](Transport& transport) {
      auto random = generator(transport.rank(), 1);
      std::normal_distribution<float> normal;
      Contribution<float> own;
      for (std::uint32_t i = 0; i < extent; ++i) {
        if (random() % 4 != 0) continue;
        own.indices.push_back(i);
        own.values.push_back(i % 3 == 0 ? special[random() % 6] : normal(random));
      }
      std::uint32_t operation = 0;
      for (double const delta : {0.0, 0.05, 0.3, 1.0}) {
        AlgorithmOptions options;
        options.delta = delta;
        auto const allreduce =
            make_sparse_allreduce<float>(find_algorithm(GetParam()), options, {});
        for (ReductionEntry const& reduction : reductions()) {
          Channel channel(transport, ++operation, soon());
          auto const result = allreduce->run(
              channel, own.view(), {.extent = extent, .limit = extent, .reduction = reduction.id});
          outcomes[transport.rank()].push_back(
              outcome_of(result.reduced, expand(result.reduced, extent, reduction.id)));
        }
      }
    }));
    for (int rank = 1; rank < ranks; ++rank) {
      for (std::size_t i = 0; i < outcomes[0].size(); ++i) {
        EXPECT_EQ(outcomes[rank][i].dense, outcomes[0][i].dense) << "result " << i;
        EXPECT_TRUE(outcomes[rank][i] == outcomes[0][i])
            << "rank " << rank << " of " << ranks << ", result " << i;
      }
    }
  }
}

// Every region gets as many entries as delta allows, and then one of them one more.
TEST_P(AllreduceTest, TurnsDenseWhereOneEntryMoreThanDeltaComesTogether) {
  for (int const ranks : {1, 2, 3, 4, 5, 8}) {
    std::uint64_t const region = 20;
    std::uint64_t const extent = region * ranks;
    for (int const more : {0, 1}) {
      auto transports = make_inproc_transports(ranks);
      expect_no_errors(run_transports(transports, [&](Transport& transport) {
        int const rank = transport.rank();
        Contribution<float> own;
        for (int entry = 0; entry < 4; ++entry) {
          for (int part = 0; part < ranks; ++part) {
            if ((entry + part) % ranks != rank) continue;
            own.indices.push_back(static_cast<std::uint32_t>(part * region + 3 * entry));
          }
        }
        if (more != 0 && rank == ranks - 1) own.indices.push_back(1);
        std::ranges::sort(own.indices);
        own.values.assign(own.indices.size(), 1.0f);
        AlgorithmOptions options;
        options.delta = 0.2;  // 4 of 20
        auto const allreduce =
            make_sparse_allreduce<float>(find_algorithm(GetParam()), options, {});
        Channel channel(transport, 1, soon());
        auto const result = allreduce->run(channel, own.view(), {.extent = extent, .limit = 8});
        bool const always = GetParam() == "dsar_split_allgather";
        EXPECT_EQ(result.reduced.is_dense, always || more != 0) << "P=" << ranks;
        auto const values = expand(result.reduced, extent, Reduction::sum);
        EXPECT_EQ(std::ranges::count(values, 1.0f), 4 * ranks + more);
      }));
    }
  }
}

void check_allocations(std::string_view algorithm) {
  for (int const ranks : {1, 2, 3, 4, 7}) {
    auto transports = make_inproc_transports(ranks);
    for (auto& transport : transports) {
      transport = std::make_unique<UncountedTransport>(std::move(transport));
    }
    expect_no_errors(run_transports(transports, [&](Transport& transport) {
      std::uint32_t operation = 0;
      for (double const delta : {0.0, 0.25}) {
        AlgorithmOptions options;
        options.delta = delta;
        auto const allreduce = make_sparse_allreduce<float>(find_algorithm(algorithm), options, {});
        for (Support const& support : supports) {
          auto const own = contribute<float>(support, transport.rank(), ranks, 500);
          for (std::uint64_t step = 0; step < 4; ++step) {
            Channel channel(transport, ++operation, soon());
            allocations = 0;
            counting = step >= 2;
            allreduce->run(channel, own.view(),
                           {.extent = 500, .k = 60, .limit = 500, .step = step});
            counting = false;
            EXPECT_EQ(allocations, 0u)
                << algorithm << ", P=" << ranks << ", " << support.name << ", step " << step;
          }
        }
      }
    }));
  }
}

TEST_P(AllreduceTest, AllocatesNothingInTheSteadyState) { check_allocations(GetParam()); }

TEST(LossyAllreduceTest, AllocatesNothingInTheSteadyState) {
  for (std::string_view const algorithm : {"oktopk", "gtopk"}) check_allocations(algorithm);
}

// One contribution of one rank is the largest of each bucket: its levels are whole numbers in every
// codec, so that sums and what rounding takes of them are exact.
template <class V>
void check_rounding(ValueCodecEntry const& codec, int ranks) {
  SCOPED_TRACE(concat(codec.name, ", P=", ranks, ", ", name(dtype_of<V>())));
  AlgorithmEntry const& entry = find_algorithm("dsar_split_allgather");
  std::uint64_t const extent = 5000;
  AlgorithmOptions options;
  options.dense_codec = codec.id;
  options.frame.index_codec = IndexCodecChoice::raw32;
  std::vector<std::vector<Outcome>> outcomes(ranks);
  std::vector<V> conserved(extent), expected(extent);
  std::mutex mutex;  // of `conserved` and `expected`
  bool rounded = false;
  auto transports = make_inproc_transports(ranks);
  expect_no_errors(run_transports(transports, [&](Transport& transport) {
    int const rank = transport.rank();
    auto random = generator(rank, 2);
    Contribution<V> own;
    for (std::uint32_t i = 0; i < extent; ++i) {
      bool const largest = i % 100 == 99 && static_cast<int>(i / 100) % ranks == rank;
      if (!largest && (i % 100 == 99 || random() % 3 != 0)) continue;
      own.indices.push_back(i);
      own.values.push_back(largest ? V{7 * 127}
                                   : static_cast<V>(static_cast<int>(random() % 90) - 45));
    }
    auto const allreduce = make_sparse_allreduce<V>(entry, options, {});
    for (std::uint64_t const step : {0, 1, 1}) {
      Channel channel(transport, static_cast<std::uint32_t>(outcomes[rank].size() + 1), soon());
      auto const result =
          allreduce->run(channel, own.view(), {.extent = extent, .limit = extent, .step = step});
      auto const reduced = expand(result.reduced, extent, Reduction::sum);
      outcomes[rank].push_back(outcome_of(result.reduced, reduced));
      std::lock_guard const lock(mutex);
      for (std::size_t i = 0; i < own.indices.size(); ++i)
        expected[own.indices[i]] += own.values[i];
      if (rank == 0) std::ranges::transform(conserved, reduced, conserved.begin(), std::plus<>());
      for (std::size_t i = 0; i < result.rejected.nnz(); ++i) {
        rounded = true;
        conserved[result.rejected.indices[i]] += result.rejected.values[i];
      }
    }
    CostShape const shape{
        .ranks = ranks, .extent = extent, .k = extent / 2, .value_bytes = sizeof(V)};
    EXPECT_LE(Counters::total(transport.counters().received_bytes),
              3 * entry.cost(shape, options).bytes);
  }));
  EXPECT_EQ(conserved, expected) << "lost or counted twice";
  bool const lossy = codec.lossy && codec.id != ValueCodec::f16;  // which has whole numbers to 2048
  EXPECT_EQ(rounded, ranks > 1 && lossy);
  for (int rank = 0; rank < ranks; ++rank) EXPECT_TRUE(outcomes[rank] == outcomes[0]);
  EXPECT_TRUE(outcomes[0][1] == outcomes[0][2]) << "the same step rounds alike";
}

TEST(DsarSplitAllgatherTest, WhatRoundingTakesIsRejectedByTheOwnerOfItsRegion) {
  for (ValueCodecEntry const& codec : value_codecs()) {
    for (int const ranks : {1, 2, 3, 5}) {
      check_rounding<float>(codec, ranks);
      check_rounding<double>(codec, ranks);
    }
  }
}

TEST(DsarSplitAllgatherTest, SumsThatOverflowArriveAndOnlySumsOfFloatsCanBeRounded) {
  AlgorithmEntry const& entry = find_algorithm("dsar_split_allgather");
  AlgorithmOptions options;
  options.dense_codec = ValueCodec::qsgd4;
  EXPECT_THROW(make_sparse_allreduce<std::int32_t>(entry, options, {}), InvalidArgument);
  auto transports = make_inproc_transports(2);
  expect_no_errors(run_transports(transports, [&](Transport& transport) {
    auto const allreduce = make_sparse_allreduce<float>(entry, options, {});
    Contribution<float> const own{{3, 8}, {3e38f, 1.0f}};
    Channel channel(transport, 1, soon());
    EXPECT_THROW(allreduce->run(channel, own.view(),
                                {.extent = 10, .limit = 2, .reduction = Reduction::max}),
                 InvalidArgument);
    auto const result = allreduce->run(channel, own.view(), {.extent = 10, .limit = 2});
    EXPECT_TRUE(std::isinf(result.reduced.dense[3]));
    EXPECT_EQ(result.reduced.dense[8], 2.0f);
  }));
}

struct Malice {
  std::string_view name;
  std::size_t (*encode)(std::uint32_t operation, std::span<std::byte> out);
};

// Frames that parse, but do not belong into a reduction of 40 positions to which every rank
// contributes at most 3 entries.
std::vector<std::uint32_t> const four{1, 2, 3, 4};
constexpr Malice malices[] = {
    {"too many entries",
     [](std::uint32_t operation, std::span<std::byte> out) {
       std::vector<float> const values(4, 1.0f);
       return encode_sparse<float>(operation, 0, 20, four, values,
                                   {IndexCodecChoice::smallest, false}, out);
     }},
    {"dense where so few entries are sparse",
     [](std::uint32_t operation, std::span<std::byte> out) {
       std::vector<float> const values(20, 1.0f);
       return encode_dense<float>(operation, 0, values, out);
     }},
    {"outside the range",
     [](std::uint32_t operation, std::span<std::byte> out) {
       std::uint32_t const index = 70;
       float const value = 1;
       return encode_sparse<float>(operation, 60, 20, {&index, 1}, std::span(&value, 1), {}, out);
     }},
    {"of another type",
     [](std::uint32_t operation, std::span<std::byte> out) {
       std::uint32_t const index = 1;
       std::int32_t const value = 1;
       return encode_sparse<std::int32_t>(operation, 0, 20, {&index, 1}, std::span(&value, 1), {},
                                          out);
     }},
    {"no stream at all", [](std::uint32_t operation, std::span<std::byte> out) {
       return encode_bytes(operation, std::as_bytes(std::span(four)), out);
     }}};

TEST_P(AllreduceTest, AFrameThatParsesButDoesNotBelongAccusesItsSender) {
  for (Malice const& malice : malices) {
    auto transports = make_inproc_transports(2);
    auto const errors = run_transports(transports, [&](Transport& transport) {
      Channel channel(transport, 7, soon());
      if (transport.rank() == 1) {
        std::vector<std::byte> frame(400);
        frame.resize(malice.encode(7, frame));
        for (Phase const phase : {Phase::reduce, Phase::threshold, Phase::gather}) {
          Request request = channel.isend(0, phase, frame);
          channel.wait(request);
        }
        return;
      }
      auto const allreduce = make_sparse_allreduce<float>(find_algorithm(GetParam()), {}, {});
      Contribution<float> const own{{1, 5, 39}, {1, 2, 3}};
      try {
        allreduce->run(channel, own.view(), {.extent = 40, .limit = 3});
        ADD_FAILURE() << GetParam() << " took a frame with " << malice.name;
      } catch (PeerInvalid const& error) {
        EXPECT_EQ(error.ranks(), std::vector{1}) << error.what();
      }
    });
    expect_no_errors(errors);
  }
}

// Sends four entries in place of every sparse frame of the last phase.
class Tampering final : public WrappedTransport {
 public:
  explicit Tampering(std::unique_ptr<Transport> inner)
      : WrappedTransport(std::move(inner)), frame_(400) {
    std::vector<float> const values(4, 1.0f);
    FrameOptions const options{IndexCodecChoice::smallest, false};
    frame_.resize(encode_sparse<float>(7, 0, 5, four, values, options, frame_));
  }

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    bool const of_last = (tag & 7) == static_cast<Tag>(Phase::gather);
    if (of_last && parse_frame(bytes, 7).header.kind == FrameKind::sparse) bytes = frame_;
    return WrappedTransport::do_isend(peer, tag, bytes);
  }

 private:
  std::vector<std::byte> frame_;
};

// run(channel) on two ranks, of which `sender` tampers.
template <class Run>
void expect_too_many_accuse(int sender, Run&& run) {
  auto transports = make_inproc_transports(2);
  transports[sender] = std::make_unique<Tampering>(std::move(transports[sender]));
  expect_no_errors(run_transports(transports, [&](Transport& transport) {
    Channel channel(transport, 7, soon());
    if (transport.rank() == sender) {
      run(channel);
      return;
    }
    try {
      run(channel);
      ADD_FAILURE() << "taken";
    } catch (PeerInvalid const& error) {
      EXPECT_EQ(error.ranks(), std::vector{sender}) << error.what();
      EXPECT_NE(std::string(error.what()).find("must be at most 3"), std::string::npos)
          << error.what();
    }
  }));
}

TEST(LossyAllreduceTest, AShareOfTooManyEntriesAccusesItsSender) {
  struct Case {
    std::string_view algorithm;
    int sender;
    std::vector<std::uint32_t> selections[2];
  };
  // Ok-Topk gathers selections where both ranks select in the same places, else parts of the sum.
  Case const cases[] = {{"oktopk", 1, {{1, 5, 9}, {1, 5, 9}}},
                        {"oktopk", 1, {{1, 5, 9}, {20, 30, 39}}},
                        {"gtopk", 0, {{1, 5, 9}, {1, 5, 9}}},
                        {"topk_a", 1, {{1, 5, 9}, {1, 5, 9}}}};
  for (Case const& each : cases) {
    SCOPED_TRACE(concat(each.algorithm, ", ", each.selections[1].front()));
    expect_too_many_accuse(each.sender, [&](Channel& channel) {
      // The sender's are the larger ones, which the result keeps.
      float const scale = channel.rank() == each.sender ? 10 : 1;
      Contribution<float> const own{each.selections[channel.rank()], {scale, 2 * scale, 3 * scale}};
      make_sparse_allreduce<float>(find_algorithm(each.algorithm), {}, {})
          ->run(channel, own.view(), {.extent = 40, .k = 3, .limit = 3});
    });
  }
}

TEST(SparseAllgatherTest, AVectorOfTooManyEntriesAccusesItsSender) {
  expect_too_many_accuse(1, [](Channel& channel) {
    Contribution<float> const own{{1, 5, 9}, {1, 2, 3}};
    SparseAllgather<float>().run(channel, own.view(), 40, 3);
  });
}

}  // namespace
}  // namespace sparsecomm::test
