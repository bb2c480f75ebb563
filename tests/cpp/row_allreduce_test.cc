// The allreduce of sparse rows against a plain computation on dense vectors.
#include "engine/row_allreduce.h"

#include <map>

#include "ranks.h"

namespace sparsecomm {
namespace {

template <class T>
struct Rows {
  std::vector<std::uint64_t> positions;
  std::vector<T> values;
  RowView<T> view() const { return {positions, values}; }
};

constexpr std::uint64_t places = 23;

RowConfig config_of(Fold fold, bool average = false, bool absent_is_zero = false) {
  RowConfig config;
  config.fold = fold;
  config.average = average;
  config.absent_is_zero = absent_is_zero;
  return config;
}

bool has(int pattern, int rank, std::uint64_t place) {
  switch (pattern) {
    case 0:
      return (place * 7 + static_cast<std::uint64_t>(rank) * 3) % 4 == 0;
    case 1:
      return false;
    case 2:
      return rank == 0;
    default:
      return place % 2 == static_cast<std::uint64_t>(rank) % 2;
  }
}

template <class T>
T value_at(int rank, std::uint64_t place, std::uint64_t column) {
  auto const x = static_cast<int>((place + 2 * column + static_cast<std::uint64_t>(rank)) % 4) - 1;
  return static_cast<T>(static_cast<accumulate_t<T>>(x));
}

// Positions are `stride` times the place, so that they may need 64 bits.
template <class T>
Rows<T> rows_of(int pattern, int rank, std::uint64_t width, std::uint64_t stride) {
  Rows<T> rows;
  for (std::uint64_t place = 0; place < places; ++place) {
    if (!has(pattern, rank, place)) continue;
    rows.positions.push_back(place * stride);
    for (std::uint64_t j = 0; j < width; ++j) rows.values.push_back(value_at<T>(rank, place, j));
  }
  return rows;
}

template <class V>
V fold(Fold op, V a, V b) {
  if (op == Fold::sum) return a + b;
  if (op == Fold::product) return a * b;
  if (op == Fold::min) return std::min(a, b);
  if (op == Fold::max) return std::max(a, b);
  if constexpr (std::is_integral_v<V>) {
    if (op == Fold::band) return a & b;
    if (op == Fold::bor) return a | b;
    if (op == Fold::bxor) return a ^ b;
  }
  throw InvalidArgument("no such fold");
}

template <class T>
std::map<std::uint64_t, std::vector<accumulate_t<T>>> expected(int ranks, int pattern,
                                                               RowConfig const& config,
                                                               std::uint64_t stride) {
  using V = accumulate_t<T>;
  std::map<std::uint64_t, std::vector<V>> result;
  for (std::uint64_t place = 0; place < places; ++place) {
    std::vector<V> row;
    bool present = false;
    for (int rank = 0; rank < ranks; ++rank) present |= has(pattern, rank, place);
    if (!present) continue;
    for (std::uint64_t j = 0; j < config.width; ++j) {
      std::vector<V> values;
      for (int rank = 0; rank < ranks; ++rank) {
        if (has(pattern, rank, place)) {
          values.push_back(static_cast<V>(value_at<T>(rank, place, j)));
        } else if (config.absent_is_zero) {
          values.push_back(V{0});
        }
      }
      V total = values.front();
      for (std::size_t i = 1; i < values.size(); ++i) total = fold(config.fold, total, values[i]);
      row.push_back(config.average ? total / static_cast<V>(ranks) : total);
    }
    result[place * stride] = row;
  }
  return result;
}

template <class T>
void check_all(int ranks) {
  using V = accumulate_t<T>;
  std::vector<RowConfig> configs;
  for (auto const op :
       {Fold::sum, Fold::product, Fold::min, Fold::max, Fold::band, Fold::bor, Fold::bxor}) {
    if (op > Fold::max && !std::is_integral_v<T>) continue;
    for (bool const zero : {false, true}) configs.push_back(config_of(op, false, zero));
  }
  if (!std::is_integral_v<T>) configs.push_back(config_of(Fold::sum, true));
  test::expect_no_errors(test::run_ranks(ranks, [&](Communicator& communicator) {
    auto const operation = std::make_shared<RowAllreduce<T>>();
    for (RowConfig config : configs) {
      for (int pattern = 0; pattern < 4; ++pattern) {
        for (std::uint64_t const stride : {std::uint64_t{1}, std::uint64_t{1} << 40}) {
          for (std::uint64_t const width : {1, 3, 0}) {
            config.width = width;
            config.count = places * stride;
            operation->configure(config);
            auto const rows = rows_of<T>(pattern, communicator.rank(), width, stride);
            operation->bind(rows.view());
            communicator.submit(operation).wait();
            std::map<std::uint64_t, std::vector<V>> found;
            auto const result = operation->result();
            ASSERT_EQ(result.values.size(), result.positions.size() * width);
            for (std::size_t i = 0; i < result.positions.size(); ++i) {
              auto const row = result.values.subspan(i * width, width);
              found[result.positions[i]] = std::vector<V>(row.begin(), row.end());
            }
            ASSERT_EQ(found, expected<T>(ranks, pattern, config, stride))
                << name(config.fold) << ", pattern " << pattern << ", width " << width;
          }
        }
      }
    }
  }));
}

class RowAllreduceTest : public testing::TestWithParam<int> {};

TEST_P(RowAllreduceTest, IsTheDenseReduction) {
  check_all<float>(GetParam());
  check_all<double>(GetParam());
  check_all<Half>(GetParam());
  check_all<BFloat16>(GetParam());
  check_all<std::int32_t>(GetParam());
  check_all<std::int64_t>(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Ranks, RowAllreduceTest, testing::Values(1, 2, 3, 5, 8));

TEST(RowAllreduce, RefusesWhatIsNotDefined) {
  EXPECT_THROW(RowAllreduce<float>().configure(config_of(Fold::band)), InvalidArgument);
  EXPECT_THROW(RowAllreduce<std::int32_t>().configure(config_of(Fold::sum, true)), InvalidArgument);
  EXPECT_THROW(RowAllreduce<float>().configure(config_of(Fold::max, true)), InvalidArgument);
}

TEST(RowAllreduce, RefusesValuesThatAreNotWholeRows) {
  auto const errors = test::run_ranks(2, [&](Communicator& communicator) {
    auto const operation = std::make_shared<RowAllreduce<float>>();
    RowConfig config = config_of(Fold::sum);
    config.count = 10;
    config.width = 2;
    operation->configure(std::move(config));
    Rows<float> const rows{{1}, {1}};
    operation->bind(rows.view());
    communicator.submit(operation).wait();
  });
  for (auto const& error : errors) EXPECT_TRUE(error != nullptr);
}

}  // namespace
}  // namespace sparsecomm
