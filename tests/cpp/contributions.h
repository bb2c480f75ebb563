// Contributions to reductions, and ranks that reduce them: a thread and a channel each.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "collectives/algorithm.h"
#include "gradients.h"
#include "ranks.h"

namespace sparsecomm::test {

inline std::vector<std::string> lossless_names() {
  std::vector<std::string> names;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (entry.lossless()) names.emplace_back(entry.name);
  }
  return names;
}

template <class V>
struct Contribution {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  SparseView<V> view() const { return {indices, values}; }
};

// Where a rank's entries lie; pure functions.
struct Support {
  std::string_view name;
  bool (*holds)(int rank, int size, std::uint64_t extent, std::uint64_t i, std::uint64_t random);
};

inline constexpr Support supports[] = {
    {"uniform",
     [](int, int, std::uint64_t, std::uint64_t, std::uint64_t random) { return random % 5 == 0; }},
    {"shared", [](int, int, std::uint64_t, std::uint64_t i, std::uint64_t) { return i % 7 == 3; }},
    {"disjoint", [](int rank, int size, std::uint64_t, std::uint64_t i,
                    std::uint64_t) { return i % (2 * size) == std::uint64_t(2 * rank); }},
    {"clustered", [](int, int, std::uint64_t extent, std::uint64_t i,
                     std::uint64_t random) { return i < extent / 8 && random % 2 == 0; }},
    {"empty on odd ranks", [](int rank, int, std::uint64_t, std::uint64_t,
                              std::uint64_t random) { return rank % 2 == 0 && random % 4 == 0; }},
    {"empty but on the last",
     [](int rank, int size, std::uint64_t, std::uint64_t, std::uint64_t random) {
       return rank == size - 1 && random % 3 == 0;
     }},
    {"empty", [](int, int, std::uint64_t, std::uint64_t, std::uint64_t) { return false; }},
    {"all positions", [](int, int, std::uint64_t, std::uint64_t, std::uint64_t) { return true; }},
};

// Small integers, zeros among them, so that sums and products of a few ranks are exact in every
// type.
template <class V>
Contribution<V> contribute(Support const& support, int rank, int size, std::uint64_t extent) {
  auto random = generator(rank, extent);
  Contribution<V> contribution;
  for (std::uint64_t i = 0; i < extent; ++i) {
    std::uint64_t const bits = random();
    if (!support.holds(rank, size, extent, i, bits >> 8)) continue;
    contribution.indices.push_back(static_cast<std::uint32_t>(i));
    contribution.values.push_back(static_cast<V>(static_cast<int>(bits % 6) - 2));
  }
  return contribution;
}

// As all values of [0, extent).
template <class V>
std::vector<V> expand(StreamView<V> const& view, std::uint64_t extent, Reduction reduction) {
  if (view.is_dense) return {view.dense.begin(), view.dense.end()};
  std::vector<V> values(extent, neutral<V>(reduction));
  for (std::size_t i = 0; i < view.nnz(); ++i)
    values.at(view.sparse.indices[i]) = view.sparse.values[i];
  return values;
}

// errors[r] is what rank r's body threw.
inline std::vector<std::exception_ptr> run_transports(
    std::vector<std::unique_ptr<Transport>>& transports,
    std::function<void(Transport&)> const& body) {
  std::vector<std::exception_ptr> errors(transports.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < transports.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*transports[rank]);
      } catch (...) {
        errors[rank] = std::current_exception();
        transports[rank]->abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace sparsecomm::test
