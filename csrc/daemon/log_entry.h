// What an operator may want to know: a sentence, and what it is about by name, for programs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sparsecomm {

enum class LogLevel : std::uint8_t { debug, info, warning, error };

struct LogEntry {
  LogLevel level = LogLevel::info;
  std::string text;
  std::vector<std::pair<std::string_view, std::string>> fields = {};
};

using Log = std::function<void(LogEntry const& entry)>;

}  // namespace sparsecomm
