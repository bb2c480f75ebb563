// The lossless collectives: every algorithm, reduction and type against a plain computation,
// counted cost, and failures at every message.
#include "engine/sparse_collectives.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "allocations.h"
#include "collectives/patterns.h"
#include "engine/row_allreduce.h"
#include "ina/client.h"
#include "services.h"
#include "simulated_ranks.h"

namespace sparsecomm::test {
namespace {

template <class V>
struct Pairs {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  SparseView<V> view() const { return {indices, values}; }
};

// Which entries a rank has; all ranks can compute each other's. Values are small integers, so that
// sums and products of some are exact in every type.
struct Entries {
  char const* name;
  bool (*has)(int rank, int ranks, std::uint32_t index, std::uint32_t extent);
};

std::uint32_t mixed(std::uint32_t a, std::uint32_t b) {
  std::uint64_t x = (std::uint64_t{a} << 32 | b) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<std::uint32_t>(x >> 32);
}

constexpr Entries kinds[] = {
    {"random",
     [](int rank, int, std::uint32_t i, std::uint32_t) { return mixed(rank, i) % 9 == 0; }},
    {"none", [](int, int, std::uint32_t, std::uint32_t) { return false; }},
    {"all", [](int, int, std::uint32_t, std::uint32_t) { return true; }},
    {"only the last rank's", [](int rank, int ranks, std::uint32_t i,
                                std::uint32_t) { return rank == ranks - 1 && i % 3 == 0; }},
    {"one region", [](int rank, int, std::uint32_t i,
                      std::uint32_t extent) { return i < extent / 5 && mixed(rank, i) % 2 == 0; }},
    {"disjoint", [](int rank, int ranks, std::uint32_t i,
                    std::uint32_t) { return static_cast<int>(i) % (4 * ranks) == 4 * rank; }},
};

template <class V>
V value_at(int rank, std::uint32_t index) {
  int const x = static_cast<int>(mixed(rank + 100, index) % 5) - 2;
  return static_cast<V>(static_cast<float>(x == 0 ? 1 : x));
}

template <class V>
Pairs<V> entries_of(Entries const& kind, int rank, int ranks, std::uint32_t extent) {
  Pairs<V> pairs;
  for (std::uint32_t i = 0; i < extent; ++i) {
    if (!kind.has(rank, ranks, i, extent)) continue;
    pairs.indices.push_back(i);
    pairs.values.push_back(value_at<V>(rank, i));
  }
  return pairs;
}

template <class V>
std::vector<V> reduced(Entries const& kind, int ranks, std::uint32_t extent, Reduction reduction) {
  std::vector<V> result(extent, neutral<V>(reduction));
  visit_reduction<V>(reduction, [&](auto combine) {
    for (int rank = 0; rank < ranks; ++rank) {
      auto const pairs = entries_of<V>(kind, rank, ranks, extent);
      for (std::size_t i = 0; i < pairs.indices.size(); ++i) {
        V& value = result[pairs.indices[i]];
        value = combine(value, pairs.values[i]);
      }
    }
  });
  return result;
}

template <class V>
std::vector<V> expanded(StreamView<V> view, std::uint32_t extent, Reduction reduction) {
  if (view.is_dense) return {view.dense.begin(), view.dense.end()};
  std::vector<V> result(extent, neutral<V>(reduction));
  for (std::size_t i = 0; i < view.nnz(); ++i) {
    result[view.sparse.indices[i]] = view.sparse.values[i];
  }
  return result;
}

// Null, for "auto", and all that can.
std::vector<AlgorithmEntry const*> able() {
  std::vector<AlgorithmEntry const*> entries{nullptr};
  for (AlgorithmEntry const& entry : algorithms()) {
    if (can_reduce(entry)) entries.push_back(&entry);
  }
  return entries;
}

template <class T>
void check_allreduce(int ranks) {
  using V = accumulate_t<T>;
  auto const body = [&](Communicator& communicator) {
    int const rank = communicator.rank();
    auto const operation = std::make_shared<AllreduceOperation<T>>(communicator);
    for (auto const& [reduction, reduction_name] : reductions()) {
      for (AlgorithmEntry const* entry : able()) {
        for (Entries const& kind : kinds) {
          for (std::uint32_t const extent : {0u, 1u, 7u, 150u}) {
            SCOPED_TRACE(concat(entry == nullptr ? "auto" : entry->name, ' ', reduction_name,
                                " of ", name(dtype_of<T>()), ", P=", ranks, ", rank ", rank,
                                ", N=", extent, ", ", kind.name));
            auto const pairs = entries_of<V>(kind, rank, ranks, extent);
            auto const expected = reduced<V>(kind, ranks, extent, reduction);
            operation->configure({"form=sparse", extent, entry, reduction});
            operation->bind(pairs.view());
            communicator.run(operation);
            EXPECT_EQ(expanded(operation->result(), extent, reduction), expected);

            std::vector<T> data(extent, static_cast<T>(neutral<V>(reduction)));
            for (std::size_t i = 0; i < pairs.indices.size(); ++i) {
              data[pairs.indices[i]] = static_cast<T>(pairs.values[i]);
            }
            bool const average = reduction == Reduction::sum && !std::is_integral_v<T>;
            operation->configure({"form=dense", extent, entry, reduction, average});
            operation->bind(std::span(data));
            communicator.run(operation);
            for (std::uint32_t i = 0; i < extent; ++i) {
              V const value = average ? expected[i] / static_cast<V>(ranks) : expected[i];
              ASSERT_EQ(data[i], static_cast<T>(value)) << "at " << i;
            }
          }
        }
      }
    }
  };
  expect_no_errors(run_ranks(ranks, body, {}, {}, services_for("auto")));
}

class SparseCollectivesTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SparseCollectivesTest, testing::Values(1, 2, 3, 5));

TEST_P(SparseCollectivesTest, AllreduceIsTheReductionByEveryAlgorithm) {
  check_allreduce<float>(GetParam());
  check_allreduce<double>(GetParam());
  check_allreduce<Half>(GetParam());
  check_allreduce<BFloat16>(GetParam());
  check_allreduce<std::int32_t>(GetParam());
  check_allreduce<std::int64_t>(GetParam());
}

template <class V>
void check_gather_and_scatter(int ranks) {
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    int const rank = communicator.rank();
    auto const gather = std::make_shared<AllgatherOperation<V>>();
    auto const scatter = std::make_shared<ReduceScatterOperation<V>>();
    for (Entries const& kind : kinds) {
      for (std::uint32_t const extent : {0u, 1u, 40u, 151u}) {
        SCOPED_TRACE(concat(name(dtype_of<V>()), ", P=", ranks, ", rank ", rank, ", N=", extent,
                            ", ", kind.name));
        auto const pairs = entries_of<V>(kind, rank, ranks, extent);
        gather->configure({"", extent});
        gather->bind(pairs.view());
        communicator.run(gather);
        ASSERT_EQ(gather->result().size(), static_cast<std::size_t>(ranks));
        for (int peer = 0; peer < ranks; ++peer) {
          auto const expected = entries_of<V>(kind, peer, ranks, extent);
          SparseView<V> const got = gather->result()[peer];
          EXPECT_TRUE(std::ranges::equal(got.indices, expected.indices)) << "of rank " << peer;
          EXPECT_TRUE(std::ranges::equal(got.values, expected.values)) << "of rank " << peer;
        }
        for (auto const& [reduction, reduction_name] : reductions()) {
          scatter->configure({"", extent, nullptr, reduction}, ranks);
          scatter->bind(pairs.view());
          communicator.run(scatter);
          auto const all = reduced<V>(kind, ranks, extent, reduction);
          std::vector<V> expected(extent, neutral<V>(reduction));
          std::uint64_t const first = even_split(extent, ranks, rank);
          std::uint64_t const last = even_split(extent, ranks, rank + 1);
          std::copy(all.begin() + std::ptrdiff_t(first), all.begin() + std::ptrdiff_t(last),
                    expected.begin() + std::ptrdiff_t(first));
          SparseView<V> const got = scatter->result();
          EXPECT_EQ(expanded<V>({.sparse = got}, extent, reduction), expected) << reduction_name;
          EXPECT_EQ(got.range(first, last).nnz(), got.nnz());
        }
      }
    }
  }));
}

TEST_P(SparseCollectivesTest, AllgatherAndReduceScatterDeliverWhatTheyShould) {
  check_gather_and_scatter<float>(GetParam());
  check_gather_and_scatter<double>(GetParam());
  check_gather_and_scatter<std::int32_t>(GetParam());
  check_gather_and_scatter<std::int64_t>(GetParam());
}

TEST(ReduceScatterTest, RegionsMayBeGivenAndAnyOfThemEmpty) {
  int const ranks = 4;
  std::uint32_t const extent = 100;
  for (std::vector<std::uint32_t> const& boundaries :
       {std::vector<std::uint32_t>{0, 0, 100}, {10, 10, 90}, {100, 100, 100}, {1, 2, 3}}) {
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      int const rank = communicator.rank();
      auto const pairs = entries_of<float>(kinds[0], rank, ranks, extent);
      auto const operation = std::make_shared<ReduceScatterOperation<float>>();
      operation->configure({"", extent}, ranks, boundaries);
      operation->bind(pairs.view());
      communicator.run(operation);
      auto const all = reduced<float>(kinds[0], ranks, extent, Reduction::sum);
      auto const result = expanded<float>({.sparse = operation->result()}, extent, Reduction::sum);
      std::uint32_t const first = rank == 0 ? 0 : boundaries[rank - 1];
      std::uint32_t const last = rank == ranks - 1 ? extent : boundaries[rank];
      for (std::uint32_t i = 0; i < extent; ++i) {
        EXPECT_EQ(result[i], i >= first && i < last ? all[i] : 0) << "at " << i;
      }
      std::vector<std::uint32_t> own = boundaries;
      if (rank == 3) own = {5, 5, 5};
      operation->configure({"", extent}, ranks, own);
      EXPECT_THROW(communicator.run(operation), Mismatch);
    }));
  }
}

TEST(ReduceScatterTest, RefusesBoundariesThatSplitNothing) {
  ReduceScatterOperation<float> operation;
  for (std::vector<std::uint32_t> const& boundaries :
       {std::vector<std::uint32_t>{1}, {2, 1}, {1, 11}, {1, 2, 3}}) {
    EXPECT_THROW(operation.configure({"", 10}, 3, boundaries), InvalidArgument);
  }
}

// With a window smaller than the number of peers every buffer is used again.
TEST(ReduceScatterTest, AnyWindowGivesTheSame) {
  int const ranks = 7;
  for (int const window : {1, 2, 3, 5, 6, 100}) {
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      AlgorithmOptions options;
      options.window = window;
      auto const scatter = std::make_shared<ReduceScatterOperation<float>>(options);
      auto const pairs = entries_of<float>(kinds[0], communicator.rank(), ranks, 210);
      scatter->configure({"", 210}, ranks);
      scatter->bind(pairs.view());
      communicator.run(scatter);
      auto const all = reduced<float>(kinds[0], ranks, 210, Reduction::sum);
      auto const result = expanded<float>({.sparse = scatter->result()}, 210, Reduction::sum);
      for (int i = 30 * communicator.rank(); i < 30 * communicator.rank() + 30; ++i) {
        EXPECT_EQ(result[i], all[i]);
      }
    }));
  }
}

TEST(SparseCostTest, CountedMessagesAndBytesAreThoseOfTheFormula) {
  for (int ranks = 1; ranks <= 17; ++ranks) {
    // Every rank has four entries in every region.
    std::uint32_t const region = 50;
    std::uint32_t const extent = region * ranks;
    CostShape shape{ranks, extent, std::uint64_t{4} * ranks};
    shape.union_nnz = extent;  // a prediction, for even shares
    AlgorithmOptions options;
    options.frame = {IndexCodecChoice::raw32, false};
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      Pairs<float> pairs;
      for (std::uint32_t i = 0; i < shape.k; ++i) {
        pairs.indices.push_back(i / 4 * region + i % 4 * 10 + communicator.rank() % 10);
        pairs.values.push_back(1);
      }
      auto const check = [&](std::shared_ptr<Operation> const& operation, Cost cost) {
        for (int known = 0; known < 2; ++known) communicator.run(operation);
        Counters const before = communicator.counters();
        communicator.run(operation);
        Counters const after = communicator.counters();
        cost = cost + agreement_cost(ranks, sizeof(EntryCounts));
        EXPECT_EQ(Counters::total(after.sent_messages) - Counters::total(before.sent_messages),
                  cost.messages)
            << "P=" << ranks;
        EXPECT_EQ(Counters::total(after.received_bytes) - Counters::total(before.received_bytes),
                  cost.bytes)
            << "P=" << ranks;
      };
      auto const gather = std::make_shared<AllgatherOperation<float>>(options);
      gather->configure({"", extent});
      gather->bind(pairs.view());
      check(gather, sparse_allgather_cost(shape));
      auto const scatter = std::make_shared<ReduceScatterOperation<float>>(options);
      scatter->configure({"", extent}, ranks);
      scatter->bind(pairs.view());
      check(scatter, split_reduce_cost(shape, options));
    }));
  }
}

// By their bytes: of a result that is received from everybody, and of all entries.
TEST(AutoTest, PredictsWithTheFiguresOfTheCommunicator) {
  int const ranks = 4;
  std::uint32_t const extent = 1 << 16;
  Figures const link_bound{{1e-6, 0, 1e-6}, {0, 0, 0, 1e-10, 0, 1e-9, 1e-9, 1e-10}};
  Figures const merge_bound{{1e-6, 0, 1e-12}, {0, 0, 0, 1e-10, 0, 1e-3, 1e-9, 1e-10}};
  double const dense_bytes = 2.0 * extent * 4 * (ranks - 1) / ranks;
  auto const received = [&](Figures const& figures, std::uint32_t nnz, bool dense_data) {
    double most = 0;
    CommunicatorOptions options;
    options.figures = std::make_shared<Figures const>(figures);
    std::mutex mutex;
    expect_no_errors(run_ranks(
        ranks,
        [&](Communicator& communicator) {
          Pairs<float> pairs;
          for (std::uint32_t i = 0; i < nnz; ++i) {
            pairs.indices.push_back(i * (extent / nnz));
            pairs.values.push_back(1);
          }
          std::vector<float> data =
              expanded<float>({.sparse = pairs.view()}, extent, Reduction::sum);
          auto const operation = std::make_shared<AllreduceOperation<float>>(communicator);
          operation->configure({"", extent});
          if (dense_data) {
            operation->bind(std::span(data));
          } else {
            operation->bind(pairs.view());
          }
          communicator.run(operation);
          std::lock_guard const lock(mutex);
          most = std::max(
              most, static_cast<double>(Counters::total(communicator.counters().received_bytes)));
        },
        options));
    return most;
  };
  for (bool const dense_data : {false, true}) {
    EXPECT_LT(received(link_bound, extent / 100, dense_data), 0.2 * dense_bytes);
    EXPECT_GT(received(merge_bound, extent / 100, dense_data), 0.99 * dense_bytes);
    EXPECT_GT(received(link_bound, extent, dense_data), 0.99 * dense_bytes);
  }
}

// As many entries in a few blocks, and in all of them: where merging entries is slow, and so are
// aggregators, but not where most blocks are zero.
template <class T>
void check_use_of_aggregators() {
  constexpr int ranks = 4;
  constexpr std::size_t extent = 1 << 16, block = 256, share = 64;
  Figures figures{{0, 0, 8e-9}, {1e-10, 1e-10, 1e-10, 1e-10, 1e-5, 1e-5, 1e-5, 1e-10}};
  figures.aggregators.byte = 3e-8;
  CommunicatorOptions options;
  options.figures = std::make_shared<Figures const>(figures);
  expect_no_errors(run_ranks(
      ranks,
      [&](Communicator& communicator) {
        auto const operation = std::make_shared<AllreduceOperation<T>>(communicator);
        operation->configure({"", extent});
        for (bool const in_blocks : {true, false, true}) {
          auto const held = [&](std::size_t i) {
            return (in_blocks ? i / block : i) % share == 0 ? 1.0f : 0.0f;
          };
          std::vector<T> data(extent);
          for (std::size_t i = 0; i < extent; ++i) data[i] = static_cast<T>(held(i));
          InaClient const& client = *communicator.services().aggregators;
          std::uint64_t const before = client.received_bytes();
          operation->bind(std::span(data));
          communicator.run(operation);
          for (std::size_t i = 0; i < extent; ++i) {
            ASSERT_EQ(static_cast<float>(data[i]), ranks * held(i));
          }
          EXPECT_EQ(client.received_bytes() > before, in_blocks);
        }
      },
      options, {}, services_for("ina")));
}

TEST(AutoTest, AggregatorsAreUsedWhereBlocksAreZero) {
  check_use_of_aggregators<float>();
  check_use_of_aggregators<double>();
  check_use_of_aggregators<Half>();
}

// Blocks are counted and priced in a unit that ranks must share.
TEST(AutoTest, RanksWithOtherBlocksDisagree) {
  auto const errors = run_ranks(
      2,
      [&](Communicator& communicator) {
        AlgorithmOptions options;
        if (communicator.rank() == 1) options.block_bytes = 64;
        auto const operation = std::make_shared<AllreduceOperation<float>>(communicator, options);
        operation->configure({"", 100});
        std::vector<float> data(100, 1.0f);
        operation->bind(std::span(data));
        communicator.run(operation);
      },
      patient_options(), {}, services_for("ina"));
  for (std::exception_ptr const& error : errors) {
    EXPECT_NE(message_of(error).find("block_bytes"), std::string::npos) << message_of(error);
  }
}

TEST(AutoTest, MeasuresTheFiguresOnce) {
  int const ranks = 3;
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    auto const operation = std::make_shared<AllreduceOperation<float>>(communicator);
    auto const sent = [&] {
      std::vector<float> data(100, 1.0f);
      operation->configure({"", data.size()});
      operation->bind(std::span(data));
      std::uint64_t const before = Counters::total(communicator.counters().sent_messages);
      communicator.run(operation);
      EXPECT_EQ(data, std::vector<float>(100, 3.0f));
      return Counters::total(communicator.counters().sent_messages) - before;
    };
    std::uint64_t const first = sent();
    EXPECT_GT(first, sent() + 10);
    std::uint64_t const third = sent();  // all is known from then on
    EXPECT_EQ(sent(), third);
  }));
}

// On one rank, whose algorithms need nobody.
TEST(AutoTest, PredictsAndAllocatesOnceForAsManyEntries) {
  CommunicatorOptions options;
  options.figures = std::make_shared<Figures const>(
      Figures{{1e-4, 1e-5, 1e-8}, {1e-10, 1e-9, 1e-8, 4e-10, 1e-9, 4e-9, 2e-9, 1e-9}});
  expect_no_errors(run_ranks(
      1,
      [&](Communicator& communicator) {
        auto const transports = make_inproc_transports(1);
        AllreduceOperation<float> operation(communicator);
        Pairs<float> const pairs = entries_of<float>(kinds[0], 0, 1, 5000);
        operation.configure({"", 5000});
        bool first = true;
        for (std::uint64_t const entries : {505u, 505u, 500u, 490u}) {
          EntryCounts const counts(entries);
          operation.bind(pairs.view().slice(0, entries));
          Channel channel(*transports[0], 1, Deadline(steady_clock(), long_time()));
          allocations = 0;
          counting = true;
          operation.run(channel, {.payload = payload_of(counts)});
          counting = false;
          EXPECT_EQ(allocations > 0, std::exchange(first, false)) << entries;
        }
      },
      options));
}

TEST(AutoTest, RefusesWhatIsNotExactAndListsWhatIs) {
  for (auto const& [name, reason] : {std::pair{"oktopk", "algorithm 'oktopk' is not exact"},
                                     {"nothing", "algorithm 'nothing' is unknown"}}) {
    try {
      find_reducing(name);
      ADD_FAILURE() << name << " passed";
    } catch (InvalidArgument const& error) {
      std::string const text = error.what();
      EXPECT_EQ(text.find(reason), 0u) << text;
      EXPECT_NE(text.find("choose one of auto, dense, "), std::string::npos) << text;
    }
  }
  EXPECT_EQ(find_reducing("auto"), nullptr);
}

// The operations under test by name, over 60 entries a rank.
constexpr std::uint32_t failing_extent = 600;

struct Victim {
  std::shared_ptr<Operation> operation;
  Pairs<float> pairs;
  std::vector<std::uint64_t> positions;  // of rows
  std::vector<float> data;
};

Victim make_victim(std::string const& kind, Communicator& communicator) {
  int const rank = communicator.rank();
  int const ranks = communicator.size();
  Victim victim;
  victim.pairs = entries_of<float>(kinds[0], rank, ranks, failing_extent);
  if (kind == "allgather") {
    auto const operation = std::make_shared<AllgatherOperation<float>>();
    operation->configure({"", failing_extent});
    operation->bind(victim.pairs.view());
    victim.operation = operation;
  } else if (kind == "reduce-scatter") {
    auto const operation = std::make_shared<ReduceScatterOperation<float>>();
    operation->configure({"", failing_extent}, ranks);
    operation->bind(victim.pairs.view());
    victim.operation = operation;
  } else if (kind == "rows") {
    auto const operation = std::make_shared<RowAllreduce<float>>();
    RowConfig config;
    config.count = failing_extent;
    operation->configure(std::move(config));
    victim.positions.assign(victim.pairs.indices.begin(), victim.pairs.indices.end());
    operation->bind({victim.positions, victim.pairs.values});
    victim.operation = operation;
  } else {
    auto const operation = std::make_shared<AllreduceOperation<float>>(communicator);
    operation->configure({"", failing_extent, find_reducing(kind)});
    victim.data = expanded<float>({.sparse = victim.pairs.view()}, failing_extent, Reduction::sum);
    operation->bind(std::span(victim.data));
    victim.operation = operation;
  }
  return victim;
}

class SparseFailureTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Operations, SparseFailureTest, testing::ValuesIn([] {
                           std::vector<std::string> names{"allgather", "reduce-scatter", "rows"};
                           for (AlgorithmEntry const& entry : algorithms()) {
                             if (can_reduce(entry)) names.emplace_back(entry.name);
                           }
                           return names;
                         }()),
                         [](auto const& info) {
                           std::string text = info.param;
                           std::ranges::replace(text, '-', '_');
                           return text;
                         });

// A fault at every message of rank 1: each survivor names it in that operation or, where it needs
// nothing more from it, in a later one, and its dense vector is as it was.
TEST_P(SparseFailureTest, EverySurvivorNamesTheCulpritAndKeepsItsData) {
  int const culprit = 1;
  auto const entries = algorithms();
  bool const is_algorithm =
      std::ranges::find(entries, GetParam(), &AlgorithmEntry::name) != entries.end();
  auto const around = [&](Runtime runtime) {
    return is_algorithm ? services_for(GetParam(), runtime) : Surroundings{};
  };
  for (int const ranks : {2, 3, 4}) {
    std::uint64_t messages = 0;
    auto const count = [&](Communicator& communicator) {
      auto const victim = make_victim(GetParam(), communicator);
      communicator.run(victim.operation);
      if (communicator.rank() == culprit)
        messages = Counters::total(communicator.counters().sent_messages);
    };
    expect_no_errors(run_ranks(ranks, count, patient_options(), {}, around({})));
    ASSERT_GE(messages, 2u);
    for (auto const kind :
         {FaultKind::die, FaultKind::corrupt, FaultKind::truncate, FaultKind::delay}) {
      for (std::uint64_t message = 0; message < messages; ++message) {
        SCOPED_TRACE(concat("P=", ranks, ", fault ", int(kind), " at message ", message));
        std::vector<std::vector<int>> culprits(ranks);
        SeededSimulation simulation(message);
        expect_no_errors(simulate_ranks(
            simulation, ranks,
            [&](Communicator& communicator) {
              int const rank = communicator.rank();
              for (int step = 0; step < 3; ++step) {
                auto victim = make_victim(GetParam(), communicator);
                auto const before = victim.data;
                try {
                  communicator.submit(victim.operation).wait();
                } catch (PeerError const& error) {
                  culprits[rank] = error.ranks();
                  EXPECT_EQ(victim.data, before) << "rank " << rank;
                  EXPECT_THROW(communicator.run(victim.operation), Aborted);
                  return;
                } catch (Error const& error) {
                  EXPECT_EQ(rank, culprit) << error.what();
                  return;
                }
              }
            },
            {}, RankFault{culprit, {kind, message}}, around(simulation)));
        for (int rank = 0; rank < ranks; ++rank) {
          if (rank != culprit) {
            EXPECT_EQ(culprits[rank], std::vector{culprit}) << "rank " << rank;
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST(SparseCollectivesMismatchTest, SaysWhatDiffersEverywhereAndGoesOn) {
  int const ranks = 3;
  std::vector<std::string> messages(ranks);
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    int const rank = communicator.rank();
    auto const operation = std::make_shared<AllreduceOperation<float>>(communicator);
    auto const attempt = [&](Reduction reduction) {
      auto const pairs = entries_of<float>(kinds[0], rank, ranks, 50);
      operation->configure({"shape=[50]", 50, nullptr, reduction});
      operation->bind(pairs.view());
      communicator.run(operation);
    };
    try {
      attempt(rank == 2 ? Reduction::max : Reduction::sum);
      ADD_FAILURE() << "rank " << rank << " did not notice";
    } catch (Mismatch const& mismatch) {
      messages[rank] = mismatch.what();
    }
    attempt(Reduction::sum);
  }));
  for (std::string const& message : messages) {
    EXPECT_NE(message.find("reduction: max on rank 2 but sum on ranks 0, 1"), std::string::npos)
        << message;
  }
}

TEST(SparseCollectivesMismatchTest, TakesOneFormFromAllRanks) {
  int const ranks = 2;
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    auto const operation = std::make_shared<AllreduceOperation<float>>(communicator);
    auto const pairs = entries_of<float>(kinds[0], communicator.rank(), ranks, 50);
    std::vector<float> dense(50);
    operation->configure({"", 50});
    if (communicator.rank() == 0) {
      operation->bind(pairs.view());
    } else {
      operation->bind(std::span(dense));
    }
    EXPECT_THROW(communicator.run(operation), Mismatch);
  }));
}

TEST(SparseCollectivesOrderTest, SeveralAreInFlightAndCompleteInOrder) {
  int const ranks = 3;
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    int const rank = communicator.rank();
    std::vector<std::shared_ptr<AllreduceOperation<double>>> operations;
    std::vector<Communicator::Handle> handles;
    std::vector<Pairs<double>> inputs;
    std::vector<int> ended;
    for (int i = 0; i < 20; ++i) {
      inputs.push_back(entries_of<double>(kinds[i % 6], rank, ranks, 100));
      operations.push_back(std::make_shared<AllreduceOperation<double>>(communicator));
      operations.back()->configure({"", 100});
    }
    for (int i = 0; i < 20; ++i) {
      operations[i]->bind(inputs[i].view());
      handles.push_back(communicator.submit(
          operations[i], [&ended, i](std::exception_ptr const&) { ended.push_back(i); }));
    }
    for (int i = 19; i >= 0; --i) {
      handles[i].wait();
      EXPECT_EQ(expanded(operations[i]->result(), 100, Reduction::sum),
                reduced<double>(kinds[i % 6], ranks, 100, Reduction::sum));
    }
    EXPECT_EQ(ended.size(), 20u);
    EXPECT_TRUE(std::ranges::is_sorted(ended));
  }));
}

}  // namespace
}  // namespace sparsecomm::test
