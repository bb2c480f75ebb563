// The jobs of an aggregator: memory, disagreement in time, and what arrives out of turn.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "ina/host.h"
#include "ina/worker.h"
#include "ina_run.h"

namespace sparsecomm::test {
namespace {

constexpr Duration limit = std::chrono::seconds(10);
constexpr JobId job_a{1, 2};
constexpr JobId job_b{1, 3};

// A host, and what it has said to each connection.
class InaHostTest : public ::testing::Test, protected InaHost::Outlet {
 protected:
  void send(int connection, std::uint32_t instance, InaMessage const& message,
            std::shared_ptr<void const> memory) override {
    said_[{connection, instance}].push_back(assemble(message));
    held_.push_back(std::move(memory));
  }
  void send_copy(int connection, std::uint32_t instance,
                 std::span<const std::byte> message) override {
    said_[{connection, instance}].emplace_back(message.begin(), message.end());
  }
  void drop(int connection, InaHost::DropCause /*cause*/, std::string const& why) override {
    dropped_[connection] = why;
  }
  void begun(InaJobReport const& job) override { begun_.push_back(job.id); }
  void ended(InaJobReport const& job) override { ended_.push_back(job); }
  void refused(JobId const& /*job*/, RefusalReason reason, std::string_view /*text*/) override {
    reasons_.push_back(reason);
  }

  void join(int connection, JobId job, int worker, int workers) {
    host_.join(connection,
               {.job = job,
                .workers = static_cast<std::uint16_t>(workers),
                .worker = static_cast<std::uint16_t>(worker)},
               now_);
  }

  InaHost::Place place(int connection, std::uint32_t instance, Bytes const& bytes) {
    return host_.place(connection, instance, bytes.size(),
                       std::span(bytes).first(std::min(bytes.size(), opening_bytes)), now_);
  }
  void deliver(int connection, std::uint32_t instance, Bytes const& bytes) {
    auto const to = place(connection, instance, bytes);
    if (to.bytes.empty()) return;
    ASSERT_EQ(to.bytes.size(), bytes.size());
    std::ranges::copy(bytes, to.bytes.begin());
    host_.receive(connection, instance, to.bytes, now_);
  }

  // The first message of an operation; its data is kept until the next one of that worker.
  Bytes opening(int worker, std::uint32_t operation, InaPlan const& plan) {
    auto& data = data_[worker];
    data.assign(plan.bytes(), std::byte{1});
    return assemble(workers_[worker].start(plan, worker, operation, data, data, now_, limit));
  }

  // All that the connection has been told since it was asked last.
  std::vector<Bytes> told(int connection, std::uint32_t instance = 0) {
    return std::exchange(said_[{connection, instance}], {});
  }
  Refusal refusal(int connection, std::uint32_t operation, int workers) {
    auto const messages = told(connection);
    EXPECT_EQ(messages.size(), 1u);
    if (messages.size() != 1) return {RefusalReason::invalid, {}, {}};
    return parse_refusal(messages[0], operation, workers);
  }

  static constexpr InaPlan plan{.elements = 100, .block_bytes = 64, .workers = 2, .window = 4};

  InaHost host_{{.memory = 1 << 20, .round = limit}, *this};
  TimePoint now_{std::chrono::hours(1)};
  std::map<std::pair<int, std::uint32_t>, std::vector<Bytes>> said_;
  std::map<int, std::string> dropped_;
  std::vector<JobId> begun_;
  std::vector<InaJobReport> ended_;
  std::vector<RefusalReason> reasons_;
  std::vector<std::shared_ptr<void const>> held_;
  std::map<int, InaWorker> workers_;
  std::map<int, Bytes> data_;
};

int made = 0;  // aggregators, by counting_policy

constexpr InaPolicy counting_policy = {
    .make_worker = vote_policy.make_worker,
    .make_aggregator =
        [](InaPlan const& largest) {
          ++made;
          return vote_policy.make_aggregator(largest);
        },
};

TEST_F(InaHostTest, NothingIsMadeOfWhatIsNotAdmitted) {
  made = 0;
  InaHost host({.memory = 1 << 20, .round = limit}, *this, counting_policy);
  host.join(0, {.job = job_a, .workers = 2, .worker = 0}, now_);
  InaPlan huge = plan;
  huge.block_bytes = most_block_bytes;
  huge.window = most_blocks;
  for (auto const& [operation, wanted, count] : {std::tuple{1u, huge, 0}, {2u, plan, 1}}) {
    auto const bytes = opening(0, operation, wanted);
    host.place(0, 0, bytes.size(), std::span(bytes).first(opening_bytes), now_);
    EXPECT_EQ(made, count);
  }
  EXPECT_EQ(refusal(0, 1, 2).reason, RefusalReason::not_admitted);
}

TEST_F(InaHostTest, MemoryIsAdmittedOnceForALayoutAndGivenBackWithTheJob) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  EXPECT_EQ(host_.admission().free(), std::size_t{1} << 20);
  for (std::uint32_t operation = 1; operation < 4; ++operation) {
    deliver(0, 0, opening(0, operation, plan));
    EXPECT_EQ(host_.admission().free(), (std::size_t{1} << 20) - instance_bytes(plan));
    deliver(1, 0, opening(1, operation, plan));
    for (int worker : {0, 1}) {
      auto next = workers_[worker].receive(told(worker).at(0), now_);
      while (next) {
        deliver(worker, 0, assemble(*next));
        if (worker == 0) break;
        next.reset();
      }
    }
    while (!workers_[0].done() || !workers_[1].done()) {
      for (int worker : {0, 1}) {
        for (Bytes const& bytes : told(worker)) {
          if (auto const next = workers_[worker].receive(bytes, now_)) {
            deliver(worker, 0, assemble(*next));
          }
        }
      }
    }
    EXPECT_FALSE(host_.expire(now_));
  }
  // Another layout takes the place of the first, once nothing of that is on its way.
  InaPlan wider = plan;
  wider.window = 16;
  held_.clear();
  deliver(0, 0, opening(0, 4, wider));
  EXPECT_EQ(host_.admission().free(), (std::size_t{1} << 20) - instance_bytes(wider));
  host_.leave(0, "");
  EXPECT_EQ(host_.jobs(), 1u);
  host_.leave(1, "");
  EXPECT_EQ(host_.jobs(), 0u);
  EXPECT_EQ(host_.admission().free(), std::size_t{1} << 20);
}

// One worker reduces `blocks` blocks, of which all but the first are zero.
TEST_F(InaHostTest, CountsWhatAJobDoesAndWhatAllDo) {
  InaPlan alone = plan;
  alone.workers = 1;
  alone.elements = 16 * 8;  // 8 blocks, two rounds
  join(0, job_a, 0, 1);
  EXPECT_EQ(begun_, std::vector{job_a});
  Bytes data(alone.bytes());
  data[0] = std::byte{1};
  std::size_t received = 0;
  std::optional<InaMessage> next = workers_[0].start(alone, 0, 1, data, data, now_, limit);
  while (next) {
    Bytes const bytes = assemble(*next);
    received += bytes.size();
    now_ += std::chrono::milliseconds(2);
    deliver(0, 0, bytes);
    next = workers_[0].receive(told(0).at(0), now_);
  }
  ASSERT_TRUE(workers_[0].done());
  InaJobReport const report = host_.reports().at(0);
  EXPECT_EQ(report.id, job_a);
  EXPECT_EQ(report.connected, 1u);
  EXPECT_EQ(report.memory, instance_bytes(alone));
  EXPECT_EQ(report.active, now_);
  for (InaCounts const& counts : {report.counts, host_.counts()}) {
    EXPECT_EQ(counts.operations, 1u);
    EXPECT_EQ(counts.blocks, 1u);
    EXPECT_EQ(counts.zero_blocks, 7u);
    EXPECT_EQ(counts.received_bytes, received);
    EXPECT_GT(counts.sent_bytes, 64u);
  }
  InaPlan huge = alone;
  huge.block_bytes = most_block_bytes;
  huge.window = most_blocks;
  deliver(0, 0, opening(0, 2, huge));
  EXPECT_EQ(reasons_, std::vector{RefusalReason::not_admitted});
  host_.leave(0, "");
  ASSERT_EQ(ended_.size(), 1u);
  EXPECT_EQ(ended_[0].counts.operations, 1u);
  EXPECT_EQ(ended_[0].counts.refused(RefusalReason::not_admitted), 1u);
  EXPECT_EQ(host_.counts().operations, 1u);
  EXPECT_TRUE(host_.reports().empty());
}

TEST_F(InaHostTest, RoundsAreCountedByTheTimeThatTheyTake) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  deliver(0, 0, opening(0, 1, plan));
  now_ += std::chrono::milliseconds(20);
  deliver(1, 0, opening(1, 1, plan));
  InaCounts const& counts = host_.counts();
  EXPECT_DOUBLE_EQ(counts.round_seconds, .02);
  for (std::size_t i = 0; i < counts.rounds.size(); ++i) {
    bool const its_place = i < InaCounts::round_bounds.size() && InaCounts::round_bounds[i] == .03;
    EXPECT_EQ(counts.rounds[i], its_place ? 1u : 0u) << i;
  }
}

TEST_F(InaHostTest, AJobGetsNoMoreMemoryThanOneMayHave) {
  std::size_t const of_one = instance_bytes(plan);
  InaHost host({.memory = 1 << 20, .job_memory = of_one, .round = limit}, *this);
  auto const begin = [&](int connection, std::uint32_t instance, InaPlan const& wanted) {
    auto const bytes = opening(0, instance + 1, wanted);
    host.place(connection, instance, bytes.size(), std::span(bytes).first(opening_bytes), now_);
  };
  host.join(0, {.job = job_a, .workers = 2, .worker = 0}, now_);
  host.join(1, {.job = job_b, .workers = 2, .worker = 0}, now_);
  begin(0, 0, plan);
  EXPECT_TRUE(reasons_.empty());
  begin(0, 1, plan);
  EXPECT_EQ(reasons_, std::vector{RefusalReason::not_admitted});
  begin(1, 0, plan);  // another has its own
  EXPECT_EQ(reasons_.size(), 1u);
  EXPECT_EQ(host.admission().taken(), 2 * of_one);
}

TEST_F(InaHostTest, IdleJobsAreEnded) {
  constexpr Duration idle = std::chrono::seconds(30);
  InaHost host({.memory = 1 << 20, .round = std::chrono::hours(1), .idle = idle}, *this);
  host.join(0, {.job = job_a, .workers = 2, .worker = 0}, now_);
  host.join(1, {.job = job_b, .workers = 2, .worker = 0}, now_);
  now_ += idle / 2;
  auto const bytes = opening(0, 1, plan);
  auto const to = host.place(1, 0, bytes.size(), std::span(bytes).first(opening_bytes), now_);
  ASSERT_EQ(to.bytes.size(), bytes.size());
  now_ += idle / 2 - std::chrono::nanoseconds(1);
  host.expire(now_);
  EXPECT_EQ(host.jobs(), 2u);
  now_ += std::chrono::nanoseconds(1);
  host.expire(now_);
  EXPECT_EQ(host.jobs(), 1u);
  EXPECT_EQ(dropped_.count(0), 1u);
  EXPECT_EQ(ended_.size(), 1u);
  // One that waits in an operation is not idle.
  now_ += idle;
  EXPECT_TRUE(host.expire(now_));
  EXPECT_EQ(host.jobs(), 1u);
}

TEST_F(InaHostTest, AJobThatIsEndedAccusesNobody) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  deliver(0, 0, opening(0, 1, plan));
  held_.clear();
  EXPECT_FALSE(host_.end(job_b, InaHost::DropCause::ended, "an operator"));
  EXPECT_TRUE(host_.end(job_a, InaHost::DropCause::ended, "an operator"));
  EXPECT_EQ(dropped_.size(), 2u);
  EXPECT_TRUE(told(0).empty());
  EXPECT_EQ(host_.admission().taken(), 0u);
  host_.leave(0, "");  // as whoever owns the connection does
  host_.leave(1, "");
  EXPECT_EQ(ended_.size(), 1u);
  EXPECT_THROW(join(2, job_a, 0, 2), InvalidArgument);  // it is not to come back
  join(2, job_b, 0, 2);
  EXPECT_EQ(host_.jobs(), 1u);
}

TEST_F(InaHostTest, WhatIsBeingWrittenKeepsItsMemory) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  Bytes const slow = opening(0, 1, plan);
  auto const to = place(0, 0, slow);  // and arrives slowly
  ASSERT_EQ(to.bytes.size(), slow.size());
  InaPlan other = plan;
  other.elements = 50;
  deliver(1, 0, opening(1, 1, other));
  host_.leave(1, "it is tired");
  // The operation has failed; a worker in its place begins another, with other memory.
  EXPECT_EQ(refusal(0, 1, 2).accused, std::vector{1});
  join(2, job_a, 1, 2);
  InaPlan wider = plan;
  wider.window = 32;
  deliver(2, 0, opening(1, 2, wider));
  std::ranges::copy(slow, to.bytes.begin());
  host_.receive(0, 0, to.bytes, now_);
  EXPECT_TRUE(told(0).empty());
  deliver(0, 0, opening(0, 2, wider));
  EXPECT_EQ(told(0).size(), 1u);
  EXPECT_EQ(told(2).size(), 1u);
}

TEST_F(InaHostTest, ARefusalWaitsForWorkersThatHaveNotBegun) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  InaPlan huge = plan;
  huge.block_bytes = most_block_bytes;
  huge.window = 64;
  huge.elements = std::uint64_t{1} << 25;
  deliver(0, 0, opening(0, 1, huge));
  EXPECT_EQ(refusal(0, 1, 2).reason, RefusalReason::not_admitted);
  EXPECT_TRUE(told(1).empty());
  deliver(0, 0, opening(0, 2, huge));
  EXPECT_EQ(refusal(0, 2, 2).reason, RefusalReason::not_admitted);
  deliver(0, 0, opening(0, 3, plan));
  for (std::uint32_t const operation : {1, 2}) {
    deliver(1, 0, opening(1, operation, huge));
    EXPECT_EQ(refusal(1, operation, 2).reason, RefusalReason::not_admitted);
  }
  deliver(1, 0, opening(1, 3, plan));
  EXPECT_EQ(told(0).size(), 1u);
  EXPECT_EQ(told(1).size(), 1u);
}

// Worker 0 has sent on before the refusal has reached it, and worker 1 has gone on.
TEST_F(InaHostTest, AMessageOfARefusedOperationIsSkippedAfterOthersHaveGoneOn) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  deliver(0, 0, opening(0, 1, plan));
  deliver(1, 0, opening(1, 1, plan));
  auto const next = workers_[0].receive(told(0).at(0), now_);
  ASSERT_TRUE(next.has_value());
  Bytes const in_flight = assemble(*next);
  auto broken = workers_[1].receive(told(1).at(0), now_);
  ASSERT_TRUE(broken.has_value());
  Bytes bytes = assemble(*broken);
  bytes.back() ^= std::byte{1};
  deliver(1, 0, bytes);
  EXPECT_EQ(refusal(0, 1, 2).accused, std::vector{1});
  EXPECT_EQ(refusal(1, 1, 2).accused, std::vector{1});
  deliver(1, 0, opening(1, 2, plan));
  deliver(0, 0, in_flight);
  deliver(0, 0, opening(0, 2, plan));
  EXPECT_EQ(told(0).size(), 1u);
  EXPECT_EQ(told(1).size(), 1u);
}

TEST_F(InaHostTest, ASuccessorIsToldTheRefusalOnceMore) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  deliver(0, 0, opening(0, 1, plan));
  deliver(1, 0, opening(1, 1, plan));
  host_.leave(1, "it is tired");
  join(2, job_a, 1, 2);
  deliver(2, 0, opening(1, 1, plan));
  EXPECT_EQ(refusal(2, 1, 2).reason, RefusalReason::lost);
}

TEST_F(InaHostTest, AnOperationThatIsOverIsNotBegunAgain) {
  join(0, job_a, 0, 1);
  InaPlan alone = plan;
  alone.workers = 1;
  alone.elements = 10;
  deliver(0, 0, opening(0, 5, alone));
  EXPECT_EQ(told(0).size(), 1u);
  for (std::uint32_t const operation : {5, 4}) {
    Bytes const bytes = opening(0, operation, alone);
    EXPECT_THROW(place(0, 0, bytes), MalformedFrame);
  }
}

TEST_F(InaHostTest, AWorkerThatWasLostBeforeIsAccusedAtOnce) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  host_.leave(1, "out of tune");
  deliver(0, 0, opening(0, 1, plan));
  Refusal const told_to_0 = refusal(0, 1, 2);
  EXPECT_EQ(told_to_0.reason, RefusalReason::lost);
  EXPECT_EQ(told_to_0.accused, std::vector{1});
  EXPECT_NE(told_to_0.text.find("out of tune"), std::string::npos) << told_to_0.text;
  // Back again, it gets the refusal too; the next operation goes well.
  join(2, job_a, 1, 2);
  deliver(2, 0, opening(1, 1, plan));
  EXPECT_EQ(refusal(2, 1, 2).reason, RefusalReason::lost);
  deliver(0, 0, opening(0, 2, plan));
  deliver(2, 0, opening(1, 2, plan));
  EXPECT_EQ(told(0).size(), 1u);
}

TEST_F(InaHostTest, ASecondConnectionOfAWorkerTakesThePlaceOfTheFirst) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  deliver(1, 0, opening(1, 1, plan));
  join(2, job_a, 0, 2);
  EXPECT_EQ(dropped_.count(0), 1u);
  EXPECT_EQ(refusal(1, 1, 2).accused, std::vector{0});
  // It may be the only one.
  join(3, job_b, 0, 1);
  join(4, job_b, 0, 1);
  EXPECT_EQ(dropped_.count(3), 1u);
  EXPECT_EQ(host_.jobs(), 2u);
}

TEST_F(InaHostTest, MembersThatDoNotFitAreNotTaken) {
  join(0, job_a, 0, 2);
  EXPECT_THROW(join(1, job_a, 1, 3), InvalidArgument);
  EXPECT_THROW(join(1, job_b, 2, 2), InvalidArgument);
  EXPECT_THROW(join(1, job_b, 0, 0), InvalidArgument);
  EXPECT_THROW(join(1, job_b, 0, 1025), InvalidArgument);
  EXPECT_EQ(host_.jobs(), 1u);
  EXPECT_THROW(place(1, 0, opening(1, 1, plan)), InvalidArgument);
  host_.leave(1, "");  // never joined
}

TEST_F(InaHostTest, TheLimitAccusesWhoIsMissing) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  deliver(0, 0, opening(0, 1, plan));
  EXPECT_TRUE(host_.expire(now_));
  now_ += limit;
  EXPECT_FALSE(host_.expire(now_));
  EXPECT_EQ(refusal(0, 1, 2).accused, std::vector{1});
  EXPECT_TRUE(told(1).empty());
  deliver(1, 0, opening(1, 1, plan));
  EXPECT_EQ(refusal(1, 1, 2).reason, RefusalReason::late);
}

TEST_F(InaHostTest, WhatIsOutOfTurnEndsTheConnection) {
  join(0, job_a, 0, 2);
  join(1, job_a, 1, 2);
  Bytes const first = opening(0, 1, plan);
  auto const malformed = [&](int connection, std::uint32_t instance, Bytes const& bytes) {
    EXPECT_THROW(place(connection, instance, bytes), MalformedFrame);
  };
  malformed(1, 0, first);                               // of worker 0
  malformed(0, AggregatorLink::most_instances, first);  // no such instance
  malformed(0, 0, Bytes(first.begin(), first.begin() + 40));
  malformed(0, 0, Bytes(sizeof(InaHeader), std::byte{7}));
  Bytes later = first;
  later[offsetof(InaHeader, round)] = std::byte{1};
  malformed(0, 0, later);  // of an operation that has not begun
  InaPlan wrong = plan;
  wrong.workers = 3;
  malformed(0, 0, opening(0, 1, wrong));
  Bytes longer = opening(0, 1, plan);
  longer.resize(longer.size() + 100000);
  malformed(0, 0, longer);
  // Twice in a round, and another operation while one is under way.
  join(0, job_a, 0, 2);
  deliver(0, 0, opening(0, 2, plan));
  malformed(0, 0, opening(0, 2, plan));
  malformed(0, 0, opening(0, 3, plan));
  EXPECT_TRUE(told(1).empty());
}

}  // namespace
}  // namespace sparsecomm::test
