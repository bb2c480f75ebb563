// Joins the aggregators whose addresses the ranks of a communicator were given: its first
// operation, before anybody else's.
//
// 1. The agreement before it compares the addresses, and combines what each rank has drawn to the
//    identity of a job.
// 2. Connect to all aggregators as a worker of that job.
// 3. The ranks tell each other whether that went well, by a census. If it did not on some rank,
//    every rank throws the same AggregatorsUnavailable and ends its connections; the communicator
//    stays usable, and its next operation joins anew.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "collectives/figures.h"
#include "engine/communicator.h"
#include "engine/payload.h"
#include "ina/tcp_link.h"

namespace sparsecomm {

// A rank could not join the aggregators; the same text on all ranks.
class AggregatorsUnavailable : public Error {
 public:
  using Error::Error;
};

class JoinAggregators final : public Operation {
 public:
  // Throws InvalidArgument where an address is not HOST:PORT.
  explicit JoinAggregators(AggregatorAddresses const& given);

  // Connected once this operation has run.
  std::shared_ptr<AggregatorLink> link() const { return link_; }

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

  Problem join(Channel& channel, JobId const& job);

  std::shared_ptr<UnconnectedLink> const link_;
  Duration const limit_;
  std::string const text_;  // of the proposal
  JobId drawn_{};
  CensusAllreduce<Problem> problems_;
};

// Of a communicator whose ranks were given addresses, whose link becomes that of the options; null:
// there is nothing to join. A rank alone needs none.
std::unique_ptr<JoinAggregators> make_joining(CommunicatorOptions& options, int size);

// Over the link of the options; null: it has none. A wait for an aggregator ends when those for
// ranks do.
std::unique_ptr<InaClient> make_client(CommunicatorOptions& options, Transport const& transport,
                                       Interruptibles& interruptibles);

}  // namespace sparsecomm
