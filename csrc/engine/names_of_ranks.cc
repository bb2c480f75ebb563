#include "engine/names_of_ranks.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/coordinator.h"

namespace sparsecomm {

void NamesOfRanks::require_none_late(int ranks, JoinedRanks const& joined) const {
  Holders unnamed;
  auto const require_all = [&](std::string const& what, Holders const& holders) {
    if (!holders.late) return;
    std::vector<int> missing;
    for (int rank = 0; rank < ranks; ++rank) {
      bool const holds = std::ranges::find(holders.ranks, rank) != holders.ranks.end();
      if (!holds && !joined.contains(rank)) missing.push_back(rank);
    }
    if (missing.empty()) return;
    std::string const text = concat(what, " was submitted by ", join_ranks(holders.ranks), " only");
    throw NotSubmitted(text, std::move(missing));
  };
  for (std::string_view const name : names_) {
    Holders const& holders = holders_.at(name);
    if (name == Join::name) continue;
    if (!PendingList::is_key(name)) {
      require_all(concat("operation '", name, "'"), holders);
      continue;
    }
    unnamed.ranks.insert(unnamed.ranks.end(), holders.ranks.begin(), holders.ranks.end());
    unnamed.late = unnamed.late || holders.late;
  }
  require_all("an operation without a name", unnamed);
  // Last: a rank that waits for another one's operation has not joined because of that.
  if (holds(Join::name)) require_all("a join", holders(Join::name));
}

NamesOfRanks NamesAllgather::run(Channel& channel, std::uint64_t capacity) {
  std::span<const std::span<const std::byte>> lists;
  try {
    lists = gather_.run(channel, list_);
  } catch (AgreedError const& error) {
    throw Error(concat("names of operations: ", error.what()));
  }
  NamesOfRanks all;
  for (int rank = 0; rank < channel.size(); ++rank) {
    channel.decode_from(rank,
                        [&] { all.read(rank, lists[static_cast<std::size_t>(rank)], capacity); });
  }
  return all;
}

}  // namespace sparsecomm
