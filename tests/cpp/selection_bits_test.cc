// Fifty steps of every rule of selection give the bits that were recorded, on any machine:
// gradients are made of integers, and nothing here asks libm for more than a square root. That
// leaves out gaussian thresholds, which take logarithms; cuda_exchange_test holds devices to the
// processor.
//
// A failure prints the line to record if the bits are meant to change.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/gradient_exchange.h"
#include "gradients.h"
#include "ranks.h"

namespace sparsecomm::test {
namespace {

constexpr int steps = 50;

struct NamedRule {
  std::string_view name;
  SelectionRule rule;
};

constexpr NamedRule rules[] = {
    {"plain", {}},
    {"gain", {.velocity = {.gain = 0.75}}},
    {"bucket", {.bucket = 64}},
    {"momentum", {.velocity = {.momentum = 0.9}}},
    {"unmasked", {.velocity = {.momentum = 0.9}, .mask_momentum = false}},
    {"nesterov", {.velocity = {.momentum = 0.9, .gain = 0.25, .nesterov = true}}},
    {"first_moment", {.first_moment = 0.9}},
    {"bucket, gain", {.bucket = 100, .velocity = {.gain = 0.75}}},
    {"bucket, nesterov", {.bucket = 64, .velocity = {.momentum = 0.9, .nesterov = true}}},
    {"bucket, first_moment", {.bucket = 64, .first_moment = 0.9}},
    {"block", {.block = 64}},
    {"block, momentum", {.block = 64, .velocity = {.momentum = 0.9}}},
};

// A way to use the rules.
struct Use {
  std::string_view name;
  std::string_view algorithm;
  std::size_t numel = 3000;
  double density = 0.05;
  ThresholdSchedule schedule = {};
  DensityWarmup warmup = {};
  bool feedback = false;
  bool changes = false;  // the gain, from step 17 to 33
};

std::vector<Use> const& uses() {
  static std::vector<Use> const all = {
      {.name = "exact", .algorithm = "topk_a", .schedule = {ThresholdSource::exact, 1}},
      {.name = "warm-up",
       .algorithm = "oktopk",
       .schedule = {ThresholdSource::exact, 1},
       .warmup = {3, 4, {0.5, 0.2}}},
      {.name = "reused", .algorithm = "oktopk", .schedule = {ThresholdSource::reused, 7}},
      // Large enough for a sample.
      {.name = "sampled",
       .algorithm = "oktopk",
       .numel = 20000,
       .density = 0.26,
       .schedule = {ThresholdSource::sampled, 16}},
      {.name = "changes", .algorithm = "topk_a", .schedule = {}, .changes = true},
      {.name = "dense", .algorithm = "dense_rabenseifner"},
      {.name = "feedback", .algorithm = "dense_rabenseifner", .feedback = true},
  };
  return all;
}

// Most entries are far smaller than the largest.
template <class T>
std::vector<T> gradient_of(int rank, std::size_t numel, int step) {
  auto random = generator(rank, step);
  std::vector<T> gradient(numel);
  for (T& x : gradient) {
    std::uint64_t const drawn = random();
    auto const whole = static_cast<float>(static_cast<int>(drawn % 4001) - 2000);
    x = static_cast<T>(whole / static_cast<float>(64u << ((drawn >> 32) % 10)));
  }
  return gradient;
}

template <class E>
void add(Digest& digest, std::vector<E> const& values) {
  digest.add(std::as_bytes(std::span(values)));
}

// Adds what every rank has after every step; one step in ten is withdrawn.
template <class T>
void add_steps(Digest& all, Use const& use, SelectionRule const& rule, int ranks, int segments) {
  using V = accumulate_t<T>;
  std::vector<Digest> digests(ranks);
  expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
    ExchangeOptions options;
    options.algorithm = use.algorithm;
    options.density = use.density;
    options.schedule = use.schedule;
    options.warmup = use.warmup;
    options.feedback = use.feedback;
    options.rule = rule;
    auto const exchange =
        std::make_shared<GradientExchange<T>>("test", use.numel, options, communicator);
    std::vector<V> residual(use.numel), moment(rule.has_moment() ? use.numel : 0);
    Digest& digest = digests[communicator.rank()];
    for (int step = 0; step < steps; ++step) {
      if (use.changes && (step == 17 || step == 34)) {
        VelocityRule velocity = rule.velocity;
        if (step == 17) velocity.gain = 0.5;
        exchange->set_velocity(velocity);
      }
      auto gradient = gradient_of<T>(communicator.rank(), use.numel, step);
      std::vector<Segment<T>> parts;
      for (int s = 0; s < segments; ++s) {
        std::size_t const first = use.numel * s / segments;
        std::size_t const count = use.numel * (s + 1) / segments - first;
        parts.push_back(
            {std::span(gradient).subspan(first, count), std::span(residual).subspan(first, count)});
      }
      exchange->bind(parts, {}, moment);
      communicator.submit(exchange).wait();
      if (step % 10 == 8) exchange->withdraw();
      add(digest, gradient);
      add(digest, residual);
      add(digest, moment);
      digest.add(exchange->state().local_threshold).add(exchange->stats().selected);
    }
  }));
  for (Digest const& digest : digests) all.add(digest.value());
}

std::uint64_t bits_of(Use const& use, SelectionRule const& rule) {
  Digest all;
  auto const add_ranks = [&](int ranks, int segments) {
    add_steps<float>(all, use, rule, ranks, segments);
    add_steps<double>(all, use, rule, ranks, segments);
    add_steps<Half>(all, use, rule, ranks, segments);
    add_steps<BFloat16>(all, use, rule, ranks, segments);
  };
  add_ranks(1, 1);
  add_ranks(1, 3);
  add_ranks(3, 2);
  return all.value();
}

// Hashes in the order of `rules`; 0: that use has no such rule.
struct Recorded {
  std::string_view use;
  std::vector<std::uint64_t> bits;
};

std::vector<Recorded> const& recorded() {
  static std::vector<Recorded> const all = {
      {"exact",
       {0xbedde037d0fc2675, 0x0630773691c7ec60, 0x2bfa99f775170557, 0xdc5c6961e38870bf,
        0xd4d941db2004b45a, 0xae4a14cd5d13b7a3, 0x3c0c3a0be24d937a, 0xccf3d3601cd0c112,
        0xf601c7e96626ae9e, 0x51f7d41aee01ddaa, 0x2076054ced52c83a, 0x769580aa358a6c88}},
      {"warm-up",
       {0x35d8cc250280d850, 0x7f11919b6fa2d877, 0xd51b92c9633ea38e, 0x018de545c5256cd3,
        0xdbd08af4421d60dc, 0x2291360186a98b25, 0x880932acbabd5a65, 0x5c0dd0e85dc0d74f,
        0x6c296a69f1cc8b88, 0xaff777b2421d80ed, 0x069f8a52c299f5e2, 0xab0c5aec48bb08f0}},
      {"reused",
       {0xb459d2070cea34a1, 0x56d8ab63840ede6b, 0x4878e3e09eff881d, 0xa13a7c4960102646,
        0x10e58221af0426df, 0xe1b8b18e67f4e36d, 0x79c09c2211c70ccb, 0xc17e10e36ac0266d,
        0x15fac077d6d0ce34, 0xdba555ca9a1b8bb6, 0xfbab0f79838cbf0e, 0x6637e90be7166be9}},
      {"sampled",
       {0x6fcfb2f96da2f032, 0x3c4cc7656e10eb00, 0x35f7628c5c9034d8, 0xd161ef7f8f9aed8d,
        0x9ecba3ac0fc23ead, 0xaf915aa4d177b8ab, 0x983b6f205a01b4c4, 0xd279d3eba554b7d1,
        0x84caa7bdbc480dc5, 0x7780dff9ff50d8ac, 0xb3e99065d628d067, 0xe6c5a53d2d4cd041}},
      {"changes",
       {0x2dbca10f71ea82ab, 0x1e78bd3bef1be7c4, 0xb06614b26385eeee, 0x83e126d1ea28ccf4,
        0x4bf793cd93df04c7, 0x4934a03987b6ff49, 0x0000000000000000, 0xfacb0229c0b0919a,
        0x91b405bdcc63b0d0, 0x0000000000000000, 0xbdd03e88937a8fc8, 0xdc641eea80796722}},
      {"dense",
       {0x5007a2c82fd63b3e, 0x0000000000000000, 0x0000000000000000, 0x0000000000000000,
        0x0000000000000000, 0x0000000000000000, 0x0000000000000000, 0x0000000000000000,
        0x0000000000000000, 0x0000000000000000, 0x0000000000000000, 0x0000000000000000}},
      {"feedback",
       {0x2cfaca8d0b2be041, 0x9a39892615beafc0, 0x2cfaca8d0b2be041, 0x224cbd385554aac3,
        0x224cbd385554aac3, 0x0f8fb5505a85f1eb, 0x7ea526302dc6aca1, 0x9a39892615beafc0,
        0xc849e4ff1c9e05de, 0x7ea526302dc6aca1, 0x2cfaca8d0b2be041, 0x224cbd385554aac3}},
  };
  return all;
}

class SelectionBits : public ::testing::TestWithParam<std::size_t> {};

INSTANTIATE_TEST_SUITE_P(Uses, SelectionBits, ::testing::Range(std::size_t{0}, uses().size()),
                         [](auto const& info) {
                           std::string name(uses()[info.param].name);
                           std::erase(name, '-');
                           return name;
                         });

TEST_P(SelectionBits, AreThoseThatWereRecorded) {
  Use const& use = uses()[GetParam()];
  std::vector<std::uint64_t> bits;
  std::string line;
  for (NamedRule const& named : rules) {
    bool const possible = [&] {
      if (use.changes && named.rule.first_moment > 0) return false;
      return find_algorithm(use.algorithm).sparse || use.feedback || !named.rule.accumulates();
    }();
    bits.push_back(possible ? bits_of(use, named.rule) : 0);
    char text[24];
    std::snprintf(text, sizeof(text), "0x%016llx, ", static_cast<unsigned long long>(bits.back()));
    line += text;
  }
  auto const found = std::ranges::find(recorded(), use.name, &Recorded::use);
  ASSERT_NE(found, recorded().end()) << "{\"" << use.name << "\", {" << line << "}},";
  EXPECT_EQ(bits, found->bits) << "{\"" << use.name << "\", {" << line << "}},";
}

TEST(Selectors, EachHasARuleWhoseBitsAreRecorded) {
  for (SelectorEntry const& entry : selectors) {
    EXPECT_TRUE(std::ranges::any_of(rules, [&](NamedRule const& named) {
      return named.rule.selector() == entry.id;
    })) << entry.name;
  }
}

}  // namespace
}  // namespace sparsecomm::test
