// Input patterns for exchanges. All values are small integers, so that every sum of them is exact
// in every dtype and results can be compared with ==.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <vector>

namespace sparsecomm::test {

struct Pattern {
  std::string_view name;
  // The gradient of `rank` at `step`; a pure function, so that any rank can know all ranks'
  // gradients.
  std::vector<int> (*make)(int rank, int size, std::size_t numel, std::uint64_t step);
};

inline std::mt19937_64 generator(int rank, std::uint64_t step) {
  return std::mt19937_64(0x5eed + 1000003u * static_cast<unsigned>(rank) + step);
}

inline constexpr Pattern patterns[] = {
    {"uniform",
     [](int rank, int, std::size_t numel, std::uint64_t step) {
       auto random = generator(rank, step);
       std::vector<int> gradient(numel);
       for (int& x : gradient) x = static_cast<int>(random() % 33) - 16;
       return gradient;
     }},
    {"shared support",  // all ranks' large entries in the same places
     [](int rank, int, std::size_t numel, std::uint64_t step) {
       auto random = generator(rank, step);
       std::vector<int> gradient(numel);
       for (std::size_t i = 0; i < numel; ++i) {
         gradient[i] = static_cast<int>(random() % 3) - 1 + (i * 7 % 11 == 0 ? 12 : 0);
       }
       return gradient;
     }},
    {"clustered in one region",  // what breaks even regions and shares
     [](int rank, int, std::size_t numel, std::uint64_t step) {
       auto random = generator(rank, step);
       std::vector<int> gradient(numel);
       for (std::size_t i = 0; i < numel / 8; ++i)
         gradient[i] = static_cast<int>(random() % 17) - 8;
       return gradient;
     }},
    {"disjoint ranks",
     [](int rank, int size, std::size_t numel, std::uint64_t) {
       std::vector<int> gradient(numel);
       for (std::size_t i = 0; i < numel; ++i) {
         if (static_cast<int>(i * size / std::max<std::size_t>(numel, 1)) == rank)
           gradient[i] = 1 + int(i % 5);
       }
       return gradient;
     }},
    {"all equal",
     [](int, int, std::size_t numel, std::uint64_t) { return std::vector<int>(numel, 3); }},
    {"all zero",
     [](int, int, std::size_t numel, std::uint64_t) { return std::vector<int>(numel, 0); }},
    {"zero on odd ranks",
     [](int rank, int, std::size_t numel, std::uint64_t step) {
       auto random = generator(rank, step);
       std::vector<int> gradient(numel);
       for (int& x : gradient) x = rank % 2 == 1 ? 0 : static_cast<int>(random() % 9) - 4;
       return gradient;
     }},
    {"cancelling",  // the sum over ranks is zero for even P, while every rank has entries to send
     [](int rank, int, std::size_t numel, std::uint64_t) {
       std::vector<int> gradient(numel);
       for (std::size_t i = 0; i < numel; ++i)
         gradient[i] = (rank % 2 == 0 ? 1 : -1) * (1 + int(i % 7));
       return gradient;
     }},
};

template <class T>
std::vector<T> typed(std::vector<int> const& values) {
  std::vector<T> result(values.size());
  std::ranges::transform(values, result.begin(), [](int x) { return T(static_cast<float>(x)); });
  return result;
}

}  // namespace sparsecomm::test
