// Allreduce of sparse rows: positions with the same number of values each, as the gradient of an
// embedding has them. An index is sent once per row, and there may be up to 2^63 - 1 positions.
//
// An allgather of positions and values, and a local reduction in rank order: the result has the
// union of all ranks' positions, explicit zeros included. 2 ceil(log2 P) messages.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/allgather_bytes.h"
#include "engine/communicator.h"

namespace sparsecomm {

// The first four are those of Reduction. The bitwise ones are for integers.
enum class Fold : std::uint8_t { sum, product, min, max, band, bor, bxor };

std::string_view name(Fold fold);

template <class T>
struct RowView {
  std::span<const std::uint64_t> positions;  // strictly increasing
  std::span<const T> values;                 // row by row
};

struct RowConfig {
  std::string vector;       // what ranks must agree on besides, as "name=value;name=value"
  std::uint64_t count = 0;  // of positions
  std::uint64_t width = 1;  // of a row
  Fold fold = Fold::sum;
  bool average = false;  // divides a sum by the number of ranks
  // Whether a row that a rank does not have is a row of zeros there; otherwise it takes no part.
  bool absent_is_zero = false;
};

// The operation keeps its scratch. One submission at a time: bind again when it has ended.
template <class T>
class RowAllreduce final : public Operation {
 public:
  using V = accumulate_t<T>;

  // Throws InvalidArgument if the fold or the average is not defined for T.
  void configure(RowConfig config);
  // The memory must stay until the operation has ended.
  void bind(RowView<T> contribution) { contribution_ = contribution; }
  // Valid until the next run(); the same bits on every rank.
  RowView<V> result() const { return {positions_, values_}; }

  Proposal prepare() override;
  void run(Channel& channel, Agreement const& agreement) override;

 private:
  struct Arrived {
    std::size_t begin, end;            // in gathered_
    std::span<const std::byte> bytes;  // of the values
  };

  std::span<const std::byte> pack();
  void unpack(Channel& channel, std::span<const std::span<const std::byte>> strings);
  void unite_positions();
  template <class Combine>
  void reduce(Combine combine, int ranks);

  RowConfig config_;
  std::string text_;
  RowView<T> contribution_;
  BytesAllgather gather_;
  ByteBuffer packed_;
  std::vector<std::uint64_t> gathered_;  // positions of rank 0, then of rank 1, and so on
  std::vector<Arrived> arrived_;         // [rank]
  std::vector<std::size_t> bounds_, merged_bounds_;
  std::vector<std::uint64_t> positions_, merged_;
  std::vector<std::uint32_t> contributors_;  // [row of the result]
  std::vector<V> values_;
};

}  // namespace sparsecomm
