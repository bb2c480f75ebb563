// The kernels on several threads give the bits of one, whichever of their parts runs when.
#include "kernels/parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kernel_problems.h"
#include "thread_executor.h"

namespace sparsecomm {
namespace {

TEST(Executor, RunsEachPartOnce) {
  for (auto const& executor : executors()) {
    for (std::size_t const parts : {0, 1, 2, 3, 100}) {
      std::vector<int> runs(parts, 0);
      for_each_part(*executor, parts, [&](std::size_t part, std::size_t worker) {
        EXPECT_LT(worker, executor->threads());
        ++runs[part];
      });
      EXPECT_EQ(runs, std::vector<int>(parts, 1));
    }
  }
}

TEST(Executor, ClaimsInOrder) {
  for (auto const& executor : executors()) {
    std::vector<std::size_t> claims;
    std::vector<int> worked(1000, 0), finished(1000, 0);
    for_each_part_in_order(
        *executor, 1000, [&](std::size_t part, std::size_t) { ++worked[part]; },
        [&](std::size_t part, std::size_t) {
          EXPECT_EQ(worked[part], 1);
          EXPECT_EQ(finished[part], 0);
          claims.push_back(part);
        },
        [&](std::size_t part, std::size_t) { ++finished[part]; });
    EXPECT_EQ(claims.size(), 1000u);
    EXPECT_TRUE(std::ranges::is_sorted(claims));
    EXPECT_EQ(finished, std::vector<int>(1000, 1));
  }
}

template <class T>
using Parallel = KernelInputs<T>;
TYPED_TEST_SUITE(Parallel, ElementTypes);

// More than three parts, the last of them short.
constexpr std::size_t large = (std::size_t{1} << 18) + 3;

TYPED_TEST(Parallel, SelectionsEqualOneThreads) {
  using V = accumulate_t<TypeParam>;
  SelectionScratch<V> scratch;
  auto const all_executors = executors();
  std::size_t const sizes[] = {0, 17, large};
  for (std::size_t const size : sizes) {
    this->for_each_input({size}, [&](std::size_t, auto& g, auto& r, auto& random) {
      Problem<TypeParam> const problem(size, random() % 16, g, r, random);
      // Each case at the edge of what a part is told too late: room and ties run out early, in a
      // later part, or not at all.
      std::size_t const limits[] = {0, 1000, size / 3, size - size / 8, no_limit};
      std::uint64_t const ties[] = {0, 1, 70'000, size / 2, std::uint64_t{1} << 40};
      for (auto const& table : kernel_tables<TypeParam>()) {
        std::size_t const limit = limits[random() % std::size(limits)];
        Threshold<V> const threshold{V(random() % 3), ties[random() % std::size(ties)]};
        auto const& executor = *all_executors[random() % all_executors.size()];
        SCOPED_TRACE(concat(table.target, ", limit ", limit, ", threshold ", threshold.magnitude,
                            " with ", threshold.ties, " ties, ", executor.threads(), " threads"));
        auto expected_problem = problem;
        auto const expected =
            run_fused(kernel_tables<TypeParam>().front(), expected_problem, threshold, limit);
        auto actual_problem = problem;
        auto const actual = run<V>(
            [&](Threshold<V>& threshold, PackedSpan<V> out) {
              return fused_error_feedback<TypeParam>(
                  {actual_problem.gradient(), actual_problem.residual()}, threshold, 7, limit, out,
                  scratch, executor, table);
            },
            std::min(limit, size), threshold);
        expect_same(actual, expected);
        EXPECT_TRUE(
            same_entries(actual_problem.gradient_storage, expected_problem.gradient_storage));
        EXPECT_TRUE(
            same_entries(actual_problem.residual_storage, expected_problem.residual_storage));

        auto unchanged = problem;
        std::span<const TypeParam> const x = unchanged.gradient();
        auto const selected = run<V>(
            [&](Threshold<V>& threshold, PackedSpan<V> out) {
              return select<TypeParam>(x, threshold, 7, limit, out, scratch, executor, table);
            },
            std::min(limit, size), threshold);
        expect_same(selected, run_select(kernel_tables<TypeParam>().front(), x, threshold, limit));
      }
    });
  }
}

TYPED_TEST(Parallel, RefusesWhatTheKernelRefuses) {
  using V = accumulate_t<TypeParam>;
  std::vector<TypeParam> x(large);
  std::vector<V> residual(large - 1);
  SelectionScratch<V> scratch;
  ThreadExecutor const executor(2);
  Threshold<V> threshold;
  Packed<V> packed(large - 1);
  EXPECT_THROW(select<TypeParam>(x, threshold, 0, large, packed.span(), scratch, executor),
               InvalidArgument);
  EXPECT_THROW(fused_error_feedback<TypeParam>({x, residual}, threshold, 0, 1, packed.span(),
                                               scratch, executor),
               InvalidArgument);
}

TYPED_TEST(Parallel, AllFiniteFindsEachEntry) {
  using V = accumulate_t<TypeParam>;
  std::vector<TypeParam> x(large, TypeParam(V(1)));
  for (auto const& executor : executors()) {
    for (auto const& table : kernel_tables<TypeParam>()) {
      EXPECT_TRUE(all_finite<TypeParam>(x, *executor, table));
      for (std::size_t const place : {std::size_t{0}, large / 2, large - 1}) {
        x[place] = TypeParam(std::numeric_limits<V>::quiet_NaN());
        EXPECT_FALSE(all_finite<TypeParam>(x, *executor, table));
        x[place] = TypeParam(V(1));
      }
    }
  }
}

TYPED_TEST(Parallel, ThresholdsEqualOneThreads) {
  using V = accumulate_t<TypeParam>;
  using Segments = std::span<const Segment<TypeParam>>;
  ThresholdScratch<V> one, many;
  this->for_each_input({std::size_t{3} << 18}, [&](std::size_t size, auto& g, auto& r,
                                                   auto& random) {
    Problem<TypeParam> problem(size, 0, g, r, random);
    auto const segments = as_segments(problem, size - size / 7);
    std::size_t const k = 1 + random() % (size / 8);
    auto const exact = exact_threshold<TypeParam>(Segments(segments), k, one);
    auto const sampled = sampled_threshold<TypeParam>(Segments(segments), k, 97, 5, one);
    for (auto const& executor : executors()) {
      SCOPED_TRACE(concat("k ", k, ", ", executor->threads(), " threads"));
      auto const& table = kernel_tables<TypeParam>()[random() % kernel_tables<TypeParam>().size()];
      auto const exact_by =
          exact_threshold<TypeParam>(Segments(segments), k, many, *executor, table);
      EXPECT_TRUE(same(exact_by.magnitude, exact.magnitude));
      EXPECT_EQ(exact_by.ties, exact.ties);
      auto const sampled_by =
          sampled_threshold<TypeParam>(Segments(segments), k, 97, 5, many, *executor, table);
      EXPECT_TRUE(same(sampled_by.magnitude, sampled.magnitude));
      EXPECT_EQ(sampled_by.ties, sampled.ties);
    }
  });
}

}  // namespace
}  // namespace sparsecomm
