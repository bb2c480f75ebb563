#include "engine/join.h"

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

// An operation without a description failed or was cancelled on all ranks that have it.
Pending make_stand_in(Join& join, std::string_view description) {
  if (description.empty()) return {.operation = std::make_shared<Nothing>()};
  try {
    return join.stand_in(description);
  } catch (...) {
    return {.operation = std::make_shared<Failure>(std::current_exception())};
  }
}

}  // namespace

void JoinedRanks::update(NamesOfRanks const& all) {
  std::span<const int> const joined = all.holders(Join::name).ranks;
  for (int const rank : joined) {
    if (!contain(rank)) last_ = rank;
  }
  ranks_.assign(joined.begin(), joined.end());
}

std::vector<Pending> JoinedRanks::stand_ins(NamesOfRanks const& all, int rank, int size,
                                            Join& join) const {
  std::vector<Pending> made;
  std::size_t const going = static_cast<std::size_t>(size) - ranks_.size();
  for (std::string_view const name : all.names()) {
    NamesOfRanks::Holders const& holders = all.holders(name);
    auto const has_joined = [this](int holder) { return contain(holder); };
    auto const here = std::ranges::find(holders.ranks, rank) != holders.ranks.end();
    auto const others = holders.ranks.size() -
                        static_cast<std::size_t>(std::ranges::count_if(holders.ranks, has_joined));
    if (name == Join::name || here || others < going || going == 0) continue;
    Pending pending = make_stand_in(join, holders.description);
    pending.ticket = std::make_shared<Ticket>(runtime_);
    pending.name = PendingList::is_key(name) ? std::string_view() : name;
    pending.priority = holders.priority;
    pending.stands_in = true;
    made.push_back(std::move(pending));
  }
  return made;
}

}  // namespace sparsecomm
