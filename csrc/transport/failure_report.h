// A failure report as bytes, for the boards of transports whose ranks are processes.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "transport/transport.h"

namespace sparsecomm {

std::string serialize_report(FailureReport const& report);

// Null where the bytes are not a report of one of `size` ranks.
std::optional<FailureReport> parse_report(std::string_view bytes, int size);

}  // namespace sparsecomm
