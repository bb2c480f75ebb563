// What an aggregator has done, in Prometheus' text format (version 0.0.4).
#pragma once

#include <cstddef>
#include <string>

#include "daemon/server.h"

namespace sparsecomm {

inline constexpr char metrics_type[] = "text/plain; version=0.0.4; charset=utf-8";

// `tokens`: that may be used now.
std::string metrics_text(AggregatorReport const& report, std::size_t tokens);

}  // namespace sparsecomm
