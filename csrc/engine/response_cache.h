// Small numbers for the names of operations, the same on all ranks, and what each rank last
// compared under each: Horovod's response cache (Sergeev and Del Balso 2018; Romero et al. 2022,
// section 3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace sparsecomm {

// Stays the same on all ranks if they call add() and use() alike.
class ResponseCache {
 public:
  using Id = std::uint32_t;
  // A rank's proposal, but for what evolves from what ranks have agreed on.
  struct Proposed {
    std::uint64_t key = 0;
    std::optional<std::uint64_t> version = {};
    std::uint64_t changing = 0;  // without a version
    std::size_t payload_bytes = 0;
    bool payload_is_known = false;
    bool ends_alone = false;
    int priority = 0;
    friend bool operator==(Proposed const&, Proposed const&) = default;
  };

  // `capacity`: names that are kept, 1 or more; of those in use there may be more.
  explicit ResponseCache(std::size_t capacity);

  std::size_t capacity() const { return capacity_; }
  // All ids are below.
  std::size_t size() const { return slots_.size(); }
  std::optional<Id> find(std::string const& name) const;
  std::string const& name(Id id) const { return slots_[id].name; }

  // Gives a name that it lacks an id: a new one, or if the cache is full that of the least recently
  // used name for which `unused` holds, which is forgotten; O(names in use).
  Id add(std::string name, std::function<bool(Id)> const& unused);
  // It is the most recently used one.
  void use(Id id);

  // What this rank proposed under that name when all ranks last agreed; none: it is to be compared.
  std::optional<Proposed> const& agreed(Id id) const { return slots_[id].agreed; }
  void set_agreed(Id id, std::optional<Proposed> proposed) { slots_[id].agreed = proposed; }

 private:
  struct Slot {
    std::string name;
    std::optional<Proposed> agreed;
    std::list<Id>::iterator place;  // in order_
  };

  std::size_t capacity_;
  std::vector<Slot> slots_;
  std::list<Id> order_;  // the least recently used one first
  std::unordered_map<std::string, Id> ids_;
};

}  // namespace sparsecomm
