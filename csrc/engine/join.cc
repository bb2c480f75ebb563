#include "engine/join.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "engine/names_of_ranks.h"

namespace sparsecomm {
namespace {

class Failure final : public Operation {
 public:
  explicit Failure(std::exception_ptr error) : error_(std::move(error)) {}
  Proposal prepare() override { std::rethrow_exception(error_); }
  void run(Channel& /*channel*/, Agreement const& /*agreement*/) override {}

 private:
  std::exception_ptr error_;
};

Pending make_stand_in(Join& join, std::string_view description) {
  try {
    return join.stand_in(description);
  } catch (...) {
    return {.operation = std::make_shared<Failure>(std::current_exception())};
  }
}

}  // namespace

void JoinedRanks::clear() {
  if (has_joined_.empty()) return;  // in nearly all rounds
  has_joined_.clear();
  descriptions_.clear();
}

void JoinedRanks::update(NamesOfRanks const& all, int size) {
  std::vector<bool> joined(static_cast<std::size_t>(size));
  if (all.holds(Join::name)) {
    for (int const rank : all.holders(Join::name).ranks) {
      joined[static_cast<std::size_t>(rank)] = true;
      if (!contains(rank)) last_ = rank;
    }
  }
  has_joined_ = std::move(joined);
  if (descriptions_.size() > most_descriptions) descriptions_.clear();
  for (std::string_view const name : all.names()) {
    NamesOfRanks::Holders const& holders = all.holders(name);
    if (!holders.description.empty()) descriptions_.emplace(holders.key, holders.description);
  }
}

std::vector<Pending> JoinedRanks::make_stand_ins(NamesOfRanks const& all, int rank,
                                                 Join& join) const {
  std::vector<Pending> made;
  auto const going = std::ranges::count(has_joined_, false);
  for (std::string_view const name : all.names()) {
    NamesOfRanks::Holders const& holders = all.holders(name);
    auto const is_here = std::ranges::find(holders.ranks, rank) != holders.ranks.end();
    auto const holding =
        std::ranges::count_if(holders.ranks, [this](int other) { return !contains(other); });
    if (is_here || going == 0 || holding < going) continue;
    auto const known = descriptions_.find(holders.key);
    std::string_view const description =
        known != descriptions_.end() ? known->second : std::string_view();
    // One that has failed or was cancelled on all ranks that have it needs no more than a name.
    Pending pending = holders.goes ? make_stand_in(join, description)
                                   : Pending{.operation = std::make_shared<Nothing>()};
    pending.ticket = std::make_shared<Ticket>(runtime_);
    pending.name = PendingList::is_key(name) ? std::string_view() : name;
    pending.priority = holders.priority;
    pending.stands_in = true;
    made.push_back(std::move(pending));
  }
  return made;
}

}  // namespace sparsecomm
