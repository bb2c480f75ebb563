// Ranks that disagree learn in which fields, however long these are and however many ranks there
// are.
#include "engine/mismatch.h"

#include <gtest/gtest.h>

#include "engine/gradient_exchange.h"
#include "engine/proposal.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

std::string boundaries_of(int ranks) {
  std::string text;
  for (int rank = 1; rank < ranks; ++rank) text += concat(4'000'000'000u + rank, ',');
  return text;
}

TEST(MismatchTest, AThousandRanksLearnWhatStandsBehindALongField) {
  std::string const boundaries = boundaries_of(1000);
  std::vector<std::string> texts;
  for (int rank = 0; rank < 1000; ++rank) {
    texts.push_back(
        shorten_values(concat("operation=x;boundaries=", boundaries, rank == 500 ? "1" : "2",
                              ";planned=", rank == 999 ? "dense" : "oktopk")));
    EXPECT_LT(texts.back().size(), 300u);
  }
  std::string const message = differences(texts);
  EXPECT_NE(message.find("; planned: dense on rank 999 but oktopk on ranks 0, "), std::string::npos)
      << message;
  EXPECT_TRUE(message.starts_with("boundaries: 4000000001,")) << message;
  EXPECT_NE(message.find(") on rank 500"), std::string::npos) << message;
  EXPECT_EQ(message.find("operation"), std::string::npos) << message;
}

TEST(MismatchTest, ShortValuesAndTheFormStayAsTheyAre) {
  for (char const* const text : {"", "a", "a=", "a=b", "a=b;", ";", "a;b=c;;d=e=f"}) {
    EXPECT_EQ(shorten_values(text), text);
  }
  std::string const longest(longest_shown_value, 'x');
  EXPECT_EQ(shorten_values("a=" + longest + ";b=c"), "a=" + longest + ";b=c");
  std::string const shortened = shorten_values("a=" + longest + "y;b=c");
  EXPECT_TRUE(shortened.starts_with("a=" + longest + "... (97 characters, hash ")) << shortened;
  EXPECT_TRUE(shortened.ends_with(");b=c")) << shortened;
  EXPECT_NE(shorten_values("a=" + longest + "z;b=c"), shortened);
}

TEST(DigestTest, FieldsDoNotRunTogether) {
  auto const digest = [](std::string_view first, std::string_view second) {
    return Digest().add(first).add(second).value();
  };
  EXPECT_EQ(digest("ab", "c"), digest("ab", "c"));
  EXPECT_NE(digest("ab", "c"), digest("a", "bc"));
  EXPECT_NE(Digest().add(1.0).value(), Digest().add(2.0).value());
}

class Described final : public Operation {
 public:
  explicit Described(std::string text) : text_(std::move(text)) {}
  Proposal prepare() override { return {.text = text_}; }
  void run(Channel&, Agreement const&) override {}

 private:
  std::string text_;
};

TEST(RequestTest, ReachesEveryRankWithTheNextOperation) {
  expect_no_errors(run_ranks(3, [](Communicator& communicator) {
    auto const operation = std::make_shared<Described>("operation=x");
    for (int step = 0; step < 6; ++step) {
      bool const requests = step % 2 == 0 && communicator.rank() == step / 2;
      if (requests) communicator.request();
      EXPECT_FALSE(communicator.take_requested());
      communicator.run(operation);
      EXPECT_EQ(communicator.take_requested(), step % 2 == 0) << step;
    }
  }));
}

TEST(MismatchTest, AFieldBehindThousandsOfBytesTravels) {
  expect_no_errors(run_ranks(3, [](Communicator& communicator) {
    try {
      communicator.run(std::make_shared<Described>(concat(
          "operation=x;boundaries=", boundaries_of(1000), ";last=", communicator.rank() / 2)));
      ADD_FAILURE() << "they agreed";
    } catch (Mismatch const& error) {
      EXPECT_EQ(
          std::string(error.what()),
          "ranks disagree: last: 0 on ranks 0, 1 but 1 on rank 2; give every rank the same, in "
          "the same order of calls");
    }
  }));
}

template <class F>
void load(GradientExchange<float>& exchange, F&& change) {
  ExchangeState state;
  change(state);
  exchange.load_state(std::move(state));
}

TEST(MismatchTest, EveryFieldOfAGradientExchangeThatChangesIsCompared) {
  struct Change {
    char const* named;
    void (*make)(GradientExchange<float>& exchange);
  };
  static constexpr Change changes[] = {
      {"density: 0.01 on rank 0 but 0.5 on rank 1",
       [](auto& exchange) { exchange.set_density(.5); }},
      {"step: 0 on rank 0 but 7 on rank 1",
       [](auto& exchange) { load(exchange, [](auto& state) { state.step = 7; }); }},
      {"global_threshold: 0 on rank 0 but 0.25 on rank 1",
       [](auto& exchange) {
         load(exchange, [](auto& state) { state.collective.global_threshold = .25; });
       }},
      {"boundaries:  on rank 0 but 30, on rank 1",
       [](auto& exchange) {
         load(exchange, [](auto& state) { state.collective.boundaries = {30}; });
       }},
  };
  for (Change const& change : changes) {
    expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", 100, ExchangeOptions{}, communicator);
      if (communicator.rank() == 1) change.make(*exchange);
      std::vector<float> gradient(100, 1.0f), residual(100, 0.0f);
      exchange->bind({{gradient, residual}});
      try {
        communicator.run(exchange);
        ADD_FAILURE() << "they agreed, though " << change.named;
      } catch (Mismatch const& error) {
        EXPECT_EQ(std::string(error.what()),
                  concat("ranks disagree: ", change.named,
                         "; give every rank the same, in the same order of calls"));
      }
    }));
  }
}

// A codec is a number on the wire only.
TEST(MismatchTest, RanksThatDisagreeOnACodecReadItsName) {
  struct Change {
    std::string_view field, first, other;  // what rank 0 has, and rank 1
    std::string_view algorithm;
    void (*make)(ExchangeOptions& options);
  };
  Change const changes[] = {
      {"value_codec", "raw", "qsgd4_512", "oktopk",
       [](auto& options) { options.collective.frame.value_codec = ValueCodec::qsgd4_512; }},
      {"dense_codec", "raw", "f16", "dsar_split_allgather",
       [](auto& options) { options.collective.dense_codec = ValueCodec::f16; }},
      // Which algorithm is quickest depends on it, so all ranks must plan with the same.
      {"index_codec", "smallest", "bitmap", auto_algorithm,
       [](auto& options) { options.collective.frame.index_codec = IndexCodecChoice::bitmap; }},
  };
  for (Change const& change : changes) {
    expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
      ExchangeOptions options;
      options.algorithm = change.algorithm;
      if (communicator.rank() == 1) change.make(options);
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", 100, options, communicator);
      std::vector<float> gradient(100, 1.0f), residual(100, 0.0f);
      exchange->bind({{gradient, residual}});
      try {
        communicator.run(exchange);
        ADD_FAILURE() << "they agreed on " << change.field;
      } catch (Mismatch const& error) {
        std::string_view const text = error.what();
        for (std::string const& part :
             {concat(' ', change.field, ": "), concat(' ', change.first, " on rank 0"),
              concat(' ', change.other, " on rank 1")}) {
          EXPECT_NE(text.find(part), std::string_view::npos) << part << " is not in " << text;
        }
      }
    }));
  }
}

// How many messages a rank sums at once, how it encodes indices and whether its residual is taken
// along are its own affair: the results are the same bits, and nothing is lost.
TEST(MismatchTest, RanksMayDifferInWhatTheOthersDoNotNotice) {
  constexpr int ranks = 5;
  constexpr std::size_t extent = 600;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (entry.needs != Needs::nothing) continue;
    SCOPED_TRACE(entry.name);
    std::vector<std::vector<float>> results(ranks);
    std::vector<double> sums(ranks);  // of what a rank brought less what it kept
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      int const rank = communicator.rank();
      ExchangeOptions options;
      options.algorithm = entry.name;
      options.average = false;
      options.density = 0.1;
      options.collective.window = 1 + rank % 3;
      options.collective.frame.index_codec = static_cast<IndexCodecChoice>(rank % 4);
      options.feedback = rank % 2 == 0;
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", extent, options, communicator);
      std::vector<float> residual(extent, 1.0f);
      for (int step = 0; step < 3; ++step) {
        std::vector<float> gradient(extent);
        for (std::size_t i = 0; i < extent; ++i) {
          gradient[i] = static_cast<float>((i * 7 + static_cast<std::size_t>(rank)) % 50) / 3;
        }
        for (std::size_t i = 0; i < extent; ++i) sums[rank] += gradient[i] + residual[i];
        exchange->bind({{gradient, residual}});
        communicator.run(exchange);
        for (std::size_t i = 0; i < extent; ++i) sums[rank] -= residual[i];
        results[rank].insert(results[rank].end(), gradient.begin(), gradient.end());
      }
    }));
    double delivered = 0;
    for (float const x : results[0]) delivered += x;
    double brought = 0;
    for (double const sum : sums) brought += sum;
    EXPECT_NEAR(delivered, brought, 1e-6 * brought);
    for (int rank = 1; rank < ranks; ++rank) EXPECT_EQ(results[rank], results[0]) << rank;
  }
}

// The last rank names none from the second step on, as one that has joined.
TEST(LossScaleTest, RanksThatNameOneMustAgreeAndWhatTheOthersKeepFollows) {
  constexpr std::size_t extent = 100;
  std::vector<double> delivered(3), kept(3);
  expect_no_errors(run_ranks(3, [&](Communicator& communicator) {
    int const rank = communicator.rank();
    auto const exchange =
        std::make_shared<GradientExchange<double>>("test", extent, ExchangeOptions{}, communicator);
    std::vector<double> gradient(extent), residual(extent, 0.0), ratios;
    exchange->on_rescale([&](double ratio) {
      ratios.push_back(ratio);
      for (double& x : residual) x *= ratio;
    });
    auto const run = [&](double own, double scale) {
      for (std::size_t i = 0; i < extent; ++i) gradient[i] = own * 3 * (i + 1);  // divides exactly
      exchange->bind({{gradient, residual}}, {}, {}, batch_of_one, own);
      communicator.run(exchange);
      for (double const x : gradient) delivered[rank] += x / scale;
    };
    run(256, 256);
    run(rank == 2 ? 0 : 1024, 1024);
    run(rank == 2 ? 0 : 64, 64);
    EXPECT_EQ(ratios, (std::vector<double>{256, 4, 0.0625}));
    for (double const x : residual) kept[rank] += x / 64;
    try {
      run(rank == 2 ? 0 : 512 << rank, 1);
      ADD_FAILURE() << "they agreed";
    } catch (Mismatch const& error) {
      EXPECT_NE(std::string_view(error.what())
                    .find(": loss_scale: 1024 on rank 1 but 512 on ranks 0, 2;"),
                std::string_view::npos)
          << error.what();
    }
  }));
  EXPECT_GT(delivered[0], 0);
  EXPECT_EQ(delivered[0], delivered[2]);
  // Without the step in which they disagreed.
  double const all = 3.0 * (extent * (extent + 1) / 2) * (3 + 2 + 2);
  EXPECT_EQ(3 * delivered[0] + kept[0] + kept[1] + kept[2], all);
}

}  // namespace
}  // namespace sparsecomm::test
