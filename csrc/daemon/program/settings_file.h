// Settings of the aggregator in TOML.
#pragma once

#include <string>
#include <vector>

#include "daemon/command_line.h"

namespace sparsecomm {

// The pairs of a file, sorted by their names. Throws InvalidArgument that names the file
// and the line where it is no TOML, or a value is neither text nor a number.
std::vector<WrittenSetting> read_settings(std::string const& file);

}  // namespace sparsecomm
