// A rank that has run out of data joins: until all ranks have, stand-ins that contribute nothing
// take its place in what the others run (Horovod's join). Aggregators are joined in another sense,
// see join_aggregators.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/operation.h"
#include "engine/ticket.h"

namespace sparsecomm {

class NamesOfRanks;  // engine/names_of_ranks.h

// Runs when all ranks have submitted one. It takes part once nothing else is pending on its rank,
// on which nothing else may be submitted before it has ended.
class Join : public Operation {
 public:
  static constexpr std::string_view name = "#join";

  // Makes an operation that goes with one of other ranks, from its description, and contributes
  // nothing; without a name. Called by the thread that runs operations. Throws InvalidArgument
  // where there is none: then the operation fails on all ranks.
  virtual Pending stand_in(std::string_view description) = 0;

  Proposal prepare() final { return {.text = "operation=join"}; }
  void run(Channel& channel, Agreement const& agreement) final { agreement.commit(channel); }
  Batch const* batch() const final { return &batch_of_one; }
  Join* as_join() final { return this; }

  void set_last(int rank) { last_ = rank; }
  // The same on all ranks, when it has ended: the one that joined last; of several the highest.
  int last() const { return last_; }

 private:
  int last_ = 0;
};

// The ranks that have joined, as of the round; the same on all ranks.
class JoinedRanks {
 public:
  // `runtime`: of the tickets of stand-ins.
  explicit JoinedRanks(Runtime runtime) : runtime_(runtime) {}

  void clear();
  // Takes what the lists of all `size` ranks say.
  void update(NamesOfRanks const& all, int size);
  bool contains(int rank) const {
    return !has_joined_.empty() && has_joined_[static_cast<std::size_t>(rank)];
  }
  int last() const { return last_; }
  // Whether all ranks have been told the description of operations with that key.
  bool knows(std::uint64_t key) const { return descriptions_.contains(key); }

  // Makes what a rank that has joined lacks of what all others have pending. Those of which there
  // is no stand-in fail when they are prepared. O(names and ranks that have them).
  std::vector<Pending> make_stand_ins(NamesOfRanks const& all, int rank, Join& join) const;

 private:
  static constexpr std::size_t most_descriptions = 4096;

  Runtime runtime_;
  std::vector<bool> has_joined_;  // [rank]; empty: none has
  int last_ = 0;
  std::unordered_map<std::uint64_t, std::string> descriptions_;  // by key
};

}  // namespace sparsecomm
