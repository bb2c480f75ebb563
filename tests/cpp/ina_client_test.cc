// Workers reduce through aggregators over each kind of link, and what becomes of that when one of
// them fails.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <set>

#include "ina/client.h"
#include "ina_cluster.h"

namespace sparsecomm::test {
namespace {

using std::chrono::seconds;

constexpr std::size_t memory = std::size_t{64} << 20;

class InaClientTest : public ::testing::TestWithParam<ClusterKind> {
 protected:
  void SetUp() override {
    if (std::string const problem = GetParam().problem(); !problem.empty()) GTEST_SKIP() << problem;
  }
  std::unique_ptr<Aggregators> make(int count, std::size_t bytes = memory,
                                    Duration limit = seconds(20)) const {
    return GetParam().make(count, bytes, limit);
  }
};

INSTANTIATE_TEST_SUITE_P(Links, InaClientTest, ::testing::ValuesIn(cluster_kinds),
                         [](auto const& info) { return std::string(info.param.name); });

JobMember member(int rank, int workers) {
  return {.job = some_job,
          .workers = static_cast<std::uint16_t>(workers),
          .worker = static_cast<std::uint16_t>(rank)};
}

// Any error that f throws, by its type; fails if there is none.
template <class E, class F>
std::string caught(F&& f) {
  try {
    f();
  } catch (E const& error) {
    return error.what();
  } catch (std::exception const& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST_P(InaClientTest, ReducesAsDenseDoes) {
  std::mt19937_64 random(7);
  for (auto const& [workers, aggregators, streams] :
       {std::array{1, 1, 1}, {2, 1, 3}, {3, 2, 4}, {4, 4, 1}, {5, 3, 8}, {2, 1, 64}, {3, 2, 24}}) {
    auto const cluster = make(aggregators);
    std::vector<InaPlan> plans;
    std::vector<std::vector<Bytes>> inputs;
    for (std::uint64_t const elements : {0, 1, 31, 256, 5000, 100000}) {
      for (double const zero : {0., .5, .9, 1.}) {
        plans.push_back({.elements = elements,
                         .block_bytes = elements % 2 == 0 ? 256u : 1024u,
                         .workers = static_cast<std::uint16_t>(workers),
                         .window = 16});
        inputs.emplace_back();
        for (int rank = 0; rank < workers; ++rank) {
          inputs.back().push_back(random_blocks<float>(plans.back(), zero, random));
        }
      }
    }
    for_each_rank(workers, [&](int rank) {
      InaClient client(cluster->connect(member(rank, workers)), rank, streams);
      for (std::size_t i = 0; i < plans.size(); ++i) {
        Bytes const expected = dense_reduction(plans[i], inputs[i]);
        Bytes output(inputs[i][rank].size(), std::byte{0x5a});
        auto const written = client.reduce(plans[i], inputs[i][rank], output, within(seconds(20)));
        ASSERT_EQ(completed(output, written, std::byte{0x5a}), expected) << "plan " << i;
        Bytes in_place = inputs[i][rank];
        client.reduce(plans[i], in_place, in_place, within(seconds(20)));
        ASSERT_EQ(in_place, expected) << "plan " << i;
      }
    });
  }
}

// So long that UCX announces them within a host, and the receiver fetches them.
TEST_P(InaClientTest, LongMessagesGo) {
  constexpr int workers = 2;
  InaPlan const plan{.elements = 200000, .block_bytes = 16384, .workers = workers, .window = 16};
  std::mt19937_64 random(3);
  std::vector<Bytes> inputs(workers);
  for (Bytes& input : inputs) input = random_blocks<float>(plan, .1, random);
  Bytes const expected = dense_reduction(plan, inputs);
  auto const cluster = make(2);
  for_each_rank(workers, [&](int rank) {
    InaClient client(cluster->connect(member(rank, workers)), rank, 3);
    Bytes output(plan.bytes());
    for (int i = 0; i < 5; ++i) {
      client.reduce(plan, inputs[rank], output, within(seconds(20)));
      ASSERT_EQ(output, expected);
    }
  });
}

TEST_P(InaClientTest, OrderByRankHasTheSameBitsInEveryRun) {
  constexpr int workers = 4;
  InaPlan const plan{.elements = 20000, .workers = workers, .order = CombineOrder::rank};
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < workers; ++rank) {
    std::mt19937 random(rank);
    std::normal_distribution<float> normal;
    std::vector<float> values(plan.elements);
    for (float& value : values) value = normal(random);
    auto const bytes = std::as_bytes(std::span(values));
    inputs.emplace_back(bytes.begin(), bytes.end());
  }
  Bytes const expected = dense_reduction(plan, inputs);
  auto const cluster = make(2);
  for_each_rank(workers, [&](int rank) {
    InaClient client(cluster->connect(member(rank, workers)), rank, 4);
    Bytes output(plan.bytes());
    for (int run = 0; run < 5; ++run) {
      client.reduce(plan, inputs[rank], output, within(seconds(20)));
      ASSERT_EQ(output, expected);
    }
  });
}

TEST_P(InaClientTest, WorkersThatDisagreeAreToldSoAlikeAndGoOn) {
  constexpr int workers = 3;
  auto const cluster = make(2);
  std::vector<std::string> told(workers);
  for_each_rank(workers, [&](int rank) {
    InaClient client(cluster->connect(member(rank, workers)), rank, 2);
    InaPlan plan{.elements = rank == 1 ? 30000u : 40000u, .workers = workers};
    Bytes data(plan.bytes());
    told[rank] = caught<Mismatch>([&] { client.reduce(plan, data, data, within(seconds(20))); });
    EXPECT_EQ(client.left(), 3u);
    plan.elements = 1000;
    data.assign(plan.bytes(), std::byte{0});
    reinterpret_cast<float&>(data[0]) = 1;
    client.reduce(plan, data, data, within(seconds(20)));
    EXPECT_EQ(reinterpret_cast<float&>(data[0]), 3.f);
  });
  EXPECT_NE(told[0].find("elements"), std::string::npos) << told[0];
  EXPECT_NE(told[0].find("worker 1"), std::string::npos) << told[0];
  EXPECT_EQ(told[0], told[1]);
  EXPECT_EQ(told[0], told[2]);
}

TEST_P(InaClientTest, WhatIsNotAdmittedIsToldWithBothNumbers) {
  constexpr int workers = 2;
  InaPlan plan{.elements = 40000, .block_bytes = 1024, .workers = workers, .window = 64};
  std::size_t const needed = instance_bytes(plan);
  auto const cluster = make(1, needed - 1);
  for_each_rank(workers, [&](int rank) {
    InaClient client(cluster->connect(member(rank, workers)), rank, 1);
    Bytes data(plan.bytes());
    std::string const told =
        caught<NotAdmitted>([&] { client.reduce(plan, data, data, within(seconds(20))); });
    EXPECT_NE(told.find(std::to_string(needed)), std::string::npos) << told;
    EXPECT_NE(told.find(std::to_string(needed - 1)), std::string::npos) << told;
    InaPlan smaller = plan;
    smaller.window = 32;
    client.reduce(smaller, data, data, within(seconds(20)));
  });
}

TEST_P(InaClientTest, AnAggregatorThatIsLostIsNamedAndTheOthersGoOn) {
  constexpr int workers = 3;
  InaPlan const plan{.elements = 100000, .workers = workers};
  auto const cluster = make(3);
  std::atomic<int> connected = 0;
  std::atomic<bool> killed = false;
  for_each_rank(workers, [&](int rank) {
    auto const link = cluster->connect(member(rank, workers));
    std::string const address = link->address(1);
    InaClient client(link, rank, 2);
    ++connected;
    if (rank == 0) {
      while (connected < workers) std::this_thread::yield();
      cluster->kill(1);
      killed = true;
    }
    while (!killed) std::this_thread::yield();
    Bytes data(plan.bytes());
    std::string const told =
        caught<AggregatorLost>([&] { client.reduce(plan, data, data, within(seconds(20))); });
    EXPECT_NE(told.find(address), std::string::npos) << told;
    EXPECT_EQ(client.left(), 0b101u);
    reinterpret_cast<float&>(data[0]) = 1;
    client.reduce(plan, data, data, within(seconds(20)));
    EXPECT_EQ(reinterpret_cast<float&>(data[0]), 3.f);
  });
}

TEST_P(InaClientTest, AWorkerThatIsLostIsAccusedByTheOthers) {
  constexpr int workers = 3;
  InaPlan const plan{.elements = 100000, .workers = workers};
  auto const cluster = make(2);
  std::atomic<int> connected = 0;
  for_each_rank(workers, [&](int rank) {
    auto link = cluster->connect(member(rank, workers));
    ++connected;
    while (connected < workers) std::this_thread::yield();
    if (rank == 1) return;  // the link goes
    InaClient client(std::move(link), rank, 2);
    Bytes data(plan.bytes());
    try {
      client.reduce(plan, data, data, within(seconds(20)));
      ADD_FAILURE() << "no error";
    } catch (PeerLost const& error) {
      EXPECT_EQ(error.ranks(), std::vector{1}) << error.what();
    }
  });
}

TEST_P(InaClientTest, AWorkerThatDoesNotComeIsAccusedAtTheLimit) {
  constexpr int workers = 2;
  InaPlan const plan{.elements = 10000, .workers = workers};
  auto const cluster = make(1, memory, std::chrono::milliseconds(300));
  auto const absent = cluster->connect(member(1, workers));
  InaClient client(cluster->connect(member(0, workers)), 0, 2);
  Bytes data(plan.bytes());
  try {
    client.reduce(plan, data, data, within(seconds(20)));
    ADD_FAILURE() << "no error";
  } catch (Timeout const& error) {
    EXPECT_EQ(error.ranks(), std::vector{1}) << error.what();
  }
}

TEST_P(InaClientTest, TheDeadlineEndsAWait) {
  InaPlan const plan{.elements = 10000, .workers = 2};
  auto const cluster = make(1);
  InaClient client(cluster->connect(member(0, 2)), 0, 2);
  Bytes data(plan.bytes());
  caught<AggregatorLost>(
      [&] { client.reduce(plan, data, data, within(std::chrono::milliseconds(200))); });
  EXPECT_EQ(client.left(), 0u);
  caught<AggregatorLost>([&] { client.reduce(plan, data, data, within(seconds(20))); });
}

TEST_P(InaClientTest, AnInterruptEndsAWaitAndAllLaterOnes) {
  InaPlan const plan{.elements = 10000, .workers = 2};
  auto const cluster = make(1);
  auto const link = cluster->connect(member(0, 2));
  InaClient client(link, 0, 2);
  Bytes data(plan.bytes());
  std::thread interrupts([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    link->interrupt();
  });
  caught<Interrupted>([&] { client.reduce(plan, data, data, within(seconds(20))); });
  caught<Interrupted>([&] { link->next(within(seconds(20))); });
  interrupts.join();
}

TEST_P(InaClientTest, JobsDoNotNoticeEachOther) {
  auto const cluster = make(2);
  constexpr int workers = 2;
  for_each_rank(2 * workers, [&](int thread) {
    int const rank = thread % workers;
    JobMember who = member(rank, workers);
    who.job[0] += std::uint64_t(thread / workers);
    InaClient client(cluster->connect(who), rank, 2);
    // Different lengths, and in one of the jobs errors now and then.
    for (int i = 1; i < 40; ++i) {
      bool const first = thread < workers;
      bool const wrong = first && i % 5 == 0;
      InaPlan plan{.elements = std::uint64_t(first ? 700 * i : 11 * i), .workers = workers};
      // Of a whole range or of a few streams only.
      if (wrong) plan.elements += std::uint64_t(rank * (i % 2 == 0 ? 1 : 40000));
      Bytes data(plan.bytes());
      reinterpret_cast<float&>(data[0]) = 2;
      if (wrong) {
        caught<Mismatch>([&] { client.reduce(plan, data, data, within(seconds(20))); });
      } else {
        client.reduce(plan, data, data, within(seconds(20)));
        EXPECT_EQ(reinterpret_cast<float&>(data[0]), 4.f);
      }
    }
  });
}

// An aggregator that refuses each message at once, of which half is still to be sent.
class HastyLink final : public AggregatorLink {
 public:
  explicit HastyLink(bool reads) : reads_(reads) {}

  int size() const override { return 1; }
  std::string const& address(int /*aggregator*/) const override { return address_; }
  std::string const& loss(int /*aggregator*/) const override { return closed_; }
  void send(int /*aggregator*/, std::uint32_t instance, InaMessage const& message) override {
    operation_ = parse_ina_header(assemble(message)).operation;
    waiting_.push_back(instance);
    flushed_ = false;
  }
  bool flushed(int /*aggregator*/) const override { return flushed_ || !closed_.empty(); }
  bool flush(int /*aggregator*/, Deadline const& /*deadline*/) override {
    flushed_ = flushed_ || reads_;
    return flushed(0);
  }
  Event next(Deadline const& /*deadline*/) override {
    answer_ = encode_refusal(operation_, {RefusalReason::mismatch, {}, "differs"});
    std::uint32_t const instance = waiting_.back();
    waiting_.pop_back();
    return {Event::Kind::message, 0, instance, answer_};
  }
  void close(int /*aggregator*/, std::string const& why) override { closed_ = why; }
  void reconnect(int /*aggregator*/, JobMember const& /*member*/,
                 Deadline const& /*deadline*/) override {
    throw Error("it is gone");
  }
  void interrupt() noexcept override {}

 private:
  bool const reads_;
  std::string const address_ = "hasty";
  std::string closed_;
  bool flushed_ = true;
  std::uint32_t operation_ = 0;
  std::vector<std::uint32_t> waiting_;
  std::vector<std::byte> answer_;
};

TEST(InaClientFaults, WhatWasRefusedBeforeItHadGoneIsSentOrGivenUp) {
  InaPlan const plan{.elements = 5000, .workers = 1};
  Bytes data(plan.bytes(), std::byte{1});
  for (bool const reads : {true, false}) {
    auto const link = std::make_shared<HastyLink>(reads);
    InaClient client(link, 0, 3);
    caught<Mismatch>([&] { client.reduce(plan, data, data, within(seconds(20))); });
    EXPECT_TRUE(link->flushed(0)) << "else it lies in memory that the next reduction uses";
    EXPECT_EQ(client.left(), reads ? 1u : 0u);
  }
}

// Changes a bit of a message: whoever takes it names it, and the bytes change nothing.
TEST(InaClientFaults, AMessageThatIsChangedIsNamed) {
  constexpr int workers = 2;
  InaPlan const plan{.elements = 100000, .workers = workers};
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < workers; ++rank) {
    std::mt19937_64 own(rank);
    inputs.push_back(random_blocks<float>(plan, 0, own));
  }
  Bytes const expected = dense_reduction(plan, inputs);
  for (bool const up : {true, false}) {
    for (int which = 0; which < 20; which += 3) {
      InprocCluster cluster(1, memory, seconds(20));
      std::mt19937_64 random(which);
      int seen = 0;
      cluster.hub().tamper([&](int, int worker, bool goes_up, std::span<std::byte> bytes) {
        if (worker != 1 || goes_up != up || seen++ != which) return;
        bytes[random() % bytes.size()] ^= std::byte{1};
      });
      std::vector<std::string> told(workers);
      for_each_rank(workers, [&](int rank) {
        InaClient client(cluster.connect(member(rank, workers)), rank, 1);
        Bytes output(plan.bytes());
        try {
          client.reduce(plan, inputs[rank], output, within(seconds(20)));
          EXPECT_EQ(output, expected);
        } catch (Error const& error) {
          told[rank] = error.what();
        }
      });
      ASSERT_GT(seen, which);
      EXPECT_NE(told[1], "") << up << " " << which;  // worker 0 may have been done
    }
  }
}

}  // namespace
}  // namespace sparsecomm::test
