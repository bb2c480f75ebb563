// Joins the aggregators whose addresses the ranks of a communicator were given: its first
// operation, before anybody else's. And takes those again that were lost and are back, before
// another operation now and then: the ranks count operations alike, and know of the same losses.
//
// 1. The agreement before it compares the addresses, and combines what each rank has drawn to the
//    identity of a job.
// 2. Connect to all aggregators as a worker of that job; later, to those that are lost.
// 3. The ranks tell each other whether that went well, by a census. If it did not on some rank,
//    every rank throws the same AggregatorsUnavailable and ends its connections; the communicator
//    stays usable, and its next operation joins anew. Later, they use the aggregators again that
//    all of them have reached, and do without the others for twice as many operations.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "collectives/figures.h"
#include "engine/communicator.h"
#include "engine/payload.h"
#include "ina/tcp_link.h"

namespace sparsecomm {

// A rank could not join the aggregators.
class AggregatorsUnavailable : public AgreedError {
 public:
  using AgreedError::AgreedError;
};

// Unlike those of other groups of ranks.
JobId draw_job();

class JoinAggregators final : public Operation {
 public:
  // `retry`: CommunicatorOptions::aggregator_retry. Throws InvalidArgument where an address is not
  // HOST:PORT.
  JoinAggregators(AggregatorAddresses const& given, int retry);
  // They are joined already.
  JoinAggregators(std::shared_ptr<AggregatorLink> link, int retry);

  // Operations between two attempts to take lost aggregators again, at most.
  static constexpr int longest_wait = 4096;
  // Of an attempt, for all that are lost.
  static constexpr Duration attempt_limit = std::chrono::seconds(1);

  // Connected once this operation has run.
  std::shared_ptr<AggregatorLink> link() const { return link_; }

  // Whether this is to run before the next operation: to be asked once before each.
  bool due(InaClient& client);

  Proposal prepare() override;
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override;
  void run(Channel& channel, Agreement const& agreement) override;

 private:
  // As it travels: what is wrong on the lowest of the ranks that could not join.
  struct Problem {
    std::int32_t rank;  // as many as there are ranks: none
    std::uint32_t text_bytes;
    std::array<char, 504> text;
  };

  JobMember member(Channel const& channel) const;
  Problem join(Channel& channel);
  void join_again(Channel& channel);

  std::shared_ptr<UnconnectedLink> const unconnected_;  // null: it was given connected
  std::shared_ptr<AggregatorLink> const link_;
  Duration const limit_{};  // of connecting to all
  std::string const text_;  // of the proposal
  JobId drawn_{};
  std::optional<JobId> job_;  // none before it is agreed
  CensusAllreduce<Problem> problems_;
  CensusAllreduce<std::uint64_t> reached_;
  bool joined_;
  InaClient* client_ = nullptr;
  int const retry_;
  int waited_ = 0, wait_;  // operations, since one was lost or the last attempt
};

// Of a communicator whose ranks were given addresses, whose link becomes that of the options, or a
// link; null: there are no aggregators. A rank alone needs none.
std::unique_ptr<JoinAggregators> make_joining(CommunicatorOptions& options, int size);

// Over the link of the options; null: it has none. A wait for an aggregator ends when those for
// ranks do.
std::unique_ptr<InaClient> make_client(CommunicatorOptions& options, Transport const& transport,
                                       Interruptibles& interruptibles);

}  // namespace sparsecomm
