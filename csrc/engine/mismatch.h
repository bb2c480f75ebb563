// Fields of proposals, and what differs between those of ranks that disagree.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace sparsecomm {

// The longest value of a proposal that is shown whole.
inline constexpr std::size_t longest_shown_value = 96;

// Cuts each longer value, and adds its size and its hash: values that differ still differ, and the
// fields behind a long one, such as a number for every rank, still have room in a message.
std::string shorten_values(std::string_view proposal);

// Finds the value of a field of a proposal's text; empty if there is none.
std::string_view field_of(std::string_view proposal, std::string_view name);

// texts[r] is rank r's, as "name=value;name=value". Returns each field that differs, with the ranks
// that have each value: "numel: 10 on ranks 0, 1 but 12 on rank 2; dtype: ...".
std::string differences(std::span<const std::string> texts);

}  // namespace sparsecomm
