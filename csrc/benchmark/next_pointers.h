// OmniReduce's policy: each worker tells, with every block, its next one that is not zero, and the
// smallest of these is reduced next. Block fusion puts d such sequences into one message, each over
// a column of the array: block i belongs to column i mod d.
//
// 1. In each round and for each column that is not at its end, a worker sends the column's block if
//    that is not zero, and the number of its next block of the column that is not zero, none at the
//    end.
// 2. The aggregator adds the blocks, takes the smallest next number of each column, and sends both
//    to every worker. Columns without a next block end; so does the operation, with the last one.
// 3. A worker writes the blocks; those that a column skips are zero on all workers.
//
// 1 + max over columns of u_c rounds, u_c the blocks of the column behind its first that are not
// zero on some worker. The messages are those of message.h, with a number for each column where
// votes stand there; a worker without a block sends the numbers alone, as over links that lose
// messages. Source: Fei et al. 2021 (OmniReduce), sections 3 and 4; compared by Gu et al. 2024.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ina/aggregator.h"
#include "ina/worker_machine.h"

namespace sparsecomm {

class NextPointerWorker final : public WorkerMachine {
 private:
  void prepare() override;
  InaMessage contribute(std::uint64_t& sent) override;
  UpdateView parse(std::span<const std::byte> message, InaExpected const& expected) const override;
  void check_next(UpdateView const& update) const override;
  std::uint32_t find_from(std::uint64_t block) const;

  std::array<std::uint32_t, most_blocks>
      next_{};                          // [column]: own block not sent yet; none: no more
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
