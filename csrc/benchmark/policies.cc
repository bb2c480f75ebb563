#include "benchmark/policies.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "benchmark/next_pointers.h"

namespace sparsecomm {
namespace {

class DenseWorker final : public InaWorker {
 protected:
  BlockWalk find(std::span<const std::byte> input, std::size_t block_bytes, std::uint64_t first,
                 std::span<std::byte> slots, std::span<std::uint32_t> numbers) const override {
    std::uint64_t const begin = first * block_bytes;
    std::size_t const bytes = std::min<std::uint64_t>(slots.size(), input.size() - begin);
    std::size_t const found = (bytes + block_bytes - 1) / block_bytes;
    std::memcpy(slots.data(), input.data() + begin, bytes);
    std::ranges::fill(slots.subspan(bytes, found * block_bytes - bytes), std::byte{0});
    for (std::size_t i = 0; i < found; ++i) numbers[i] = static_cast<std::uint32_t>(first + i);
    return {.next = first + found, .found = found};
  }
};

constexpr PolicyEntry table[] = {
    {.name = "ina", .policy = vote_policy},
    {.name = "ina_dense", .policy = policy_of<DenseWorker, InaAggregator>},
    {.name = "omnireduce", .policy = policy_of<NextPointerWorker, NextPointerAggregator>},
};

}  // namespace

std::span<PolicyEntry const> policies() { return table; }

InaPolicy const& policy_named(std::string_view name) {
  std::string names;
  for (PolicyEntry const& entry : table) {
    if (entry.name == name) return entry.policy;
    names += concat(names.empty() ? "" : ", ", entry.name);
  }
  throw InvalidArgument(concat("policy \"", name, "\" is unknown; there are ", names));
}

}  // namespace sparsecomm
