// Operations that are exchanged as segments of one.
#include "engine/fusion.h"

#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/planner.h"
#include "engine/sparse_collectives.h"
#include "ranks.h"
#include "recorded.h"
#include "simulated_ranks.h"
#include "uncounted.h"

namespace sparsecomm::test {
namespace {

class Member final : public Fusible {
 public:
  explicit Member(Terms const& terms) : terms_(terms) {}
  Terms const& terms() const override { return terms_; }

 private:
  Terms terms_;
};

Fusible::Terms terms(std::uint64_t bytes, std::uint64_t extent = 10) {
  return {.algorithm = &find_algorithm("topk_a"), .extent = extent, .bytes = bytes};
}

std::vector<std::vector<int>> groups_of(Fusion& fusion, std::vector<Fusible::Terms> const& all) {
  std::vector<Member> members(all.begin(), all.end());
  fusion.clear();
  for (Member& member : members) {
    fusion.add(member.terms().algorithm == nullptr ? nullptr : &member);
  }
  std::vector<std::vector<int>> groups(all.size());
  for (std::size_t place = 0; place < all.size(); ++place) {
    for (Fusible* const each : fusion.led_by(place)) {
      int const member = static_cast<int>(static_cast<Member*>(each) - members.data());
      EXPECT_EQ(fusion.leader_of(member).value_or(member), place);
      groups[place].push_back(member);
    }
  }
  return groups;
}

TEST(FusionTest, PutsTogetherWhatIsOfOneKindAndFits) {
  using Groups = std::vector<std::vector<int>>;
  Fusible::Terms other = terms(10), wide = terms(10), most = terms(10);
  other.algorithm = &find_algorithm("ssar_recursive_double");
  wide.dtype = DType::f64;
  most.reduction = Reduction::max;
  Fusion fusion(100);
  EXPECT_EQ(groups_of(fusion, {terms(10), terms(10)}), (Groups{{0, 1}, {}}));
  EXPECT_EQ(groups_of(fusion, {terms(10), other, wide, most, terms(10), other}),
            (Groups{{0, 4}, {1, 5}, {}, {}, {}, {}}));
  EXPECT_EQ(groups_of(fusion, {terms(60), terms(50), terms(40), terms(1), terms(49), terms(1)}),
            (Groups{{}, {1, 2, 3}, {}, {}, {4, 5}, {}}));
  EXPECT_EQ(groups_of(fusion, {terms(101), terms(0), terms(100)}), (Groups{{}, {1, 2}, {}}));
  EXPECT_EQ(groups_of(fusion, {terms(1), {}, terms(1)}), (Groups{{0, 2}, {}, {}}));
  EXPECT_EQ(groups_of(fusion, {terms(1, 0xfffffff0), terms(1, 0xe)}), (Groups{{0, 1}, {}}));
  EXPECT_EQ(groups_of(fusion, {terms(1, 0xfffffff0), terms(1, 0xf)}), (Groups{{}, {}}));
  Fusion none(0);
  EXPECT_EQ(groups_of(none, {terms(1), terms(1)}), (Groups{{}, {}}));
  none.clear();
  EXPECT_TRUE(none.led_by(0).empty()) << "nothing was added";
}

// Another operation, during which its thread counts what it allocates, from the first one's
// prepare() to the end of the last one's run().
class Counted final : public Operation {
 public:
  enum class Place : std::uint8_t { first, between, last };
  Counted(std::shared_ptr<Operation> inner, Place place)
      : inner_(std::move(inner)), place_(place) {}

  Proposal prepare() override {
    if (place_ == Place::first) {
      allocations = 0;
      counting = true;
    }
    return inner_->prepare();
  }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return inner_->merge(into, other);
  }
  Fusible* fusible(std::span<const std::byte> payload) override { return inner_->fusible(payload); }
  void run(Channel& channel, Agreement const& agreement) override {
    inner_->run(channel, agreement);
    if (place_ != Place::last) return;
    counting = false;
    counted = allocations;
  }

  std::size_t counted = 0;

 private:
  std::shared_ptr<Operation> inner_;
  Place place_;
};

// One rank's part of an allreduce, and its result as all values.
template <class T>
class Case {
 public:
  using V = accumulate_t<T>;

  Case(Communicator& communicator, std::uint32_t extent, CollectiveConfig config)
      : operation_(std::make_shared<AllreduceOperation<T>>(communicator)),
        extent_(extent),
        reduction_(config.reduction) {
    config.extent = extent;
    operation_->configure(std::move(config));
  }

  std::shared_ptr<Operation> operation() const { return operation_; }

  void contribute(std::vector<V> const& values, bool dense) {
    dense_ = dense;
    data_.clear();
    pairs_.clear();
    for (std::uint32_t i = 0; i < extent_; ++i) {
      data_.push_back(static_cast<T>(values[i]));
      if (values[i] != neutral<V>(reduction_)) pairs_.push(i, values[i]);
    }
    dense ? operation_->bind(std::span<T>(data_)) : operation_->bind(pairs_.view());
  }

  std::vector<V> result() const {
    std::vector<V> all(extent_, neutral<V>(reduction_));
    if (dense_) {
      std::ranges::transform(data_, all.begin(), [](T x) { return static_cast<V>(x); });
    } else if (operation_->result().is_dense) {
      std::ranges::copy(operation_->result().dense, all.begin());
    } else {
      auto const& [indices, values] = operation_->result().sparse;
      for (std::size_t i = 0; i < indices.size(); ++i) all[indices[i]] = values[i];
    }
    return all;
  }

 private:
  std::shared_ptr<AllreduceOperation<T>> operation_;
  std::uint32_t extent_;
  Reduction reduction_;
  bool dense_ = false;
  std::vector<T> data_;
  Pairs<V> pairs_;
};

// Values that T holds, in most places none.
template <class T>
std::vector<accumulate_t<T>> draw_values(std::mt19937_64& random, std::size_t count, double density,
                                         Reduction reduction) {
  using V = accumulate_t<T>;
  std::normal_distribution<double> normal(0, 3);
  std::uniform_real_distribution<double> uniform;
  std::vector<V> values(count, neutral<V>(reduction));
  for (V& value : values) {
    if (uniform(random) < density) value = static_cast<V>(static_cast<T>(V(normal(random))));
  }
  return values;
}

// Of a zero the sign is not told, since whether there is an entry is not either.
template <class V>
bool same_bits(V a, V b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (a == V{0} && b == V{0});
}

template <class T>
int count_that_depend_on_place(Communicator& communicator, AlgorithmEntry const& entry, bool dense,
                               double density, Reduction reduction) {
  using V = accumulate_t<T>;
  constexpr std::uint32_t extent = 500;
  std::mt19937_64 random(static_cast<std::uint64_t>(communicator.rank()) + 77);
  auto const values = draw_values<T>(random, extent, density, reduction);
  auto const reduced_between = [&](std::uint32_t before, std::uint32_t after) {
    Case<T> one(communicator, before + extent + after,
                {.algorithm = &entry, .reduction = reduction});
    auto whole = draw_values<T>(random, before, 0.02, reduction);
    auto const behind = draw_values<T>(random, after, 0.7, reduction);
    whole.insert(whole.end(), values.begin(), values.end());
    whole.insert(whole.end(), behind.begin(), behind.end());
    one.contribute(whole, dense);
    communicator.run(one.operation());
    auto const result = one.result();
    return std::vector<V>(result.begin() + before, result.begin() + before + extent);
  };
  auto const alone = reduced_between(0, 0);
  int differ = 0;
  for (auto const& [before, after] : {std::pair(300u, 0u), {0u, 900u}, {77u, 4321u}}) {
    auto const among = reduced_between(before, after);
    for (std::size_t i = 0; i < extent; ++i) differ += !same_bits(among[i], alone[i]);
  }
  return differ;
}

TEST(FusibleTest, AnEntryHasTheSameBitsWhereverItLies) {
  std::set<std::string_view> depend;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (!can_reduce(entry) || entry.needs != Needs::nothing) continue;
    for (int const ranks : {2, 3, 4, 5, 6, 7, 8}) {
      std::atomic<int> differ = 0;
      expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
        for (bool const dense : {false, true}) {
          for (double const density : {0.02, 0.3, 1.0}) {
            for (Reduction const reduction : {Reduction::sum, Reduction::product, Reduction::max}) {
              differ +=
                  count_that_depend_on_place<float>(communicator, entry, dense, density, reduction);
            }
            differ += count_that_depend_on_place<Half>(communicator, entry, dense, density,
                                                       Reduction::sum);
          }
        }
      }));
      if (differ > 0) depend.insert(entry.name);
      if (entry.fusible) {
        EXPECT_EQ(differ, 0) << entry.name << " on " << ranks << " ranks";
      }
    }
  }
  // So that the test can see it.
  EXPECT_TRUE(depend.contains("dense_ring"));
}

// Blocks the thread that runs operations until it is opened.
class Gate final : public Operation {
 public:
  Proposal prepare() override {
    reached.set_value();
    open.get_future().wait();
    return {.text = "operation=gate"};
  }
  void run(Channel& /*channel*/, Agreement const& /*agreement*/) override {}

  std::promise<void> reached, open;
};

// Submits all in this order, so that they are ready together, and waits for them.
void run_together(Communicator& communicator,
                  std::vector<std::pair<std::string, std::shared_ptr<Operation>>> const& all) {
  auto const gate = std::make_shared<Gate>();
  std::vector<Communicator::Handle> handles{communicator.submit(gate, {}, "gate")};
  gate->reached.get_future().wait();
  for (auto const& [name, operation] : all) {
    handles.push_back(communicator.submit(operation, {}, name));
  }
  gate->open.set_value();
  for (auto const& handle : handles) handle.wait();
}

CommunicatorOptions fusing(std::size_t bytes) {
  CommunicatorOptions options = patient_options();
  options.fusion_bytes = bytes;
  auto figures = std::make_shared<Figures>();
  figures->link = {.round = 1e-4, .message = 1e-6, .byte = 1e-9};
  figures->rates.merge = figures->rates.reduce = 1e-9;
  options.figures = figures;
  return options;
}

// The coordinator's part of it, and that of the operations.
TEST(FusionTest, ARoundAllocatesNothingOnceItsBuffersAreThere) {
  constexpr std::size_t count = 12;
  for (std::size_t const limit : {std::size_t{0}, std::size_t{1} << 20}) {
    expect_no_errors(run_ranks(
        4,
        [&](Communicator& communicator) {
          std::vector<std::unique_ptr<Case<float>>> cases;
          for (std::size_t i = 0; i < count; ++i) {
            auto const* const entry =
                &find_algorithm(i % 2 == 0 ? "topk_a" : "ssar_recursive_double");
            cases.push_back(std::make_unique<Case<float>>(communicator, 500,
                                                          CollectiveConfig{.algorithm = entry}));
            std::vector<float> values(500);
            for (std::size_t j = i; j < values.size(); j += 17) values[j] = 1.0f;
            cases.back()->contribute(values, /*dense=*/false);
          }
          for (int step = 0; step < 8; ++step) {
            std::vector<std::pair<std::string, std::shared_ptr<Operation>>> all;
            std::shared_ptr<Counted> counted;
            for (std::size_t i = 0; i < count; ++i) {
              using Place = Counted::Place;
              auto const place = i == 0          ? Place::first
                                 : i + 1 < count ? Place::between
                                                 : Place::last;
              counted = std::make_shared<Counted>(cases[i]->operation(), place);
              all.emplace_back(concat("a name that is not short ", 10 + i), counted);
            }
            run_together(communicator, all);
            if (step >= 4) {
              EXPECT_EQ(counted->counted, 0u) << "step " << step << ", limit " << limit;
            }
          }
        },
        fusing(limit), {},
        [](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
          return std::make_unique<UncountedTransport>(std::move(transport));
        }));
  }
}

// Results of many allreduces of all kinds, which each rank submits in an order of its own.
template <class T>
void add_results(Communicator& communicator, bool together,
                 std::map<std::string, std::vector<double>>& results) {
  constexpr int count = 60;
  int const rank = communicator.rank();
  std::vector<AlgorithmEntry const*> choices{nullptr};
  for (AlgorithmEntry const& entry : algorithms()) {
    if (can_reduce(entry) && entry.needs == Needs::nothing) choices.push_back(&entry);
  }
  std::vector<Case<T>> cases;
  std::vector<std::pair<std::string, std::shared_ptr<Operation>>> named;
  std::mt19937_64 shared(5);
  for (int i = 0; i < count; ++i) {
    auto const extent = static_cast<std::uint32_t>(shared() % 300);
    auto const reduction = std::array{Reduction::sum, Reduction::sum, Reduction::max}[i % 3];
    bool const average = i % 9 == 0 && !std::is_integral_v<T>;
    auto const* const algorithm = i % 2 == 0 ? nullptr : choices[i / 2 % choices.size()];
    cases.emplace_back(
        communicator, extent,
        CollectiveConfig{.algorithm = algorithm, .reduction = reduction, .average = average});
    named.emplace_back(concat("tensor ", i), cases.back().operation());
  }
  std::mt19937_64 own(static_cast<std::uint64_t>(rank) + (together ? 1000 : 0));
  for (int step = 0; step < 4; ++step) {
    for (int i = 0; i < count; ++i) {
      std::mt19937_64 random(static_cast<std::uint64_t>(1000 * step + 10 * i + rank));
      auto const reduction = std::array{Reduction::sum, Reduction::sum, Reduction::max}[i % 3];
      std::size_t const extent = cases[i].result().size();
      double const density = std::array{0.05, 0.3, 1.0}[(i + step) % 3];
      cases[i].contribute(draw_values<T>(random, extent, density, reduction), i % 4 < 2);
    }
    std::ranges::shuffle(named, own);
    run_together(communicator, named);
    for (int i = 0; i < count; ++i) {
      auto& all = results[concat(name(dtype_of<T>()), " tensor ", i)];
      for (auto const x : cases[i].result()) all.push_back(static_cast<double>(x));
    }
  }
}

TEST(FusionTest, ResultsAreThoseOfEachAlone) {
  for (int const ranks : {1, 2, 3, 4, 7}) {
    std::map<std::size_t, std::vector<std::map<std::string, std::vector<double>>>> by_limit;
    for (std::size_t const limit : {std::size_t{0}, std::size_t{2000}, std::size_t{1} << 20}) {
      auto& results = by_limit[limit];
      results.resize(static_cast<std::size_t>(ranks));
      expect_no_errors(run_ranks(
          ranks,
          [&](Communicator& communicator) {
            auto& own = results[static_cast<std::size_t>(communicator.rank())];
            add_results<float>(communicator, limit > 0, own);
            add_results<double>(communicator, limit > 0, own);
            add_results<BFloat16>(communicator, limit > 0, own);
            add_results<std::int64_t>(communicator, limit > 0, own);
          },
          fusing(limit)));
      for (auto const& [name, values] : by_limit[0][0]) {
        for (auto const& rank : results) {
          auto const& theirs = rank.at(name);
          ASSERT_EQ(theirs.size(), values.size());
          for (std::size_t i = 0; i < values.size(); ++i) {
            EXPECT_TRUE(same_bits(theirs[i], values[i]))
                << name << " entry " << i << ", limit " << limit << ", " << ranks << " ranks";
          }
        }
      }
    }
  }
}

// Halves are summed as floats, and so go with them.
TEST(FusionTest, TypesThatAreSummedAlikeGoTogether) {
  for (bool const dense : {false, true}) {
    std::vector<std::vector<float>> alone;
    std::uint64_t messages[2] = {};
    for (std::size_t const limit : {std::size_t{0}, std::size_t{1} << 20}) {
      expect_no_errors(run_ranks(
          2,
          [&](Communicator& communicator) {
            CollectiveConfig const config{.algorithm = &find_algorithm("topk_a"), .average = true};
            Case<float> one(communicator, 300, config);
            Case<Half> two(communicator, 200, config);
            Case<BFloat16> three(communicator, 100, config);
            std::uint64_t before = 0;
            for (int step = 0; step < 2; ++step) {
              std::mt19937_64 random(static_cast<std::uint64_t>(communicator.rank()));
              one.contribute(draw_values<float>(random, 300, 0.3, Reduction::sum), dense);
              two.contribute(draw_values<Half>(random, 200, 0.3, Reduction::sum), dense);
              three.contribute(draw_values<BFloat16>(random, 100, 0.3, Reduction::sum), dense);
              before = Traffic::of(communicator.counters()).messages;
              run_together(communicator, {{"one", one.operation()},
                                          {"two", two.operation()},
                                          {"three", three.operation()}});
            }
            if (communicator.rank() != 0) return;
            messages[limit > 0] = Traffic::of(communicator.counters()).messages - before;
            std::vector<std::vector<float>> const results{one.result(), two.result(),
                                                          three.result()};
            if (limit == 0) alone = results;
            EXPECT_EQ(results, alone);
          },
          fusing(limit)));
    }
    EXPECT_EQ(messages[0], messages[1] + 2);
  }
}

TEST(FusionTest, ATimelineShowsWhoExchangesForWhom) {
  Recorders const recorders(2);
  for (auto const& recorder : recorders.all) recorder->set_recording(1);
  expect_no_errors(run_ranks(
      2,
      [](Communicator& communicator) {
        std::vector<Case<float>> cases;
        std::vector<std::pair<std::string, std::shared_ptr<Operation>>> named;
        for (int i = 0; i < 3; ++i) {
          cases.emplace_back(communicator, 10,
                             CollectiveConfig{.algorithm = &find_algorithm("topk_a")});
          cases.back().contribute(std::vector<float>(10, 1.0f), /*dense=*/false);
          named.emplace_back(concat("tensor ", i), cases.back().operation());
        }
        for (int step = 0; step < 2; ++step) run_together(communicator, named);
      },
      fusing(1000), std::nullopt, recorders.around()));
  for (auto const& recorder : recorders.all) {
    auto const leader = recorder->of("tensor 0");
    EXPECT_TRUE(names(leader).ends_with("negotiate prepare queue run")) << names(leader);
    for (std::string const name : {"tensor 1", "tensor 2"}) {
      auto const slices = recorder->of(name);
      EXPECT_TRUE(names(slices).ends_with("negotiate prepare queue fused run")) << names(slices);
      TimelineEvent const& fused = slices[slices.size() - 2];
      EXPECT_EQ(fused.figures[0], leader.back().row);
      EXPECT_EQ(fused.begin, leader.back().begin);
      EXPECT_GE(fused.end, leader.back().end);
    }
  }
}

TEST(FusionTest, RanksThatHaveOtherLimitsSaySo) {
  Surroundings around;
  around.equip = [](CommunicatorOptions& options, std::uint64_t, int rank, int) {
    options.fusion_bytes = rank == 0 ? 0 : 100;
  };
  auto const errors = run_ranks(
      2,
      [](Communicator& communicator) {
        Case<float> one(communicator, 10, {.algorithm = &find_algorithm("topk_a")});
        one.contribute(std::vector<float>(10), false);
        communicator.run(one.operation());
      },
      patient_options(), std::nullopt, around);
  for (auto const& error : errors) {
    EXPECT_NE(message_of(error).find("fusion_bytes"), std::string::npos) << message_of(error);
  }
}

// Which of two zeros is the larger depends on who meets whom, and so on the place of an entry.
TEST(FusionTest, TheSignOfTheLargestZeroDoesNotDependOnIt) {
  constexpr std::uint32_t extent = 9;
  for (bool const dense : {false, true}) {
    for (auto const algorithm : {"topk_a", "ssar_recursive_double", "dense_rabenseifner"}) {
      std::vector<std::vector<bool>> signs;
      for (std::size_t const limit : {std::size_t{0}, std::size_t{1} << 20}) {
        expect_no_errors(run_ranks(
            4,
            [&](Communicator& communicator) {
              std::vector<Case<float>> cases;
              std::vector<std::pair<std::string, std::shared_ptr<Operation>>> named;
              for (int i = 0; i < 4; ++i) {
                cases.emplace_back(communicator, extent,
                                   CollectiveConfig{.algorithm = find_reducing(algorithm),
                                                    .reduction = Reduction::max});
                named.emplace_back(concat("tensor ", i), cases.back().operation());
              }
              for (int step = 0; step < 2; ++step) {
                float const zero = communicator.rank() % 2 == 0 ? 0.0f : -0.0f;
                for (auto& each : cases) each.contribute(std::vector<float>(extent, zero), dense);
                run_together(communicator, named);
              }
              if (communicator.rank() != 0) return;
              std::vector<bool> found;
              for (auto const& each : cases) {
                for (float const x : each.result()) found.push_back(std::signbit(x));
              }
              signs.push_back(found);
            },
            fusing(limit)));
      }
      EXPECT_EQ(signs[0], signs[1]) << algorithm;
    }
  }
}

// Each rank may send what all have contributed.
TEST(FusionTest, ItsLimitLeavesRoomForAllRanks) {
  constexpr std::uint64_t most = std::numeric_limits<std::uint32_t>::max();
  for (int const ranks : {1, 4}) {
    expect_no_errors(run_ranks(
        ranks,
        [&](Communicator& communicator) {
          std::uint64_t const limit = communicator.fusion_bytes();
          EXPECT_LE(limit * static_cast<std::uint64_t>(2 * ranks), most);
          EXPECT_GT(limit * static_cast<std::uint64_t>(3 * ranks), most);
        },
        fusing(most)));
  }
}

constexpr int fault_steps = 3, fault_tensors = 4;

// Sums of a few dense tensors in each step, until one fails: what of them did not get its sum is as
// it was. Returns the ranks that are blamed.
std::vector<int> sum_until_failure(Communicator& communicator) {
  float const rank = static_cast<float>(communicator.rank());
  float const ranks = static_cast<float>(communicator.size());
  std::vector<int> blamed;
  for (int step = 0; step < fault_steps && blamed.empty(); ++step) {
    std::vector<Case<float>> cases;
    std::vector<Communicator::Handle> handles;
    for (int i = 0; i < fault_tensors; ++i) {
      cases.emplace_back(communicator, 20,
                         CollectiveConfig{.algorithm = &find_algorithm("ssar_recursive_double")});
      cases[i].contribute(std::vector<float>(20, rank + static_cast<float>(i)), true);
      handles.push_back(communicator.submit(cases[i].operation(), {}, concat("tensor ", i)));
    }
    bool failed = false;
    for (int i = 0; i < fault_tensors; ++i) {
      auto const at = static_cast<float>(i);
      float expected = ranks * at + ranks * (ranks - 1) / 2;
      try {
        handles[i].wait();
      } catch (PeerError const& error) {
        blamed = error.ranks();
        failed = true;
      } catch (Error const&) {
        failed = true;
      }
      if (failed) expected = rank + at;
      EXPECT_EQ(cases[i].result(), std::vector<float>(20, expected)) << "tensor " << i;
    }
    if (failed) break;
  }
  return blamed;
}

TEST(FusionTest, AFailureLeavesEachWithItsSumOrAsItWas) {
  constexpr int culprit = 1;
  for (int const ranks : {2, 3, 4}) {
    std::uint64_t messages = 0;
    {
      SeededSimulation simulation(0);
      expect_no_errors(simulate_ranks(simulation, ranks, [&](Communicator& communicator) {
        EXPECT_TRUE(sum_until_failure(communicator).empty());
        if (communicator.rank() == culprit) {
          messages = Counters::total(communicator.counters().sent_messages);
        }
      }));
    }
    ASSERT_GE(messages, 10u);
    for (auto const kind : {FaultKind::die, FaultKind::corrupt, FaultKind::delay}) {
      for (std::uint64_t message = 0; message < messages; ++message) {
        SCOPED_TRACE(concat("P=", ranks, ", fault ", int(kind), " at message ", message));
        SeededSimulation simulation(message);
        std::ignore = simulate_ranks(
            simulation, ranks,
            [&](Communicator& communicator) {
              auto const blamed = sum_until_failure(communicator);
              if (communicator.rank() == culprit || blamed.empty()) return;
              EXPECT_EQ(blamed, std::vector{culprit});
            },
            {}, RankFault{culprit, {kind, message}});
        if (HasFailure()) return;
      }
    }
  }
}

// The exchange is over by then.
TEST(FusionTest, WhatDoesNotRunAnyMoreIsAsItWas) {
  std::barrier first_has_ended(2);
  expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
    std::vector<Case<float>> cases;
    std::vector<std::pair<std::string, std::shared_ptr<Operation>>> named;
    for (int i = 0; i < 2; ++i) {
      cases.emplace_back(communicator, 20,
                         CollectiveConfig{.algorithm = &find_algorithm("topk_a")});
      cases[i].contribute(std::vector<float>(20, 1), true);
      named.emplace_back(concat("tensor ", i), cases[i].operation());
    }
    run_together(communicator, named);
    for (auto& each : cases) each.contribute(std::vector<float>(20, 3), true);
    auto const gate = std::make_shared<Gate>();
    communicator.submit(gate, {}, "gate");
    gate->reached.get_future().wait();
    std::promise<void> first_ends;
    auto const stay = [&](std::exception_ptr const&) {
      first_ends.set_value();
      while (!communicator.closed()) std::this_thread::yield();
    };
    auto const first = communicator.submit(named[0].second, stay, named[0].first);
    auto const second = communicator.submit(named[1].second, {}, named[1].first);
    gate->open.set_value();
    first_ends.get_future().wait();
    first_has_ended.arrive_and_wait();
    communicator.close();
    first.wait();
    EXPECT_THROW(second.wait(), Aborted);
    EXPECT_EQ(cases[0].result(), std::vector<float>(20, 6));
    EXPECT_EQ(cases[1].result(), std::vector<float>(20, 3));
  }));
}

// Messages of a step in which so many tensors are ready together, by the algorithm of that name.
std::uint64_t messages_of(std::string_view algorithm, int tensors, bool dense, std::size_t limit) {
  std::uint64_t messages = 0;
  expect_no_errors(run_ranks(
      4,
      [&](Communicator& communicator) {
        std::vector<Case<float>> cases;
        std::vector<std::pair<std::string, std::shared_ptr<Operation>>> named;
        for (int i = 0; i < tensors; ++i) {
          cases.emplace_back(communicator, 1000,
                             CollectiveConfig{.algorithm = find_reducing(algorithm)});
          named.emplace_back(concat("tensor ", i), cases.back().operation());
        }
        Traffic before;
        for (int step = 0; step < 3; ++step) {
          std::mt19937_64 random(static_cast<std::uint64_t>(communicator.rank()));
          for (auto& each : cases) {
            each.contribute(draw_values<float>(random, 1000, 0.01, Reduction::sum), dense);
          }
          before = Traffic::of(communicator.counters());
          run_together(communicator, named);
        }
        if (communicator.rank() == 0) {
          messages = Traffic::of(communicator.counters()).messages - before.messages;
        }
      },
      fusing(limit)));
  return messages;
}

TEST(FusionTest, ManyTakeTheMessagesOfOne) {
  for (bool const dense : {false, true}) {
    for (auto const algorithm : {"topk_a", "ssar_recursive_double", "dense_rabenseifner", "auto"}) {
      auto const two = messages_of(algorithm, 2, dense, 1 << 20);
      EXPECT_EQ(messages_of(algorithm, 32, dense, 1 << 20), two) << algorithm;
      EXPECT_GE(messages_of(algorithm, 32, dense, 0), two + 30 * 2) << algorithm;
    }
    auto const split = messages_of("ssar_split_allgather", 32, dense, 1 << 20);
    EXPECT_EQ(split, messages_of("ssar_split_allgather", 32, dense, 0)) << "it depends on places";
  }
}

}  // namespace
}  // namespace sparsecomm::test
