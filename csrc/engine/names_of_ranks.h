// Names of operations, as ranks tell each other those that others may lack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "collectives/allgather_bytes.h"
#include "engine/pending_list.h"

namespace sparsecomm {

class NamesOfRanks {
 public:
  struct Holders {
    std::vector<int> ranks;
    bool late = false;  // on one of them
    // Those of the first rank on which it goes, if it does on any.
    bool goes = false;
    int priority = 0;
    std::uint64_t key = 0;
    std::string_view description = {};
  };
  // A name of the list. All but the first two are for stand-ins, see Join.
  struct Line {
    std::string_view name;
    bool late = false;
    bool goes = false;  // it has neither failed nor been cancelled
    int priority = 0;
    std::uint64_t key = 0;              // the proposal's
    std::string_view description = {};  // see Operation; empty: the others know it by its key
  };

  // Begins a list.
  static void begin(std::vector<std::byte>& list, std::uint64_t capacity) {
    list.clear();
    append(list, std::as_bytes(std::span(&capacity, 1)));
  }
  static void append(std::vector<std::byte>& list, Line const& line) {
    Head const head{.length = static_cast<std::uint32_t>(line.name.size()),
                    .description = static_cast<std::uint32_t>(line.description.size()),
                    .key = line.key,
                    .priority = line.priority,
                    .flags = (line.late ? late_flag : 0) | (line.goes ? goes_flag : 0)};
    append(list, std::as_bytes(std::span(&head, 1)));
    append(list, std::as_bytes(std::span(line.name)));
    append(list, std::as_bytes(std::span(line.description)));
  }
  // Reads a rank's list, which stays. Throws MalformedFrame where it is none, or began with another
  // capacity.
  void read(int rank, std::span<const std::byte> list, std::uint64_t capacity) {
    auto const theirs = take<std::uint64_t>(list);
    require<MalformedFrame>(theirs == capacity, "a cache of ", theirs, " names instead of ",
                            capacity);
    while (!list.empty()) {
      auto const head = take<Head>(list);
      bool const fits = head.length <= list.size() && head.description <= list.size() - head.length;
      bool const known = (head.flags & ~(late_flag | goes_flag)) == 0;
      require<MalformedFrame>(head.length > 0 && fits && known, "a name of ", head.length,
                              " bytes and a description of ", head.description, " where ",
                              list.size(), " are left, flags are ", head.flags);
      auto const* const text = reinterpret_cast<char const*>(list.data());
      std::string_view const name(text, head.length);
      std::string_view const description(text + head.length, head.description);
      list = list.subspan(head.length + head.description);
      auto const [place, is_first] = holders_.try_emplace(name);
      Holders& holders = place->second;
      require<MalformedFrame>(is_first || holders.ranks.back() != rank, "a name comes twice");
      if (is_first) names_.push_back(name);
      holders.ranks.push_back(rank);
      holders.late = holders.late || (head.flags & late_flag) != 0;
      if (holders.goes || (head.flags & goes_flag) == 0) continue;
      holders.goes = true;
      holders.priority = head.priority;
      holders.key = head.key;
      holders.description = description;
    }
  }
  // In the order in which they were read first.
  std::span<const std::string_view> names() const { return names_; }
  Holders const& holders(std::string_view name) const { return holders_.at(name); }
  bool holds(std::string_view name) const { return holders_.contains(name); }
  // Throws NotSubmitted, the same on all of these ranks, if what is late on one is not in the list
  // of another that has not joined.
  void require_none_late(int ranks, JoinedRanks const& joined) const;

 private:
  static constexpr std::uint32_t late_flag = 1, goes_flag = 2;
  struct Head {
    std::uint32_t length, description;
    std::uint64_t key;
    std::int32_t priority;
    std::uint32_t flags;
  };

  static void append(std::vector<std::byte>& list, std::span<const std::byte> bytes) {
    list.insert(list.end(), bytes.begin(), bytes.end());
  }
  template <class T>
  static T take(std::span<const std::byte>& list) {
    T value;
    require<MalformedFrame>(list.size() >= sizeof value, "names end amid one");
    std::memcpy(&value, list.data(), sizeof value);
    list = list.subspan(sizeof value);
    return value;
  }

  std::vector<std::string_view> names_;
  std::unordered_map<std::string_view, Holders> holders_;
};

// Gathers the lists of all ranks.
class NamesAllgather {
 public:
  // This rank's list.
  void begin(std::uint64_t capacity) { NamesOfRanks::begin(list_, capacity); }
  void add(NamesOfRanks::Line const& line) { NamesOfRanks::append(list_, line); }
  // Throws Error if the lists are longer than may be. The result stays until the next one.
  NamesOfRanks run(Channel& channel, std::uint64_t capacity);

 private:
  static constexpr std::uint64_t longest_list = std::uint64_t{1} << 27;

  std::vector<std::byte> list_;
  BytesAllgather gather_{longest_list};
};

}  // namespace sparsecomm
