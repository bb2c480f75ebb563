#include "ina/plan.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <vector>

#include "ina/message.h"

namespace sparsecomm {
namespace {

// Appends the values of one field, if they differ: the first few, so that many workers that all
// differ take no long text and no time that grows with their square.
template <class ValueOf>
void append_differences(std::string& text, std::string_view field, std::span<const InaPlan> plans,
                        ValueOf value_of) {
  constexpr std::size_t most_values = 4;
  using Value = decltype(value_of(plans[0]));
  std::vector<Value> values;
  std::vector<std::vector<int>> workers;
  std::vector<int> others;
  for (int worker = 0; worker < static_cast<int>(plans.size()); ++worker) {
    Value const value = value_of(plans[static_cast<std::size_t>(worker)]);
    auto const found = std::ranges::find(values, value);
    if (found != values.end()) {
      workers[static_cast<std::size_t>(found - values.begin())].push_back(worker);
    } else if (values.size() < most_values) {
      values.push_back(value);
      workers.push_back({worker});
    } else {
      others.push_back(worker);
    }
  }
  if (values.size() < 2) return;
  text += concat(text.empty() ? "" : "; ", field, ": ");
  for (std::size_t i = 0; i < values.size(); ++i) {
    text += concat(i == 0 ? "" : " but ", values[i], " on ", join_workers(workers[i]));
  }
  if (!others.empty()) text += concat(" but others on ", join_workers(others));
}

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  std::less<> const before;
  return !a.empty() && !b.empty() && before(a.data(), b.data() + b.size()) &&
         before(b.data(), a.data() + a.size());
}

bool may_be_block(std::uint32_t bytes) {
  return std::has_single_bit(bytes) && bytes >= least_block_bytes && bytes <= most_block_bytes;
}

}  // namespace

void require_block_bytes(std::uint32_t block_bytes) {
  require(may_be_block(block_bytes), "block_bytes = ", block_bytes, " is not a power of two from ",
          least_block_bytes, " to ", most_block_bytes);
}

BlockList InaPlan::first_blocks() const {
  BlockList list;
  std::uint64_t const count = std::min<std::uint64_t>(window, blocks());
  for (std::uint32_t number = 0; number < count; ++number) list.push_back(number);
  return list;
}

std::string problem(InaPlan const& plan) {
  if (std::size_t(plan.type) >= element_types().size()) {
    return concat("type is ", int(plan.type), ", must be less than ", element_types().size());
  }
  if (std::size_t(plan.reduction) >= reductions().size()) {
    return concat("reduction is ", int(plan.reduction), ", must be less than ",
                  reductions().size());
  }
  if (std::size_t(plan.order) >= combine_orders().size()) {
    return concat("order is ", int(plan.order), ", must be 0 (arrival) or 1 (rank)");
  }
  if (!may_be_block(plan.block_bytes)) {
    return concat("block_bytes is ", plan.block_bytes, ", must be a power of two from ",
                  least_block_bytes, " to ", most_block_bytes);
  }
  if (plan.window < 1 || plan.window > most_blocks) {
    return concat("window is ", int(plan.window), ", must be from 1 to ", most_blocks);
  }
  if (plan.workers < 1) return "workers is 0, must be at least 1";
  constexpr std::uint64_t most_numbers = std::numeric_limits<std::uint32_t>::max();
  std::uint64_t const most_elements = most_numbers * plan.block_bytes / plan.entry().bytes;
  if (plan.elements > most_elements) {
    return concat("elements is ", plan.elements, ", must be at most ", most_elements,
                  ", since blocks of ", plan.block_bytes,
                  " bytes have 32-bit numbers; use larger blocks");
  }
  return {};
}

void require_plan(InaPlan const& plan) {
  std::string const text = problem(plan);
  require(text.empty(), "in-network aggregation: ", text);
}

void require_data(InaPlan const& plan, std::span<const std::byte> input,
                  std::span<const std::byte> output) {
  require(input.size() == plan.bytes() && output.size() == plan.bytes(),
          "in-network aggregation: an input of ", input.size(), " bytes and an output of ",
          output.size(), ", must both have the ", plan.bytes(), " of ", plan.elements,
          " elements of ", name(plan.type));
  require(input.data() == output.data() || !overlap(input, output),
          "in-network aggregation: input and output overlap in part; use the same memory or none "
          "of it");
}

std::size_t instance_bytes(InaPlan const& plan) {
  std::size_t const spot = most_message_bytes(plan);
  return plan.workers * spot + 2 * (spot - plan.round_bytes() + plan.sum_bytes());
}

std::string join_workers(std::span<const int> workers) {
  constexpr std::size_t most_named = 16;
  if (workers.size() > most_named) {
    return concat("workers ", workers[0], " and ", workers.size() - 1, " others");
  }
  std::string text = workers.size() == 1 ? "worker" : "workers";
  char const* separator = " ";
  for (int const worker : workers) {
    text += concat(separator, worker);
    separator = ", ";
  }
  return text;
}

std::string plan_differences(std::span<const InaPlan> plans) {
  std::string text;
  auto const append = [&](std::string_view field, auto value_of) {
    append_differences(text, field, plans, value_of);
  };
  append("elements", [](InaPlan const& plan) { return plan.elements; });
  append("type", [](InaPlan const& plan) { return name(plan.type); });
  append("reduction", [](InaPlan const& plan) { return name(plan.reduction); });
  append("block_bytes", [](InaPlan const& plan) { return plan.block_bytes; });
  append("window", [](InaPlan const& plan) { return int(plan.window); });
  append("order", [](InaPlan const& plan) { return name(plan.order); });
  append("workers", [](InaPlan const& plan) { return plan.workers; });
  append("purpose", [](InaPlan const& plan) { return plan.purpose; });
  return text;
}

}  // namespace sparsecomm
