// OmniReduce's policy: each worker tells, with every block, its next one that is not zero, and the
// smallest of these is reduced next. Block fusion puts d such sequences into one message, each over
// a column of the array: block i belongs to column i mod d.
//
// 1. A worker scans its whole input for blocks that are not zero.
// 2. In each round and for each column that is not at its end, it sends the column's block, if it
//    has it, and the number of its next block in that column, none at the end.
// 3. The aggregator adds the blocks, takes the smallest next number of each column, and sends both
//    to every worker. Columns without a next block end; so does the operation, with the last one.
//
// 1 + max over columns of u_c rounds, u_c the blocks of the column behind its first that are not
// zero on some worker. The messages are those of message.h, with a number for each column where
// votes stand there; a worker without a block sends the numbers alone, as over links that lose
// messages. Source: Fei et al. 2021 (OmniReduce), sections 3 and 4; compared by Gu et al. 2024.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ina/aggregator.h"
#include "ina/worker.h"

namespace sparsecomm {

class NextPointerWorker final : public WorkerMachine {
 public:
  InaMessage start(InaPlan const& plan, int rank, std::uint32_t operation,
                   std::span<const std::byte> input, std::span<std::byte> output, TimePoint now,
                   Duration limit) override;
  std::optional<InaMessage> receive(std::span<const std::byte> message, TimePoint now) override;

 private:
  InaMessage contribute();
  std::uint32_t next_in_column(std::uint32_t block) const;
  bool has(std::uint64_t block) const { return (nonzero_[block / 64] >> (block % 64) & 1) != 0; }

  InaPlan plan_;
  int rank_ = 0;
  std::uint32_t operation_ = 0, round_ = 0;
  std::span<const std::byte> input_;
  std::span<std::byte> output_;
  TimePoint deadline_{};
  Duration limit_{};
  BlockList round_blocks_;  // one for each column that has not ended
  bool running_ = false;
  std::vector<std::uint64_t> nonzero_;  // a bit for each block of the input
  std::vector<std::byte> spot_, head_;  // of the message in flight
};

class NextPointerAggregator final : public InaAggregator {
 public:
  using InaAggregator::InaAggregator;

 protected:
  ContributionView parse(std::span<const std::byte> message, int worker,
                         InaExpected const& expected) const override;
  BlockList merge(BlockList const& votes, BlockList const& more) const override;
  BlockList conclude(BlockList const& votes) const override;
};

}  // namespace sparsecomm
