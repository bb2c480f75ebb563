// The planner's pure functions, and that all ranks follow the same plan whatever each has measured.
#include "engine/planner.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <set>

#include "engine/gradient_exchange.h"
#include "gradients.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

// A link of `gigabits` per second, and the rates of some processor.
Figures figures_of(double gigabits, double latency = 20e-6) {
  return {{latency, 1e-6, 8e-9 / gigabits},
          {7e-11, 6e-10, 5e-9, 4e-10, 1e-9, 3e-9, 1e-9, 1e-10, 3e-10}};
}

Workload workload_of(int ranks, std::uint64_t extent, double density) {
  Workload workload;
  workload.ranks = ranks;
  workload.extent = extent;
  workload.k = static_cast<std::uint64_t>(density * static_cast<double>(extent));
  return workload;
}

double seconds_of(std::string_view name, Workload const& workload, Figures const& figures) {
  return predict(find_algorithm(name), workload, figures).total();
}

TEST(PredictTest, AnythingThatGetsSlowerOrLargerTakesLonger) {
  Workload const workload = workload_of(8, 1 << 20, 0.01);
  auto const values = figures_of(1).values();
  for (AlgorithmEntry const& entry : algorithms()) {
    SCOPED_TRACE(entry.name);
    double const before = predict(entry, workload, figures_of(1)).total();
    for (std::size_t i = 0; i < values.size(); ++i) {
      auto slower = values;
      slower[i] *= 2;
      EXPECT_GE(predict(entry, workload, Figures::from_values(slower)).total(), before) << i;
    }
    double former = 0;
    for (std::uint64_t extent = 1 << 16; extent <= 1 << 26; extent *= 2) {
      double const now = predict(entry, workload_of(8, extent, 0.01), figures_of(1)).total();
      EXPECT_GT(now, former) << extent;
      former = now;
    }
    former = 0;
    for (double density = 0.001; density < 0.2; density *= 2) {
      double const now = predict(entry, workload_of(8, 1 << 22, density), figures_of(1)).total();
      // Where a threshold can be sampled it is quicker to find than for a smaller density.
      EXPECT_GE(now, 0.8 * former) << density;
      former = now;
    }
  }
}

TEST(PredictTest, ABreakdownAddsUpAndCountsTheWholeStep) {
  Workload workload = workload_of(4, 1 << 22, 0.01);
  workload.aggregators =
      workload.ranks;  // so that a link of theirs has no more to do than a rank's
  for (AlgorithmEntry const& entry : algorithms()) {
    SCOPED_TRACE(entry.name);
    Prediction const whole = predict(entry, workload, figures_of(1));
    EXPECT_DOUBLE_EQ(whole.total(),
                     whole.select + whole.latency + whole.transfer + whole.compute + whole.apply);
    EXPECT_GT(whole.select, 0);
    EXPECT_GE(whole.latency, 20e-6 * whole.messages / 4);
    // The result of gtopk crosses as many links on its way down as the root receives selections.
    EXPECT_NEAR(whole.transfer, (entry.name == "gtopk" ? 2 : 1) * whole.bytes * 8e-9,
                entry.name == "gtopk" ? 1e-3 * whole.transfer : 1e-15);
    // Without selection, what turns the caller's form into the one that travels.
    workload.selects = false;
    for (bool const dense_data : {false, true}) {
      workload.dense_data = dense_data;
      double const turned = predict(entry, workload, figures_of(1)).select;
      EXPECT_EQ(turned > 0, entry.sparse == dense_data);
      EXPECT_LT(turned, whole.select);
    }
    workload.selects = true;
  }
}

TEST(PredictTest, ResultsAndRejectedEntriesAreWrittenOneByOneWhereAPassOverAllIsNotQuicker) {
  Workload workload = workload_of(4, 1 << 20, 0.01);
  auto const k = static_cast<double>(workload.k);
  auto const extent = static_cast<double>(workload.extent);
  auto const reached = static_cast<double>(expected_union(workload.extent, workload.k, 4));
  Figures figures = figures_of(1);
  auto const apply = [&](std::string_view name, double scatter) {
    figures.rates.scatter = scatter;
    return predict(find_algorithm(name), workload, figures).apply;
  };
  double const quick = 1e-12;
  double const rejected = k * (1 - k / reached);
  EXPECT_DOUBLE_EQ(apply("ssar_split_allgather", quick), reached * quick);
  EXPECT_DOUBLE_EQ(apply("oktopk", quick), (k + rejected) * quick);
  double const pass = extent * figures.rates.reduce;
  EXPECT_DOUBLE_EQ(apply("ssar_split_allgather", 1), pass);
  EXPECT_DOUBLE_EQ(apply("oktopk", 1), 2 * pass) << "one over the gradient, one over the residual";
  EXPECT_EQ(apply("oktopk", 0), 0) << "the pass that selects has cleared the gradient";
  // Nothing selects, so that zeros are written before the entries.
  workload.selects = false;
  EXPECT_DOUBLE_EQ(apply("oktopk", quick), pass + k * quick);
  EXPECT_DOUBLE_EQ(apply("oktopk", 1), 2 * pass);
}

TEST(PredictTest, AMomentTakesAnotherPassAndWritesOneByOneButSendsNothing) {
  Workload const plain = workload_of(4, 1 << 20, 0.01);
  Workload moment = plain;
  moment.has_moment = true;
  Figures const figures = figures_of(1);
  Rates const& rates = figures.rates;
  auto const extent = static_cast<double>(plain.extent);
  auto const k = static_cast<double>(plain.k);
  auto const reached = static_cast<double>(expected_union(plain.extent, plain.k, 4));
  for (AlgorithmEntry const& entry : algorithms()) {
    SCOPED_TRACE(entry.name);
    Prediction const without = predict(entry, plain, figures);
    Prediction const with = predict(entry, moment, figures);
    EXPECT_EQ(with.exchange(), without.exchange());
    EXPECT_EQ(with.bytes, without.bytes);
    double select = extent * (2 * rates.pass + rates.momentum);
    double apply = 0;
    if (entry.sparse) {
      double const result = entry.top_k_result ? k : reached;
      select = extent * rates.momentum + k * rates.scatter;
      apply = (k + result) * rates.merge + k * result / reached * rates.scatter;
    }
    EXPECT_NEAR(with.select - without.select, select, 1e-9 * with.select);
    EXPECT_NEAR(with.apply - without.apply, apply, 1e-9 * with.apply);
    // Where nothing is selected there is none.
    moment.selects = false;
    Workload other = plain;
    other.selects = false;
    EXPECT_EQ(predict(entry, moment, figures).total(), predict(entry, other, figures).total());
    moment.selects = true;
  }
}

TEST(PredictTest, DenseWinsOnFastLinksAndAtHighDensitiesSparseOnSlowLinks) {
  auto const best = [](Workload const& workload, Figures const& figures) {
    return *rank_algorithms(workload, figures, is_candidate).front().algorithm;
  };
  EXPECT_FALSE(best(workload_of(8, 1 << 24, 0.01), figures_of(2000)).sparse);
  EXPECT_TRUE(best(workload_of(8, 1 << 24, 0.01), figures_of(1)).sparse);
  EXPECT_FALSE(best(workload_of(8, 1 << 20, 0.9), figures_of(1)).sparse);
  EXPECT_FALSE(best(workload_of(1, 1 << 20, 0.01), figures_of(1)).sparse) << "nothing to exchange";
}

// Between the bandwidths where one wins and the other does there is one where both take as long,
// and the predictions cross there once.
TEST(PredictTest, SparseAndDenseBreakEvenAtOneBandwidth) {
  Workload const workload = workload_of(8, 1 << 24, 0.01);
  int crossings = 0;
  bool sparse_won = true;
  double at = 0;
  for (double gigabits = 0.1; gigabits < 1e4; gigabits *= 1.05) {
    auto const figures = figures_of(gigabits);
    bool const sparse_wins =
        seconds_of("oktopk", workload, figures) < seconds_of("dense", workload, figures);
    if (sparse_wins != sparse_won) {
      ++crossings;
      at = gigabits;
    }
    sparse_won = sparse_wins;
  }
  EXPECT_EQ(crossings, 1);
  EXPECT_FALSE(sparse_won);
  // By hand: the bytes that dense sends beyond oktopk's weigh what selection costs beyond.
  auto const figures = figures_of(at);
  Prediction const dense = predict(find_algorithm("dense"), workload, figures);
  Prediction const sparse = predict(find_algorithm("oktopk"), workload, figures);
  double const saved = (dense.bytes - sparse.bytes) * figures.link.byte;
  EXPECT_NEAR(saved, (sparse.total() - sparse.transfer) - (dense.total() - dense.transfer),
              0.06 * saved);
}

TEST(PredictTest, TheTransportsOwnAllreduceIsACandidateWhereThereIsOne) {
  AlgorithmEntry const& inner = find_algorithm("dense_inner");
  Workload workload = workload_of(8, 1 << 24, 0.9);
  EXPECT_FALSE(is_candidate(inner, workload));
  workload.native_allreduce = true;
  EXPECT_TRUE(is_candidate(inner, workload));
  EXPECT_TRUE(is_candidate(find_algorithm("dense"), workload));
  EXPECT_FALSE(is_candidate(find_algorithm("gaussian_k"), workload));
  Plan plan;
  plan.begin(figures_of(1000), workload, 0);
  EXPECT_EQ(plan.algorithm(), &inner) << "no frames to encode";
  workload.native_allreduce = false;
  Plan elsewhere;
  elsewhere.begin(figures_of(1000), workload, 0);
  EXPECT_NE(elsewhere.algorithm(), &inner);
}

TEST(PredictTest, ManyRanksFavourOkTopkOverTheAllgather) {
  auto const ratio = [](int ranks) {
    Workload const workload = workload_of(ranks, 1 << 24, 0.01);
    return seconds_of("topk_a", workload, figures_of(1)) /
           seconds_of("oktopk", workload, figures_of(1));
  };
  EXPECT_NEAR(ratio(2), 1, 0.05);  // both ranks get everything anyway
  EXPECT_GT(ratio(64), 4);
}

TEST(PredictTest, TheFrameIsTheOneThatTheWirePicksAndAsLarge) {
  std::uint32_t const extent = 1 << 18;
  std::set<IndexCodec> picked;
  for (double const density : {0.005, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98}) {
    auto random = generator(0, 11);
    std::vector<std::uint32_t> indices;
    std::bernoulli_distribution hit(density);
    for (std::uint32_t i = 0; i < extent; ++i) {
      if (hit(random)) indices.push_back(i);
    }
    auto const nnz = static_cast<double>(indices.size());
    for (IndexCodecChoice const choice : {IndexCodecChoice::smallest, IndexCodecChoice::raw32,
                                          IndexCodecChoice::delta, IndexCodecChoice::bitmap}) {
      for (ValueCodecEntry const& codec : value_codecs()) {
        for (bool const allow_dense : {false, true}) {
          SCOPED_TRACE(concat("density ", density, ", choice ", int(choice), ", ", codec.name,
                              allow_dense ? ", or dense" : ""));
          FrameOptions const options{choice, allow_dense, codec.id};
          std::vector<float> values(indices.size(), 1.0f);
          std::vector<std::byte> out(max_sparse_frame_bytes<float>(indices.size(), extent));
          std::size_t const bytes =
              encode_sparse<float>(0, 0, extent, indices, values, options, out);
          FrameHeader const header = parse_frame(out, 0).header;
          double const value_bytes =
              static_cast<double>(codec.encoded_bytes(value_bucket, 4)) / value_bucket;
          ExpectedFrame const expected = expected_frame(nnz, extent, value_bytes, options);
          EXPECT_NEAR(expected.pair_bytes, static_cast<double>(bytes - header_bytes) / nnz,
                      0.01 * expected.pair_bytes);
          EXPECT_EQ(expected.index_codec ? expected.index_codec->id : IndexCodec::none,
                    header.index_codec);
          picked.insert(header.index_codec);
        }
      }
    }
  }
  EXPECT_EQ(picked.size(), index_codecs().size() + 1) << "dense besides";
}

// What is received with each codec, counted, where all ranks select at random.
TEST(PredictTest, BytesAreThoseThatAreCountedForEveryAlgorithmAndCodec) {
  std::uint64_t const extent = 1 << 15;
  for (auto const& [ranks, density] : {std::pair{2, 0.02}, {4, 0.02}, {4, 0.4}}) {
    for (AlgorithmEntry const& entry : algorithms()) {
      if (!delivers_exact_entries(entry)) continue;
      for (ValueCodec const codec : {ValueCodec::raw, ValueCodec::f16}) {
        if (codec != ValueCodec::raw && !entry.rounds) continue;
        SCOPED_TRACE(
            concat(entry.name, ", P=", ranks, ", density ", density, ", codec ", int(codec)));
        Workload workload = workload_of(ranks, extent, density);
        workload.options.frame.value_codec = codec;
        workload.options.schedule.period = 10;
        double const predicted = predict(entry, workload, figures_of(1)).bytes;
        double most = 0;
        std::mutex mutex;
        expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
          ExchangeOptions options;
          options.algorithm = entry.name;
          options.density = density;
          options.schedule = workload.options.schedule;
          options.collective = workload.options;
          auto const exchange =
              std::make_shared<GradientExchange<float>>("test", extent, options, communicator);
          std::vector<float> residual(extent);
          auto random = generator(communicator.rank(), 5);
          std::uniform_real_distribution<float> magnitude(-1.0f, 1.0f);
          int const steps = 10;
          for (int step = 0; step < steps; ++step) {
            std::vector<float> gradient(extent);
            for (float& x : gradient) x = magnitude(random);
            std::ranges::fill(residual, 0.0f);  // so that steps are alike
            exchange->bind({{gradient, residual}});
            communicator.run(exchange);
          }
          std::lock_guard const lock(mutex);
          most = std::max(
              most,
              static_cast<double>(Counters::total(communicator.counters().received_bytes)) / steps);
        }));
        EXPECT_NEAR(most, predicted, 0.1 * predicted);
      }
    }
  }
}

// The messages of the agreement before a step and of the round after it are the transport's, too.
TEST(PredictTest, MessagesOfADenseExchangeAreThoseThatAreCountedAtTheEndOfAStepAndBefore) {
  std::uint64_t const extent = 1 << 12;
  for (int const ranks : {1, 2, 3, 6}) {
    for (AlgorithmEntry const& entry : algorithms()) {
      if (entry.sparse || entry.needs != Needs::nothing) continue;
      for (bool const ends_step : {true, false}) {
        SCOPED_TRACE(concat(entry.name, ", P=", ranks, ends_step ? ", ends a step" : ""));
        double messages = 0;
        std::mutex mutex;
        expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
          ExchangeOptions options;
          options.algorithm = entry.name;
          auto const exchange =
              std::make_shared<GradientExchange<float>>("test", extent, options, communicator);
          std::vector<float> gradient(extent, 1.0f);
          std::vector<float> residual(extent);
          Counters before(ranks);
          for (int step = 0; step < 2; ++step) {  // of which the second is known
            before = communicator.counters();
            exchange->bind({{gradient, residual}}, {}, {}, ends_step ? batch_of_one : open_batch);
            communicator.run(exchange);
          }
          Counters const counted = difference(communicator.counters(), before);
          std::lock_guard const lock(mutex);
          messages =
              std::max(messages, static_cast<double>(Counters::total(counted.sent_messages)));
        }));
        Workload workload = workload_of(ranks, extent, 1);
        workload.commits = ends_step;
        EXPECT_EQ(predict(entry, workload, figures_of(1)).messages, messages);
      }
    }
  }
}

TEST(PredictTest, APlanExpectsTheLastExchangeOfAStepToTakeARoundMore) {
  constexpr int ranks = 4;
  CommunicatorOptions link;
  link.figures = std::make_shared<Figures const>(figures_of(1));
  double expected[2] = {};  // of an exchange before the last, and of the last
  for (bool const ends_step : {false, true}) {
    expect_no_errors(run_ranks(
        ranks,
        [&](Communicator& communicator) {
          ExchangeOptions options;
          options.algorithm = auto_algorithm;
          auto const exchange =
              std::make_shared<GradientExchange<float>>("test", 4096, options, communicator);
          std::vector<float> gradient(4096, 1.0f);
          std::vector<float> residual(4096);
          exchange->bind({{gradient, residual}}, {}, {}, ends_step ? batch_of_one : open_batch);
          communicator.run(exchange);
          if (communicator.rank() == 0) {
            expected[ends_step] = exchange->last_step().predicted_seconds.value();
          }
        },
        link));
  }
  Cost const commit = commit_cost(ranks);
  EXPECT_NEAR(expected[true] - expected[false],
              commit.rounds * link.figures->link.round +
                  commit.messages * link.figures->link.message +
                  commit.bytes * link.figures->link.byte,
              1e-12);
}

TEST(PredictTest, AUnionOfRandomSelectionsIsBetweenOneAndAll) {
  EXPECT_EQ(expected_union(1000, 100, 1), 100u);
  EXPECT_EQ(expected_union(1000, 100, 2), 190u);
  EXPECT_EQ(expected_union(1000, 1000, 7), 1000u);
  EXPECT_EQ(expected_union(0, 1, 7), 0u);
  EXPECT_EQ(expected_union(1u << 31, 10, 64), 640u);
}

TEST(FiguresTest, ValuesSurviveTheRoundTripAndAreChecked) {
  auto const values = figures_of(3).values();
  EXPECT_EQ(Figures::from_values(values).values(), values);
  auto wrong = values;
  wrong[2] = -1;
  EXPECT_THROW(Figures::from_values(wrong), InvalidArgument);
  wrong[2] = std::nan("");
  EXPECT_THROW(Figures::from_values(wrong), InvalidArgument);
  EXPECT_THROW(Figures::from_values(std::span(values).first(3)), InvalidArgument);
}

TEST(FiguresTest, SavedOnesMayLackSomeButNotHoldOthersOrWhatIsNoTime) {
  std::map<std::string, double> saved;
  auto const values = figures_of(3).values();
  for (std::size_t i = 0; i < values.size(); ++i) saved.emplace(Figures::names[i], values[i]);
  EXPECT_EQ(Figures::from_named(saved).values(), values);
  auto const defaults = Figures{}.values();
  for (std::size_t i = 0; i < values.size(); ++i) {
    auto older = saved;
    older.erase(std::string(Figures::names[i]));
    auto expected = values;
    expected[i] = defaults[i];
    EXPECT_EQ(Figures::from_named(older).values(), expected) << Figures::names[i];
  }
  EXPECT_EQ(Figures::from_named({}).values(), defaults);
  for (auto const& [name, value] : {std::pair{"bite", 1.0},
                                    {"", 1.0},
                                    {"byte", -1.0},
                                    {"merge", std::nan("")},
                                    {"round", std::numeric_limits<double>::infinity()}}) {
    auto wrong = saved;
    wrong[name] = value;
    try {
      Figures::from_named(wrong);
      ADD_FAILURE() << name << " = " << value << " was taken";
    } catch (InvalidArgument const& error) {
      std::string_view const text = error.what();
      EXPECT_NE(text.find(concat("figure '", name, "' = ", value)), std::string_view::npos) << text;
    }
  }
}

// A world in which every algorithm takes `factor(entry)` times what the planner predicts.
class World {
 public:
  World(Workload const& workload, Figures const& figures,
        std::function<double(AlgorithmEntry const&)> factor)
      : workload_(workload), figures_(figures), factor_(std::move(factor)) {
    plan.begin(figures, workload, 0);
  }

  // Returns the algorithm that the step ran.
  AlgorithmEntry const* step() {
    AlgorithmEntry const* const entry = plan.algorithm();
    plan.observe(former_, entry->sparse ? workload_.k : 0, workload_.k, step_);
    former_ = seconds(*entry);
    plan.conclude(workload_, expected_union(workload_.extent, workload_.k, workload_.ranks), true,
                  step_);
    ++step_;
    return entry;
  }
  double seconds(AlgorithmEntry const& entry) const {
    return predict(entry, workload_, figures_).total() * factor_(entry);
  }

  Plan plan;

 private:
  Workload workload_;
  Figures figures_;
  std::function<double(AlgorithmEntry const&)> factor_;
  double former_ = 0;
  std::uint64_t step_ = 0;
};

AlgorithmEntry const* best_of(World const& world) {
  AlgorithmEntry const* best = nullptr;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (!delivers_exact_entries(entry)) continue;
    if (best == nullptr || world.seconds(entry) < world.seconds(*best)) best = &entry;
  }
  return best;
}

TEST(PlanTest, StaysWhereThePredictionIsRight) {
  World world(workload_of(8, 1 << 24, 0.01), figures_of(1), [](auto const&) { return 1.0; });
  AlgorithmEntry const* const best = best_of(world);
  EXPECT_EQ(world.plan.algorithm(), best);
  int elsewhere = 0;
  for (int step = 0; step < 1000; ++step) elsewhere += world.step() != best;
  // Only to try what is predicted to be nearly as quick.
  EXPECT_LE(elsewhere, 4 * static_cast<int>(algorithms().size()));
  EXPECT_EQ(world.plan.algorithm(), best);
}

TEST(PlanTest, LeavesAnAlgorithmThatIsSlowerThanPredicted) {
  Workload const workload = workload_of(8, 1 << 24, 0.01);
  auto const first = rank_algorithms(workload, figures_of(1), is_candidate).front();
  World world(workload, figures_of(1),
              [&](AlgorithmEntry const& entry) { return &entry == first.algorithm ? 20.0 : 1.0; });
  for (int step = 0; step < 100; ++step) world.step();
  EXPECT_NE(world.plan.algorithm(), first.algorithm);
  EXPECT_LE(world.seconds(*world.plan.algorithm()), 1.03 * world.seconds(*best_of(world)));
}

TEST(PlanTest, FindsTheBestWhereEverythingIsSlowerThanPredicted) {
  World world(workload_of(4, 1 << 24, 0.01), figures_of(1),
              [&](AlgorithmEntry const& entry) { return entry.top_k_result ? 2.0 : 3.5; });
  for (int step = 0; step < 200; ++step) world.step();
  EXPECT_LE(world.seconds(*world.plan.algorithm()), 1.03 * world.seconds(*best_of(world)));
}

TEST(PlanTest, DoesNotSwitchForLessThanAFewPercent) {
  Workload const workload = workload_of(8, 1 << 24, 0.01);
  World world(workload, figures_of(1), [](auto const&) { return 1.0; });
  for (int step = 0; step < 100; ++step) world.step();
  AlgorithmEntry const* const settled = world.plan.algorithm();
  // One slow step is noise.
  PlanState state = world.plan.state();
  double const predicted = predict(*settled, workload, figures_of(1)).total();
  for (double const seconds : {1.0 * predicted, 1.02 * predicted, 0.98 * predicted}) {
    world.plan.observe(seconds, workload.k, workload.k, 100);
    world.plan.conclude(workload, workload.k, true, 100);
    EXPECT_EQ(world.plan.algorithm(), settled);
  }
}

// However slow it turns out to be, and whatever was observed of it before.
TEST(PlanTest, AnAlgorithmThatIsChosenAgainIsObservedTwiceAsOftenBeforeItIsJudged) {
  Workload const workload = workload_of(8, 1 << 24, 0.01);
  auto const ranking = rank_algorithms(workload, figures_of(1), is_candidate);
  AlgorithmEntry const* const present = ranking.front().algorithm;
  AlgorithmEntry const* const other = ranking[1].algorithm;
  for (std::uint64_t const before : {3, 5, 30, 1000}) {
    SCOPED_TRACE(before);
    PlanState state;
    state.figures = figures_of(1);
    state.algorithm = present;
    state.steps_with = 100;
    for (Prediction const& prediction : ranking) {
      state.experience.push_back({prediction.algorithm, 1000 / prediction.total(), 1000, 0});
    }
    state.experience[0].correction = 1.1 / ranking[0].total();
    state.experience[1] = {other, 1.0 / ranking[1].total(), before, 0};
    Plan plan;
    plan.load_state(state);
    plan.conclude(workload, workload.k, true, 1);
    ASSERT_EQ(plan.algorithm(), other);
    auto const observations = [&] { return plan.state().experience[1].observations; };
    for (std::uint64_t step = 2; plan.algorithm() == other && step < 3000; ++step) {
      plan.observe(1e6, workload.k, workload.k, step);
      plan.conclude(workload, workload.k, true, step);
    }
    EXPECT_EQ(observations(), before + std::min<std::uint64_t>(before, 30));
  }
}

// Steps whose times scatter by a quarter, as where ranks share cores.
TEST(PlanTest, NoiseNeitherHidesTheBestNorMakesThoseThatAreAlikeTakeTurns) {
  constexpr int rounds = 60;
  constexpr int steps = 400;
  int good = 0;
  int switches = 0;
  for (int round = 0; round < rounds; ++round) {
    auto random = generator(round, 5);
    std::lognormal_distribution<double> noise(0.0, 0.25);
    std::lognormal_distribution<double> error(0.0, 0.15);
    std::map<AlgorithmEntry const*, double> true_factors;
    for (AlgorithmEntry const& entry : algorithms()) true_factors[&entry] = error(random);
    Workload const workload = workload_of(4, 1 << 20, 0.01);
    auto const seconds = [&](AlgorithmEntry const& entry) {
      return predict(entry, workload, figures_of(1)).total() * true_factors[&entry];
    };
    World world(workload, figures_of(1),
                [&](AlgorithmEntry const& entry) { return true_factors[&entry] * noise(random); });
    double least = std::numeric_limits<double>::infinity();
    for (AlgorithmEntry const& entry : algorithms()) {
      if (delivers_exact_entries(entry)) least = std::min(least, seconds(entry));
    }
    double late = 0;
    AlgorithmEntry const* former = nullptr;
    for (int step = 0; step < steps; ++step) {
      AlgorithmEntry const* const entry = world.step();
      switches += former != nullptr && entry != former;
      former = entry;
      if (step >= steps / 2) late += seconds(*entry) / (steps / 2);
    }
    good += late <= 1.05 * least;
  }
  EXPECT_GE(good, rounds * 95 / 100);
  EXPECT_LE(switches, 10 * rounds);
}

TEST(PlanTest, ALoadedStateDecidesTheSame) {
  Workload const workload = workload_of(8, 1 << 24, 0.02);
  auto random = generator(0, 3);
  std::lognormal_distribution<double> noise(0.0, 0.4);
  World world(workload, figures_of(1), [&](auto const&) { return noise(random); });
  Plan other;
  for (int step = 0; step < 200; ++step) {
    other = Plan();
    other.load_state(world.plan.state());
    double const seconds = noise(random);
    for (Plan* const plan : {&world.plan, &other}) {
      plan->observe(seconds, workload.k, workload.k, step);
      plan->conclude(workload, workload.k * 3, true, step);
    }
    ASSERT_EQ(world.plan.algorithm(), other.algorithm()) << step;
  }
}

TEST(PlanTest, RejectsStatesThatNoPlanSaves) {
  Plan plan;
  PlanState state;
  state.algorithm = &algorithms().front();
  EXPECT_THROW(plan.load_state(state), InvalidArgument);
  state.figures = figures_of(1);
  plan.load_state(state);
  state.union_ratio = std::nan("");
  EXPECT_THROW(plan.load_state(state), InvalidArgument);
  state.union_ratio = 0;
  state.experience = {{&algorithms().front(), 0, 1, 1}};
  EXPECT_THROW(plan.load_state(state), InvalidArgument);
  state.experience = {{&algorithms().front(), 1, 5, 1}};
  state.observations_before = 6;
  EXPECT_THROW(plan.load_state(state), InvalidArgument);
  state.observations_before = 5;
  plan.load_state(state);
  for (double const noise : {-0.1, 1.0, std::nan("")}) {
    state.noise = noise;
    EXPECT_THROW(plan.load_state(state), InvalidArgument) << noise;
  }
}

TEST(PlanTest, LearnsTheUnionAndTheRealisedDensity) {
  Workload const workload = workload_of(8, 1 << 24, 0.01);
  Plan plan;
  PlanState state;
  state.figures = figures_of(1);
  state.algorithm = &find_algorithm("topk_a");
  plan.load_state(state);
  EXPECT_EQ(plan.corrected(workload).union_nnz, 0u);
  for (int step = 0; step < 50 && plan.algorithm()->name == "topk_a"; ++step) {
    plan.observe(0, workload.k * 11 / 10, workload.k, step);
    plan.conclude(workload, workload.k * 2, true, step);
  }
  Workload const known = plan.corrected(workload);
  EXPECT_NEAR(static_cast<double>(known.k), 1.1 * static_cast<double>(workload.k),
              0.01 * workload.k);
  EXPECT_NEAR(static_cast<double>(known.union_nnz), 2.0 * static_cast<double>(workload.k),
              0.1 * static_cast<double>(workload.k));
}

// A clock that gives every rank other times.
class NoisyClock final : public Clock {
 public:
  explicit NoisyClock(int rank) : random_(generator(rank, 77)) {}
  TimePoint now() const override {
    std::lock_guard const lock(mutex_);
    now_ += std::chrono::microseconds(std::uniform_int_distribution<int>(1, 3000)(random_));
    return now_;
  }

 private:
  mutable std::mutex mutex_;
  mutable TimePoint now_;
  mutable std::mt19937_64 random_;
};

TEST(PlanTest, RanksDecideAlikeWhateverEachMeasures) {
  int const ranks = 5;
  std::size_t const numel = 3000;
  std::vector<std::vector<std::string>> choices(ranks);
  std::vector<std::array<double, Figures::count>> figures(ranks);
  auto transports = make_inproc_transports(ranks);
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        NoisyClock const clock(rank);
        CommunicatorOptions communicator_options;
        communicator_options.timeout = std::chrono::hours(1);  // of a clock that runs fast
        Communicator communicator(std::move(transports[rank]), communicator_options, &clock);
        ExchangeOptions options;
        options.algorithm = auto_algorithm;
        options.density = 0.05;
        auto const exchange =
            std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
        std::vector<float> residual(numel);
        for (int step = 0; step < 60; ++step) {
          std::vector<int> const values = patterns[0].make(rank, ranks, numel, step);
          std::vector<float> gradient(values.begin(), values.end());
          exchange->bind({{gradient, residual}});
          communicator.submit(exchange).wait();
          choices[rank].emplace_back(exchange->state().plan.algorithm->name);
        }
        figures[rank] = exchange->state().plan.figures->values();
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect_no_errors(errors);
  for (int rank = 1; rank < ranks; ++rank) {
    EXPECT_EQ(choices[rank], choices[0]);
    EXPECT_EQ(figures[rank], figures[0]);
  }
  EXPECT_GT(std::set<std::string>(choices[0].begin(), choices[0].end()).size(), 1u)
      << "with such times the plan should have tried several algorithms";
}

// Seconds expected of the first step of a state that selects by the rule.
double first_prediction(SelectionRule const& rule, std::size_t numel, Communicator& communicator) {
  ExchangeOptions options;
  options.algorithm = auto_algorithm;
  options.rule = rule;
  auto const exchange =
      std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
  std::vector<float> gradient(numel, 1.0f);
  std::vector<float> residual(numel);
  std::vector<float> moment(rule.has_moment() ? numel : 0);
  exchange->bind({{gradient, residual}}, {}, moment);
  communicator.submit(exchange).wait();
  return exchange->last_step().predicted_seconds.value();
}

TEST(ExchangePlanTest, ALoadedExchangeFollowsThePlanThatWasSaved) {
  std::size_t const numel = 2000;
  CommunicatorOptions communicator_options;
  communicator_options.figures = std::make_shared<Figures const>(figures_of(0.001));
  expect_no_errors(run_ranks(
      3,
      [&](Communicator& communicator) {
        ExchangeOptions options;
        options.algorithm = auto_algorithm;
        auto const make = [&] {
          return std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
        };
        auto exchange = make();
        EXPECT_EQ(exchange->algorithm(), "auto");
        std::vector<float> residual(numel);
        for (int step = 0; step < 12; ++step) {
          if (step % 4 == 3) {
            ExchangeState const saved = exchange->state();
            exchange = make();
            exchange->load_state(saved);
            EXPECT_EQ(exchange->algorithm(), saved.plan.algorithm->name);
          }
          auto const values = patterns[0].make(communicator.rank(), 3, numel, step);
          std::vector<float> gradient(values.begin(), values.end());
          exchange->bind({{gradient, residual}});
          communicator.submit(exchange).wait();
        }
      },
      communicator_options));
}

TEST(ExchangePlanTest, AMomentIsPartOfThePrediction) {
  std::size_t const numel = 1 << 16;
  CommunicatorOptions communicator_options;
  communicator_options.figures = std::make_shared<Figures const>(figures_of(0.001));
  expect_no_errors(run_ranks(
      2,
      [&](Communicator& communicator) {
        double const plain = first_prediction({}, numel, communicator);
        EXPECT_GT(first_prediction({.velocity = {.momentum = 0.9}}, numel, communicator), plain);
        EXPECT_GT(first_prediction({.first_moment = 0.9}, numel, communicator), plain);
      },
      communicator_options));
}

// What was flushed for a dense exchange returns when the step cannot be used.
TEST(ExchangePlanTest, WithdrawingADenseStepKeepsItsGradientInTheResidual) {
  std::size_t const numel = 100;
  CommunicatorOptions communicator_options;
  communicator_options.figures = std::make_shared<Figures const>(
      Figures{{0, 0, 1e-9}, {0, 0, 0, 1, 1, 1, 1, 0}});  // dense is best
  expect_no_errors(run_ranks(
      2,
      [&](Communicator& communicator) {
        ExchangeOptions options;
        options.algorithm = auto_algorithm;
        auto const exchange =
            std::make_shared<GradientExchange<float>>("test", numel, options, communicator);
        std::vector<float> residual(numel, 2.0f);
        for (int step = 0; step < 3; ++step) {
          std::vector<float> gradient(numel, 1.0f);
          auto const held = residual;
          exchange->bind({{gradient, residual}});
          communicator.submit(exchange).wait();
          EXPECT_EQ(exchange->algorithm(), "dense");
          EXPECT_EQ(gradient, std::vector<float>(numel, held[0] + 1));
          EXPECT_EQ(residual, std::vector<float>(numel, 0.0f));
          exchange->withdraw();
          EXPECT_EQ(residual, std::vector<float>(numel, held[0] + 1));
        }
      },
      communicator_options));
}

}  // namespace
}  // namespace sparsecomm::test
