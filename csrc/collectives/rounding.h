// Values that travel in a lossy codec: the sender rounds them and keeps the error.
#pragma once

#include <span>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/pairs.h"

namespace sparsecomm {

// Rounds copies of values, span by span, and says what that took away.
template <class V>
class Rounding {
 public:
  explicit Rounding(ValueCodec codec) : codec_(codec) {}

  bool lossy() const { return find_value_codec(codec_)->lossy; }
  // Of the calls that follow. Nothing that differs in a resumed run is part of the key.
  void begin(int rank, std::uint64_t step) {
    key_ = {.seed = static_cast<std::uint64_t>(rank), .operation = step, .stream = 0};
  }
  // In place; the span is what one frame carries. No two spans of a step are rounded alike.
  void round(std::span<V> values) {
    round_values<V>(codec_, values, key_);
    ++key_.stream;
  }

 private:
  ValueCodec codec_;
  RoundingKey key_;
};

// Appends the errors, where there are any, of entries that `rounded` stands for.
template <class V>
void push_errors(SparseView<V> exact, std::span<const V> rounded, Pairs<V>& out) {
  for (std::size_t i = 0; i < exact.nnz(); ++i) {
    if (V const error = exact.values[i] - rounded[i]; error != 0) out.push(exact.indices[i], error);
  }
}

}  // namespace sparsecomm
