#include "engine/mismatch.h"

#include <algorithm>
#include <map>
#include <vector>

#include "base/error.h"
#include "engine/proposal.h"

namespace sparsecomm {
namespace {

std::map<std::string, std::string> fields_of(std::string_view text) {
  std::map<std::string, std::string> fields;
  while (!text.empty()) {
    std::string_view const field = text.substr(0, text.find(';'));
    std::size_t const equals = std::min(field.find('='), field.size());
    fields.emplace(field.substr(0, equals), field.substr(std::min(equals + 1, field.size())));
    text.remove_prefix(std::min(field.size() + 1, text.size()));
  }
  return fields;
}

}  // namespace

std::string_view field_of(std::string_view text, std::string_view name) {
  while (!text.empty()) {
    std::string_view const entry = text.substr(0, text.find(';'));
    if (entry.size() > name.size() && entry.starts_with(name) && entry[name.size()] == '=') {
      return entry.substr(name.size() + 1);
    }
    text.remove_prefix(std::min(entry.size() + 1, text.size()));
  }
  return {};
}

std::string shorten_values(std::string_view proposal) {
  std::string shortened;
  while (!proposal.empty()) {
    std::string_view const field = proposal.substr(0, proposal.find(';'));
    std::size_t const value = std::min(field.find('=') + 1, field.size());
    bool const last = field.size() == proposal.size();
    std::size_t const length = field.size() - value;
    if (length > longest_shown_value) {
      shortened += concat(field.substr(0, value + longest_shown_value), "... (", length,
                          " characters, hash ", Digest().add(field.substr(value)).value(), ")");
    } else {
      shortened += field;
    }
    if (!last) shortened += ';';
    proposal.remove_prefix(last ? proposal.size() : field.size() + 1);
  }
  return shortened;
}

std::string differences(std::span<const std::string> texts) {
  std::map<std::string, std::map<std::string, std::vector<int>>>
      ranks_with;  // field -> value -> ranks
  std::vector<std::map<std::string, std::string>> proposals;
  for (std::string const& text : texts) {
    for (auto const& field : proposals.emplace_back(fields_of(text))) ranks_with[field.first];
  }
  std::string message;
  for (auto& [field, values] : ranks_with) {
    for (int rank = 0; rank < static_cast<int>(proposals.size()); ++rank) {
      auto const found = proposals[rank].find(field);
      values[found == proposals[rank].end() ? "nothing" : found->second].push_back(rank);
    }
    if (values.size() < 2) continue;
    message += concat(message.empty() ? "" : "; ", field, ":");
    char const* separator = " ";
    for (auto const& [value, ranks] : values) {
      message += concat(separator, value, " on ", join_ranks(ranks));
      separator = " but ";
    }
  }
  return message;
}

}  // namespace sparsecomm
