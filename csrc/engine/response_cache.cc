#include "engine/response_cache.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"

namespace sparsecomm {

ResponseCache::ResponseCache(std::size_t capacity) : capacity_(capacity) {
  require(capacity > 0, "a response cache of ", capacity, " names; it must hold 1 or more");
}

std::optional<ResponseCache::Id> ResponseCache::find(std::string const& name) const {
  auto const found = ids_.find(name);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

ResponseCache::Id ResponseCache::add(std::string name, std::function<bool(Id)> const& unused) {
  auto const least =
      slots_.size() < capacity_ ? order_.end() : std::ranges::find_if(order_, unused);
  Id id = 0;
  if (least == order_.end()) {
    id = static_cast<Id>(slots_.size());
    slots_.push_back({.name = {}, .agreed = {}, .place = order_.insert(order_.end(), id)});
  } else {
    id = *least;
    ids_.erase(slots_[id].name);
    slots_[id].agreed.reset();
    use(id);
  }
  slots_[id].name = name;
  ids_.emplace(std::move(name), id);
  return id;
}

void ResponseCache::use(Id id) { order_.splice(order_.end(), order_, slots_[id].place); }

}  // namespace sparsecomm
