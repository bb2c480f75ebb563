// The settings of sparsecomm-aggregator: from its command line, and from a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/log_entry.h"
#include "daemon/server.h"

namespace sparsecomm {

enum class LogFormat : std::uint8_t { text, json };

struct LogSettings {
  LogFormat format = LogFormat::text;
  LogLevel least = LogLevel::info;
  std::string file;  // empty: standard error
};

struct AggregatorCommand {
  AggregatorOptions options;
  std::string tokens;   // a file; empty: none are asked for
  std::string http;     // HOST:PORT of metrics and health; empty: not served
  std::string control;  // path of a Unix socket; empty: none
  Duration drain = std::chrono::seconds(30);
  LogSettings log;
  bool check = false;
  bool help = false;
};

// As it stands in a file; `where` names file and line.
struct WrittenSetting {
  std::string name, value, where;
};
// Reads a file of settings, that of --config. Throws InvalidArgument that names the place.
using SettingsReader = std::function<std::vector<WrittenSetting>(std::string const& file)>;

// What the command line does not set is as the file says. Throws InvalidArgument that names the
// argument, or the place in the file, its value and what it must be.
AggregatorCommand parse_command_line(std::span<char const* const> arguments,
                                     SettingsReader const& read_file);
std::string aggregator_usage();

// The limit of a drain, in seconds.
Duration parse_drain(std::string_view name, std::string_view text);
// "268435456", "256MiB", "1GiB", "64KiB".
std::size_t parse_bytes(std::string_view name, std::string_view text);

}  // namespace sparsecomm
