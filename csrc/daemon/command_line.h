// The command line of sparsecomm-aggregator.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "daemon/server.h"

namespace sparsecomm {

struct AggregatorCommand {
  AggregatorOptions options;
  std::string tokens;  // a file; empty: none are asked for
  bool help = false;
};

// Throws InvalidArgument that names the argument, its value and what it must be.
AggregatorCommand parse_command_line(std::span<char const* const> arguments);
std::string aggregator_usage();

// "268435456", "256MiB", "1GiB", "64KiB".
std::size_t parse_bytes(std::string_view text);

}  // namespace sparsecomm
