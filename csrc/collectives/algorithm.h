// The table of allreduce algorithms. Tests, benches, docs and the command line iterate
// algorithms().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "collectives/channel.h"
#include "compress/schedule.h"
#include "sparse/stream.h"

namespace sparsecomm {

// The problem of one call, the same on every rank.
struct SparseProblem {
  std::uint64_t extent = 0;  // N, below 2^32
  std::uint64_t k = 0;  // entries wanted in the selections and, of a lossy algorithm, in the result
  std::uint64_t limit = 0;  // the most entries any rank selected
  std::uint64_t step = 0;   // counts calls; what the periods are measured against
};

struct AlgorithmOptions {
  FrameOptions frame;
  ThresholdSchedule schedule;           // of the global threshold
  std::uint64_t partition_period = 64;  // tau: steps between repartitions
  double balance_factor = 4;  // largest share over average above which shares are evened out
  int window = 8;             // receives posted at once while the former ones are reduced
};

// What an algorithm keeps from step to step and a checkpoint must hold.
struct AlgorithmState {
  std::vector<std::uint32_t> boundaries;
  double global_threshold = 0;  // 0: none yet
};

// A lossless or lossy sum of one sparse selection per rank. V is float or double.
template <class V>
class SparseAllreduce {
 public:
  virtual ~SparseAllreduce() = default;
  // Returns the same bits on every rank, sorted; valid until the next run().
  virtual SparseView<V> run(Channel& channel, SparseView<V> selection,
                            SparseProblem const& problem) = 0;
  virtual AlgorithmState const& state() const = 0;
  virtual void load_state(AlgorithmState state) = 0;
};

// Upper bounds for one rank and one call with the raw32 codec: messages sent, bytes received. Frame
// headers, histograms and a repartition are included, the communicator's agreement is not (see
// agreement_cost).
struct Cost {
  double messages = 0;
  double bytes = 0;
};

struct CostShape {
  int ranks = 1;
  std::uint64_t extent = 0;
  std::uint64_t k = 0;          // the largest selection of any rank
  std::size_t value_bytes = 4;  // on the wire
};

struct AlgorithmEntry {
  std::string_view name;
  std::string_view description;
  std::string_view words;   // the leading term of the words received per rank, for the docs
  std::string_view source;  // paper and section
  bool sparse;              // exchanges selections; otherwise the whole gradient
  bool top_k_result;  // the result is cut to the k largest; what was cut stays in the residuals
  Cost (*cost)(CostShape const& shape, AlgorithmOptions const& options);
  // Null unless sparse.
  std::unique_ptr<SparseAllreduce<float>> (*make_f32)(AlgorithmOptions const&);
  std::unique_ptr<SparseAllreduce<double>> (*make_f64)(AlgorithmOptions const&);
};

std::span<const AlgorithmEntry> algorithms();
// Throws InvalidArgument that lists the names there are.
AlgorithmEntry const& find_algorithm(std::string_view name);

template <class V>
std::unique_ptr<SparseAllreduce<V>> make_sparse_allreduce(AlgorithmEntry const& entry,
                                                          AlgorithmOptions const& options) {
  if constexpr (std::is_same_v<V, double>) {
    return entry.make_f64(options);
  } else {
    return entry.make_f32(options);
  }
}

// The cost of a Bruck allgather whose frames have at most `frame_bytes` bytes.
Cost allgather_cost(int ranks, double frame_bytes);

}  // namespace sparsecomm
