// Failures end an operation on all workers with the same error: disagreement, loss, lateness and
// messages that are not valid. Memory is counted, and refused if it does not suffice.
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <typeinfo>
#include <vector>

#include "allocations.h"
#include "ina/admission.h"
#include "ina/aggregator.h"
#include "ina_run.h"

namespace sparsecomm::test {
namespace {

constexpr TimePoint now{std::chrono::hours(1)};
constexpr Duration limit = std::chrono::seconds(30);

InaPlan small_plan(unsigned workers) {
  return {.elements = 64,
          .block_bytes = 64,
          .workers = static_cast<std::uint16_t>(workers),
          .window = 2};
}

template <class E>
std::string thrown_by(std::function<void()> const& call) {
  try {
    call();
  } catch (E const& error) {
    EXPECT_EQ(typeid(error), typeid(E));
    return error.what();
  } catch (std::exception const& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

// Workers with the plan each, and an aggregator with that of the first.
struct Group {
  explicit Group(std::vector<InaPlan> const& plans) : aggregator(plans[0]), workers(plans.size()) {
    aggregator.start(plans[0], 7, now, limit);
    for (std::size_t i = 0; i < plans.size(); ++i) {
      inputs.emplace_back(plans[i].bytes(), std::byte{1});
      outputs.emplace_back(plans[i].bytes());
    }
    for (std::size_t i = 0; i < plans.size(); ++i) {
      messages.push_back(assemble(
          workers[i].start(plans[i], static_cast<int>(i), 7, inputs[i], outputs[i], now, limit)));
    }
  }
  std::optional<InaMessage> send(int worker, TimePoint at = now) {
    return aggregator.receive(worker, messages[worker], at);
  }

  InaAggregator aggregator;
  std::vector<InaWorker> workers;
  std::vector<Bytes> inputs, outputs, messages;
};

TEST(InaMismatchTest, AllWorkersGetTheSameTextThatNamesTheFields) {
  std::vector<InaPlan> plans(4, small_plan(4));
  plans[2].elements = 80;
  plans[2].reduction = Reduction::max;
  plans[3].window = 5;
  Group group(plans);
  EXPECT_FALSE(group.send(2));
  EXPECT_FALSE(group.send(0));
  EXPECT_FALSE(group.send(3));
  auto const refusal = group.send(1);
  ASSERT_TRUE(refusal);
  EXPECT_TRUE(group.aggregator.failed());
  for (InaWorker& worker : group.workers) {
    EXPECT_EQ(thrown_by<Mismatch>([&] { worker.receive(assemble(*refusal), now); }),
              "in-network aggregation, operation 7: the workers disagree: elements: 64 on workers "
              "0, 1, 3 but 80 on worker 2; reduction: sum on workers 0, 1, 3 but max on worker 2; "
              "window: 2 on workers 0, 1, 2 but 5 on worker 3; make the same calls in the same "
              "order on all workers");
  }
  for (Bytes const& output : group.outputs) EXPECT_EQ(output, Bytes(output.size()));
  EXPECT_FALSE(group.send(1));  // ignored
}

TEST(InaMismatchTest, EveryFieldIsCompared) {
  std::vector<std::pair<std::string, std::function<void(InaPlan&)>>> const changes = {
      {"elements", [](InaPlan& plan) { plan.elements = 63; }},
      {"purpose", [](InaPlan& plan) { plan.purpose = 1; }},
      {"block_bytes", [](InaPlan& plan) { plan.block_bytes = 128; }},
      {"workers", [](InaPlan& plan) { plan.workers = 3; }},
      {"window", [](InaPlan& plan) { plan.window = 64; }},
      {"type", [](InaPlan& plan) { plan.type = ElementType::i32; }},
      {"reduction", [](InaPlan& plan) { plan.reduction = Reduction::min; }},
      {"order", [](InaPlan& plan) { plan.order = CombineOrder::rank; }},
  };
  for (auto const& [field, change] : changes) {
    for (int const first : {0, 1}) {
      std::vector<InaPlan> plans(2, small_plan(2));
      change(plans[1]);
      Group group(plans);
      EXPECT_FALSE(group.send(first));
      EXPECT_TRUE(group.send(1 - first));
      EXPECT_TRUE(group.aggregator.failed()) << field;
      EXPECT_NE(group.aggregator.failure().find("disagree: " + field + ": "), std::string::npos)
          << group.aggregator.failure();
    }
  }
}

TEST(InaMismatchTest, OfManyValuesAndWorkersAFewAreShown) {
  std::vector<InaPlan> plans(40, small_plan(40));
  for (std::size_t i = 0; i < plans.size(); ++i) plans[i].purpose = i < 20 ? 0 : i;
  EXPECT_EQ(plan_differences(plans),
            "purpose: 0 on workers 0 and 19 others but 20 on worker 20 but 21 on worker 21 but 22 "
            "on worker 22 but others on workers 23 and 16 others");
  EXPECT_EQ(plan_differences(std::span(plans).first(20)), "");
}

TEST(InaMismatchTest, AnAggregatorWithAnotherPlanThanAllWorkersSaysSo) {
  Group group({small_plan(2), small_plan(2)});
  InaPlan other = small_plan(2);
  other.elements = 32;
  InaAggregator aggregator(other);
  aggregator.start(other, 7, now, limit);
  EXPECT_FALSE(aggregator.receive(0, group.messages[0], now));
  EXPECT_TRUE(aggregator.receive(1, group.messages[1], now));
  EXPECT_NE(aggregator.failure().find("all have another plan than the aggregator"),
            std::string::npos)
      << aggregator.failure();
}

TEST(InaFailureTest, WhoeverIsLateIsNamedToAll) {
  Group group(std::vector(4, small_plan(4)));
  group.send(2);
  EXPECT_FALSE(group.aggregator.expire(now + limit - Duration(1)));
  auto const refusal = group.send(1, now + limit);
  ASSERT_TRUE(refusal);
  for (InaWorker& worker : group.workers) {
    try {
      worker.receive(assemble(*refusal), now + limit);
      ADD_FAILURE();
    } catch (Timeout const& error) {
      EXPECT_EQ(error.ranks(), (std::vector{0, 1, 3}));
      EXPECT_STREQ(error.what(),
                   "in-network aggregation, operation 7: workers 0, 1, 3 have not sent round 0 "
                   "within 30 s: stopped, cut off or still busy; see their logs, or allow more "
                   "time");
    }
  }
}

TEST(InaFailureTest, ALostWorkerIsNamedToAll) {
  Group group(std::vector(3, small_plan(3)));
  group.send(0);
  auto const refusal = group.aggregator.lose(1);
  ASSERT_TRUE(refusal);
  EXPECT_FALSE(group.aggregator.lose(2));  // all have been told of worker 1
  try {
    group.workers[0].receive(assemble(*refusal), now);
    ADD_FAILURE();
  } catch (PeerLost const& error) {
    EXPECT_EQ(error.ranks(), std::vector{1});
  }
}

TEST(InaFailureTest, AWorkerWithoutAnAnswerGivesUp) {
  Group group(std::vector(2, small_plan(2)));
  EXPECT_NO_THROW(group.workers[0].expire(now + limit - Duration(1)));
  std::string const text =
      thrown_by<AggregationTimeout>([&] { group.workers[0].expire(now + limit); });
  EXPECT_NE(text.find("worker 0 has no update of round 0 of operation 7 within 30 s"),
            std::string::npos)
      << text;
}

TEST(InaFailureTest, ASecondContributionToARoundIsHeldAgainstItsSender) {
  Group group(std::vector(3, small_plan(3)));
  EXPECT_FALSE(group.send(1));
  auto const refusal = group.send(1);
  ASSERT_TRUE(refusal);
  try {
    group.workers[2].receive(assemble(*refusal), now);
    ADD_FAILURE();
  } catch (PeerInvalid const& error) {
    EXPECT_EQ(error.ranks(), std::vector{1});
  }
}

TEST(InaFailureTest, AWorkerThatDoesNotSendWhatItVotedForIsNoticed) {
  InaPlan plan = small_plan(1);
  plan.elements = 16 * 3;
  Group group({plan});
  ASSERT_TRUE(group.send(0));  // which votes for block 2
  ASSERT_EQ(group.aggregator.round_blocks().size(), 1u);
  Bytes head(most_head_bytes(plan.window));
  auto const refusal = group.aggregator.receive(
      0, assemble(encode_contribution({.operation = 7, .round = 1}, plan, {}, {}, {}, head)), now);
  ASSERT_TRUE(refusal);
  EXPECT_NE(thrown_by<MalformedFrame>([&] {
              group.workers[0].receive(assemble(*refusal), now);
            }).find("voted for block 2 but none has sent it in round 1"),
            std::string::npos);
}

// A worker holds an aggregator to what it has sent and voted for.
TEST(InaFailureTest, AnUpdateThatLosesBlocksIsRefusedAndNothingIsWritten) {
  InaPlan const plan = small_plan(1);  // four blocks, none zero: round 0 reduces 0 and 1
  auto const answer = [&](std::vector<std::uint32_t> const& numbers, std::uint64_t bitmap) {
    BlockList next;
    for (std::uint32_t const number : numbers) next.push_back(number);
    Bytes const blocks(64 * static_cast<std::size_t>(std::popcount(bitmap)), std::byte{3});
    Bytes head(most_head_bytes(plan.window));
    return assemble(
        encode_update({.operation = 7, .round = 0, .bitmap = bitmap}, next, blocks, head));
  };
  struct {
    std::vector<std::uint32_t> next;
    std::uint64_t bitmap;
    char const* text;
  } const wrong[] = {
      {{2, 3}, 1, "has sent"},     {{2, 3}, 7, "bitmap"},       {{}, 3, "voted"},
      {{3}, 3, "voted"},           {{1, 2}, 3, "block number"}, {{2, 2}, 3, "block number"},
      {{2, 4}, 3, "block number"}, {{3, 2}, 3, "block number"}, {{2}, 3, "voted"},
  };
  for (auto const& [next, bitmap, text] : wrong) {
    Group group({plan});
    std::string const what =
        thrown_by<MalformedFrame>([&] { group.workers[0].receive(answer(next, bitmap), now); });
    EXPECT_NE(what.find(text), std::string::npos) << what;
    EXPECT_EQ(group.outputs[0], Bytes(plan.bytes()));
    EXPECT_THROW(group.workers[0].receive(answer({2, 3}, 3), now), InvalidArgument);
  }
  Group group({plan});
  EXPECT_TRUE(group.workers[0].receive(answer({2, 3}, 3), now));
}

TEST(InaFailureTest, MessagesToAnOperationThatIsOverAreRefused) {
  InaPlan plan = small_plan(1);
  plan.elements = 16;
  Group group({plan});
  ASSERT_TRUE(group.send(0));
  ASSERT_TRUE(group.aggregator.done());
  EXPECT_THROW(group.send(0), MalformedFrame);
}

TEST(InaMemoryTest, AnInstanceTakesNPlus2TimesBdAndItsHeads) {
  InaPlan plan{.elements = 1000, .block_bytes = 1024, .workers = 8, .window = 16};
  EXPECT_EQ(instance_bytes(plan), (8 + 2) * (1024u * 16 + 4 * 16 + 64));
  plan.order = CombineOrder::rank;
  EXPECT_EQ(instance_bytes(plan), (8 + 2) * (1024u * 16 + 4 * 16 + 64));
  plan.type = ElementType::bf16;
  EXPECT_EQ(instance_bytes(plan), (8 + 2) * (1024u * 16 + 4 * 16 + 64) + 2 * 1024u * 16);
  for (auto const& entry : element_types()) {
    plan.type = entry.id;
    counting = true;
    allocated_bytes = 0;
    InaAggregator const aggregator(plan);
    counting = false;
    EXPECT_GE(allocated_bytes, instance_bytes(plan));
    EXPECT_LE(allocated_bytes, instance_bytes(plan) + 64 * plan.workers);
  }
}

TEST(InaMemoryTest, WhatDoesNotFitIsRefusedWithBothNumbers) {
  InaPlan const plan{.elements = 1000, .block_bytes = 1024, .workers = 8, .window = 16};
  std::size_t const each = instance_bytes(plan);
  Admission admission(2 * each + 5);
  auto first = admission.admit(plan);
  {
    auto const second = admission.admit(plan);
    EXPECT_EQ(second.bytes(), each);
    EXPECT_EQ(admission.free(), 5u);
    std::string const text = thrown_by<NotAdmitted>([&] { admission.admit(plan); });
    EXPECT_NE(text.find(concat("need ", each, " bytes, but 5 of ", 2 * each + 5, " are free")),
              std::string::npos)
        << text;
  }
  auto second = admission.admit(plan);
  first = std::move(second);
  EXPECT_EQ(admission.free(), 5u);
  {
    auto const gone = std::move(second);
  }
  EXPECT_EQ(admission.free(), each + 5);
}

TEST(InaMemoryTest, NothingIsAllocatedBetweenStartAndEnd) {
  std::mt19937 random(1);
  for (CombineOrder const order : {CombineOrder::arrival, CombineOrder::rank}) {
    InaPlan const plan{.elements = 5000,
                       .block_bytes = 64,
                       .workers = 3,
                       .window = 7,
                       .type = ElementType::f16,
                       .order = order};
    std::vector<Bytes> const inputs(3, Bytes(plan.bytes(), std::byte{1}));
    InaAggregator aggregator(plan);
    std::vector<InaWorker> workers(3);
    std::vector<Bytes> outputs(3, Bytes(plan.bytes()));
    Bytes buffer(most_message_bytes(plan));
    auto const join = [&](InaMessage const& message) {
      std::size_t size = 0;
      for (auto const piece : message.pieces()) {
        std::memcpy(buffer.data() + size, piece.data(), piece.size());
        size += piece.size();
      }
      return std::span<const std::byte>(buffer).first(size);
    };
    for (int const repetition : {0, 1}) {
      counting = repetition > 0;
      allocations = 0;
      std::array<std::optional<InaMessage>, 3> ups;
      aggregator.start(plan, 1, now, limit);
      for (int i = 0; i < 3; ++i) {
        ups[i] = workers[i].start(plan, i, 1, inputs[i], outputs[i], now, limit);
      }
      while (!aggregator.done()) {
        std::optional<InaMessage> update;
        for (int const i : {2, 0, 1}) update = aggregator.receive(i, join(*ups[i]), now);
        for (int i = 0; i < 3; ++i) ups[i] = workers[i].receive(join(*update), now);
      }
      counting = false;
    }
    EXPECT_TRUE(workers[0].done());
    EXPECT_EQ(allocations, 0u);
  }
}

TEST(InaArgumentTest, PlansThatNobodyCanRunAreRefused) {
  auto const refused = [](char const* field, std::function<void(InaPlan&)> const& change) {
    InaPlan plan = small_plan(2);
    change(plan);
    std::string const text = thrown_by<InvalidArgument>([&] { InaAggregator aggregator(plan); });
    EXPECT_NE(text.find(concat(field, " is ")), std::string::npos) << text;
  };
  for (std::uint32_t const bytes : {0u, 32u, 96u, 1u << 17}) {
    refused("block_bytes", [&](InaPlan& plan) { plan.block_bytes = bytes; });
  }
  for (int const window : {0, 65, 255}) {
    refused("window", [&](InaPlan& plan) { plan.window = static_cast<std::uint8_t>(window); });
  }
  refused("workers", [](InaPlan& plan) { plan.workers = 0; });
  refused("elements", [](InaPlan& plan) { plan.elements = ((1ull << 32) - 1) * 16 + 1; });
  refused("type", [](InaPlan& plan) { plan.type = ElementType(9); });
  refused("reduction", [](InaPlan& plan) { plan.reduction = Reduction(4); });
  refused("order", [](InaPlan& plan) { plan.order = CombineOrder(2); });
}

TEST(InaArgumentTest, ArraysMustFitThePlanAndEachOther) {
  InaPlan const plan = small_plan(2);
  InaWorker worker;
  Bytes memory(2 * plan.bytes());
  auto const span = std::span(memory);
  auto const start = [&](int rank, std::span<std::byte> input, std::span<std::byte> output) {
    worker.start(plan, rank, 1, input, output, now, limit);
  };
  auto const whole = span.first(plan.bytes());
  EXPECT_THROW(start(2, whole, whole), InvalidArgument);
  EXPECT_THROW(start(-1, whole, whole), InvalidArgument);
  EXPECT_THROW(start(0, whole.first(4), whole), InvalidArgument);
  EXPECT_THROW(start(0, whole, span), InvalidArgument);
  EXPECT_THROW(start(0, whole, span.subspan(4, plan.bytes())), InvalidArgument);
  EXPECT_NO_THROW(start(0, whole, whole));
  EXPECT_NO_THROW(start(0, whole, span.subspan(plan.bytes())));
}

TEST(InaArgumentTest, AnInstanceRunsWhatFitsAndOneOperationAtATime) {
  InaPlan plan = small_plan(3);
  InaAggregator aggregator(plan);
  InaPlan larger = plan;
  larger.window = 3;
  EXPECT_NE(thrown_by<InvalidArgument>([&] { aggregator.start(larger, 1, now, limit); })
                .find(concat("need ", instance_bytes(larger), " bytes, but the instance has ",
                             instance_bytes(plan))),
            std::string::npos);
  plan.workers = 2;
  EXPECT_NO_THROW(aggregator.start(plan, 1, now, limit));
  EXPECT_THROW(aggregator.start(plan, 2, now, limit), InvalidArgument);
}

}  // namespace
}  // namespace sparsecomm::test
